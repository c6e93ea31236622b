"""Other packages' patches on what ours stands around, in a process of the real SGLang: run by test_coexistence.

    python coexistence.py after  UPSTREAM_REPRO FOLDER    our .pth armed this process, then the other package patches
    python -S coexistence.py before …                     no .pth: the other package patches, then ours is armed

SGLang is imported once; each case runs in a fork of it and builds the attention backend of a later stage as
the release does, with ``triton`` and with ``triton_pp``. Prints one JSON object a case.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORDER, REPRO, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
sys.path.insert(0, REPRO)

import repro  # noqa: E402

repro.run_without_gpu("triton")

# Several threads want SGLang at once.
threads = [threading.Thread(target=__import__, args=("sglang.srt.model_executor.model_runner",)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

import wrapt  # noqa: E402
from sglang.srt.layers.attention import attention_registry, triton_backend  # noqa: E402
from sglang.srt.model_executor import model_runner as runner_module  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import draft_utils  # noqa: E402

try:  # from 0.5.16 on
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup
except ImportError:
    setup = None

ModelRunner = runner_module.ModelRunner
RUNNER = f"{ModelRunner.__module__}.ModelRunner"
BUILDER = "init_attention_backends" if setup else "init_attention_backend"
RESOLVER = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"
DRAFT = f"{draft_utils.__name__}.DraftBackendFactory"
REGISTRY = attention_registry.ATTENTION_BACKENDS

seen: list[str] = []  # what the other package's patches saw


# How another package patches


def before(*args: Any, **kwargs: Any) -> None:
    seen.append("before")


def after(result: Any, *args: Any, **kwargs: Any) -> None:
    seen.append("after")


def around(original: Any, *args: Any, **kwargs: Any) -> Any:
    seen.append("around")
    return original(*args, **kwargs)


def with_wrapt(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    seen.append("wrapt")
    return wrapped(*args, **kwargs)


def hook(target: str, *hooks: tuple[HookType, Any]) -> None:
    for kind, each in hooks:
        HookRegistry.register(target, each, kind)
    HookRegistry.apply_hooks()


def all_kinds(target: str) -> None:
    hook(target, (HookType.BEFORE, before), (HookType.AFTER, after), (HookType.AROUND, around))


def replaced_builder(self: Any) -> None:
    """A builder of another package's own, without SGLang's: it calls what that one calls."""
    seen.append("replace")
    if setup:
        name_backends(self)
        self.attn_backend = setup.build_attention_backends(model_runner=self).attn_backend
    else:
        self.attn_backend = self._get_attention_backend()


def name_backends(runner: Any) -> None:
    """Some releases resolve the names before they build."""
    if hasattr(setup, "resolve_attention_backend_strs"):
        names = setup.resolve_attention_backend_strs(model_runner=runner)
        runner.prefill_attention_backend_str, runner.decode_attention_backend_str = names.prefill, names.decode


def replaced_getter(self: Any, init_new_workspace: bool = False) -> Any:
    seen.append("replace")
    if setup:
        return setup.get_attention_backend(model_runner=self, init_new_workspace=init_new_workspace)
    return self._get_attention_backend_from_str("triton", init_new_workspace=init_new_workspace)


def replace_resolver() -> None:
    original = vars(ServerArgs)[RESOLVER]

    def replacement(self: Any) -> Any:
        seen.append("replace")
        return original(self)

    hook(f"{ServerArgs.__module__}.ServerArgs.{RESOLVER}", (HookType.REPLACE, replacement))


def wrap_factory() -> None:
    stock = REGISTRY["triton"]

    @attention_registry.register_attention_backend("triton")
    def traced(runner: Any) -> Any:
        seen.append("factory")
        return stock(runner)


def own_factory() -> None:
    @attention_registry.register_attention_backend("triton")
    def another_factory(runner: Any) -> Any:
        seen.append("factory")
        return triton_backend.TritonAttnBackend(runner)


def own_class() -> None:
    class Theirs(triton_backend.TritonAttnBackend):
        pass

    @attention_registry.register_attention_backend("triton")
    def another_factory(runner: Any) -> Any:
        seen.append("factory")
        return Theirs(runner)


def subclass() -> type:
    class Theirs(triton_backend.TritonAttnBackend):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            seen.append("class")
            super().__init__(*args, **kwargs)

    return Theirs


def replace_runner() -> None:
    class Theirs(ModelRunner):  # inherits the builders
        pass

    hook(RUNNER, (HookType.REPLACE, Theirs))


def patch_the_pool() -> None:
    """Trace the pool for good, beginning while the backend is being built."""

    def trace(runner: Any) -> None:
        pool = runner.token_to_kv_pool
        getter = pool.get_value_buffer

        def traced(layer_id: int) -> Any:
            seen.append("pool")
            return getter(layer_id)

        pool.get_value_buffer = traced

    hook(
        f"{triton_backend.__name__}.TritonAttnBackend.__init__",
        (HookType.BEFORE, lambda _, runner, **kw: trace(runner)),
    )


def entry_points(first: bool) -> None:
    """Both packages found by SGLang's own loader, ours second or first."""
    (FOLDER / "other-1.dist-info").mkdir(exist_ok=True)
    (FOLDER / "other-1.dist-info/METADATA").write_text("Name: other\nVersion: 1\n")
    (FOLDER / "other-1.dist-info/entry_points.txt").write_text(
        "[sglang.srt.plugins]\nother = other_plugin:register\nbroken = other_plugin:missing\n"
    )
    plugin = types.ModuleType("other_plugin")
    plugin.register = lambda: HookRegistry.register(f"{RUNNER}.{BUILDER}", around, HookType.AROUND)
    sys.modules["other_plugin"] = plugin
    sys.path.insert(0 if first else len(sys.path), str(FOLDER))
    load_plugins()


