"""Taking changes back while others have patched the same places: theirs stay, ours do nothing any more."""

from __future__ import annotations

from typing import Any

import pytest
import wrapt
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_pp_mla.fixes import Changes
from sglang_pp_mla.probes import stage_local_probes
from sglang_pp_mla.stage import stages_of
from tests.unit.pools import LATENT, make_pool

hook_registry = pytest.importorskip("sglang.srt.plugins.hook_registry", reason="SGLang has plugins from 0.5.11 on")
BUILDER = next(name for name in ("init_attention_backends", "init_attention_backend") if hasattr(ModelRunner, name))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was called, in order, when SGLang's builder is; it is stopped short of building."""
    calls: list[str] = []
    monkeypatch.setattr(ModelRunner, BUILDER, lambda self: calls.append("sglang"))
    monkeypatch.setattr(hook_registry.HookRegistry, "_hooks", type(hook_registry.HookRegistry._hooks)(list))
    monkeypatch.setattr(hook_registry.HookRegistry, "_patched", set())
    return calls


def call() -> None:
    getattr(ModelRunner.__new__(ModelRunner), BUILDER)()


def wrapper(calls: list[str], name: str) -> Any:
    def noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        assert isinstance(instance, ModelRunner)
        calls.append(name)
        return wrapped(*args, **kwargs)

    return noted


def patch_by_hook_registry(calls: list[str]) -> None:
    def around(original: Any, *args: Any) -> Any:
        calls.append("theirs")
        return original(*args)

    registry = hook_registry.HookRegistry
    registry.register(f"{ModelRunner.__module__}.ModelRunner.{BUILDER}", around, hook_registry.HookType.AROUND)
    registry.apply_hooks()


def patch_by_wrapt(calls: list[str]) -> None:
    wrapt.wrap_function_wrapper(ModelRunner, BUILDER, wrapper(calls, "theirs"))


@pytest.mark.parametrize("patch", [patch_by_hook_registry, patch_by_wrapt])
def test_what_was_put_around_ours_stays(calls: list[str], patch: Any) -> None:
    with Changes() as changes:
        changes.wrap(ModelRunner, BUILDER, wrapper(calls, "ours"))
        patch(calls)
        call()
        theirs = vars(ModelRunner)[BUILDER]
    call()
    assert calls == ["theirs", "ours", "sglang", "theirs", "sglang"]
    assert vars(ModelRunner)[BUILDER] is theirs


@pytest.mark.parametrize("patch", [patch_by_hook_registry, patch_by_wrapt])
def test_what_ours_was_put_around_is_put_back(calls: list[str], patch: Any) -> None:
    patch(calls)
    theirs = vars(ModelRunner)[BUILDER]
    with Changes() as changes:
        changes.wrap(ModelRunner, BUILDER, wrapper(calls, "ours"))
        call()
    call()
    assert calls == ["ours", "theirs", "sglang", "theirs", "sglang"]
    assert vars(ModelRunner)[BUILDER] is theirs


def test_a_class_in_sglangs_place_may_inherit_what_is_wrapped(calls: list[str]) -> None:
    class Theirs(ModelRunner):
        pass

    with Changes() as changes:
        changes.wrap(Theirs, BUILDER, wrapper(calls, "ours"))
        getattr(Theirs.__new__(Theirs), BUILDER)()
    getattr(Theirs.__new__(Theirs), BUILDER)()
    assert calls == ["ours", "sglang", "sglang"]
    assert BUILDER not in vars(Theirs)


def test_an_entry_that_others_have_set_since_stays() -> None:
    registry = {"kept": 1, "theirs": 1}
    names = ["triton"]
    with Changes() as changes:
        for key in ("kept", "theirs", "new", "new and theirs"):
            changes.put(registry, key, "ours")
        changes.append(names, "triton_pp")
        registry |= {"theirs": 2, "new and theirs": 2}
        names[:] = ["theirs"]
    assert registry == {"kept": 1, "theirs": 2, "new and theirs": 2}
    assert names == ["theirs"]


def test_a_patch_put_on_the_pool_while_a_backend_is_built_stays() -> None:
    pool = make_pool("mla", stages_of((4, 3))[1])
    asked: list[int] = []
    with stage_local_probes(pool):
        getter = pool.get_value_buffer

        def traced(layer_id: int) -> Any:
            asked.append(layer_id)
            return getter(layer_id)

        pool.get_value_buffer = traced
        assert pool.get_value_buffer(0).shape[-1] == LATENT
    assert pool.get_value_buffer is traced
    with stage_local_probes(pool):  # the next builder
        assert pool.get_value_buffer(0).shape[-1] == LATENT
    assert pool.get_value_buffer is traced
    assert asked == [0, 4]
    assert "get_key_buffer" not in vars(pool)