CASES: dict[str, Callable[[], Any]] = {
    "builder-hooks": lambda: all_kinds(f"{RUNNER}.{BUILDER}"),
    "builder-replace": lambda: hook(f"{RUNNER}.{BUILDER}", (HookType.REPLACE, replaced_builder)),
    "builder-wrapt": lambda: wrapt.wrap_function_wrapper(ModelRunner, BUILDER, with_wrapt),
    "getter-hooks": lambda: all_kinds(f"{RUNNER}._get_attention_backend"),
    "getter-replace": lambda: hook(f"{RUNNER}._get_attention_backend", (HookType.REPLACE, replaced_getter)),
    "getter-wrapt": lambda: wrapt.wrap_function_wrapper(ModelRunner, "_get_attention_backend", with_wrapt),
    "runner-replace": replace_runner,
    "arguments-hooks": lambda: all_kinds(f"{ServerArgs.__module__}.ServerArgs.{RESOLVER}"),
    "arguments-replace": replace_resolver,
    "arguments-wrapt": lambda: wrapt.wrap_function_wrapper(ServerArgs, RESOLVER, with_wrapt),
    "draft-hooks": lambda: all_kinds(f"{DRAFT}.create_decode_backend"),
    "draft-wrapt": lambda: wrapt.wrap_function_wrapper(
        draft_utils.DraftBackendFactory, "create_decode_backend", with_wrapt
    ),
    "factory-wrapped": wrap_factory,
    "factory-own": own_factory,
    "factory-own-class": own_class,
    "class-assigned": lambda: setattr(triton_backend, "TritonAttnBackend", subclass()),
    "class-replace": lambda: hook(f"{triton_backend.__name__}.TritonAttnBackend", (HookType.REPLACE, subclass())),
    "class-init-hooks": lambda: all_kinds(f"{triton_backend.__name__}.TritonAttnBackend.__init__"),
    "pool-patched": patch_the_pool,
    "entry-points-theirs-first": lambda: entry_points(first=True),
    "entry-points-ours-first": lambda: entry_points(first=False),
}


# What the release then builds


def build(case: str, backend: str, folder: Path) -> dict[str, Any]:
    """The backend of stage 1 of (4, 3), whose pool has no layer 0 and fewer layers than it starts at."""
    release = repro.Release(folder, backend, "mla")
    server_args, model_config = release.configure(layers=7)
    pool = release.pool(model_config, 4, 7)
    runner = release.runner(server_args, model_config, pool)
    with contextlib.suppress(AttributeError):
        runner.pp_group = types.SimpleNamespace(rank_in_group=1, world_size=2)
    with contextlib.suppress(AttributeError):
        runner.layer_info = types.SimpleNamespace(start_layer=4, end_layer=7)
    if case.startswith("draft"):
        multi_step = draft_factory(runner).create_decode_backend()
        built = multi_step.attn_backends[0]
    elif case.startswith("getter") and setup:  # as speculative workers call it; before, the builder calls it
        name_backends(runner)
        built = runner._get_attention_backend()
    else:
        release.build_backend(runner)
        built = runner.attn_backend
    return {
        "runner": type(runner).__name__,
        "classes": [cls.__name__ for cls in type(built).__mro__],
        "v_head_dim": built.v_head_dim,
        "left_on_pool": sorted(name for name in vars(pool) if name.startswith("get_")),
    }


def draft_factory(runner: Any) -> Any:
    first = (
        ()
        if setup and "server_args" not in draft_utils.DraftBackendFactory.__init__.__code__.co_varnames
        else (runner.server_args,)
    )
    return draft_utils.DraftBackendFactory(*first, runner, 1, 3)


def run_case(case: str) -> dict[str, Any]:
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("sglang_pp_mla").addHandler(Collect(logging.WARNING))
    folder = FOLDER / f"{ORDER}-{case}"
    folder.mkdir()
    CASES[case]()
    if ORDER == "before":
        from sglang_pp_mla.wiring import arm

        arm()
    from sglang_pp_mla.wiring.arming import decisions

    outcome: dict[str, Any] = {"case": case}
    for backend in ("triton", "triton_pp"):
        seen.clear()
        outcome[backend] = build(case, backend, folder) | {"seen": list(seen)}
    return outcome | {"said": said, "states": {each.fix.name: each.state for each in decisions()}}


def forked(case: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            outcome = run_case(case)
        except BaseException:
            outcome = {"case": case, "error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


if __name__ == "__main__":
    only = sys.argv[4:] or CASES
    for name in only:
        print(json.dumps(forked(name)), flush=True)
