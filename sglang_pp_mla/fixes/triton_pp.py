"""The backend name ``triton_pp``: ``triton`` to all of SGLang, built by our factory.

SGLang compares a backend's name with ``"triton"`` in far more places than can be listed (defaults,
deterministic and radix checks, speculative drafts, models), a different set in each release. So the name
ends where the arguments begin to be resolved: the fields become ``triton``, the record keeps a note of
who asked, and only what builds the backend reads the note. Whatever a release does for
``triton`` it thereby does for ``triton_pp``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.builders import around_runner_builders
from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised
from sglang_pp_mla.fixes.ray_plugins import around_actor

NAME = "triton_pp"
FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
# An underscore name is bookkeeping to SGLang, not configuration: it may be set at any time and is pickled
# with the record, which is how it reaches the scheduler processes.
_NOTE = "_sglang_pp_mla_asked_for_by"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"

logger = logging.getLogger("sglang_pp_mla")


def asked_for(runner: Any) -> bool:
    """Whether ``triton_pp`` was given for this runner: the draft's flag is none of the target's business."""
    fields = set(getattr(getattr(runner, "server_args", None), _NOTE, ()))
    if not getattr(runner, "is_draft_worker", False):
        fields.discard("speculative_draft_attention_backend")
    return bool(fields)


def note_and_translate(server_args: Any) -> None:
    """Turn ``triton_pp`` into ``triton`` on a raw record and note the fields it stood in."""
    fields = tuple(name for name in FIELDS if getattr(server_args, name, None) == NAME)
    if not fields:
        if note := _copied.get():
            setattr(server_args, _NOTE, note)
        return
    for name in fields:
        setattr(server_args, name, "triton")
    setattr(server_args, _NOTE, fields)
    flags = ", ".join("--" + name.replace("_", "-") for name in fields)
    logger.info("%s: SGLang resolves %s as triton; each stage reports the backend it builds.", flags, NAME)


def _before_resolution(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    note_and_translate(instance)
    return wrapped(*args, **kwargs)


_copied: ContextVar[tuple[str, ...]] = ContextVar("_copied", default=())


@contextmanager
def copies_keep_the_note(server_args: Any) -> Iterator[None]:
    """Give the note of a record to those that are constructed meanwhile.

    To 0.5.18 the ways to a Ray actor copy the record field by field, which loses what is no field.
    """
    token = _copied.set(getattr(server_args, _NOTE, ()))
    try:
        yield
    finally:
        _copied.reset(token)


def _in_the_actor(init: Callable[..., None]) -> Callable[..., None]:
    note = _NOTE

    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(server_args, note, ()):
            init(self, server_args, *args, **kwargs)
            return
        try:
            from sglang_pp_mla.fixes.triton_pp import copies_keep_the_note
        except ModuleNotFoundError as error:
            import socket

            raise RuntimeError(
                f"triton_pp was asked for and stage PP{kwargs.get('pp_rank', '?')} is on {socket.gethostname()}, where "
                "sglang-pp-mla is not installed; install it there with the Python that runs Ray's workers."
            ) from error
        with copies_keep_the_note(server_args):
            init(self, server_args, *args, **kwargs)

    return __init__


def change_ray_actor(module: ModuleType, changes: Changes) -> None:
    around_actor(module, changes, _in_the_actor)


def _in_the_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with copies_keep_the_note(kwargs["server_args"] if "server_args" in kwargs else args[0]):
        return wrapped(*args, **kwargs)


def change_ray_engine(module: ModuleType, changes: Changes) -> None:
    """From 0.5.11 the engine copies the record once more for data parallelism."""
    if hasattr(module.RayEngine, "_launch_dp_scheduler_processes"):
        changes.wrap(module.RayEngine, "_launch_dp_scheduler_processes", _in_the_engine)


def change_server_args(module: ModuleType, changes: Changes) -> None:
    choices = getattr(module, "ATTENTION_BACKEND_CHOICES", None)
    if not isinstance(choices, list) or "triton" not in choices:
        raise Unrecognised("server_args has no ATTENTION_BACKEND_CHOICES with triton in it")
    changes.append(choices, NAME)
    # From 0.5.20 a record is resolved by a call of its own; before, by its construction.
    start = "resolve_once" if hasattr(module.ServerArgs, "resolve_once") else "__post_init__"
    changes.wrap(module.ServerArgs, start, _before_resolution)


def change_registry(module: ModuleType, changes: Changes) -> None:
    registry = getattr(module, "ATTENTION_BACKENDS", None)
    if not isinstance(registry, dict) or "triton" not in registry:
        raise Unrecognised("attention_registry has no ATTENTION_BACKENDS with triton in it")
    # For those who set the name on a record that is already resolved.
    changes.put(registry, NAME, lambda runner: _create(registry["triton"], runner))


@contextmanager
def _triton_is_triton_pp(runner: Any) -> Iterator[None]:
    """For a runner that is to have it, let the registry's Triton factory make ours.

    Only while its backends are built, so whoever registers a factory of its own, at any time, is the one asked.
    """
    registry = getattr(sys.modules.get(_REGISTRY), "ATTENTION_BACKENDS", {})
    with Changes() as meanwhile:
        if asked_for(runner) and registry.keys() >= {"triton", NAME}:
            factory = registry["triton"]
            if getattr(factory, "func", None) is not _create:  # builders nest
                meanwhile.put(registry, "triton", partial(_create, factory))
        yield


def _create(factory: Callable[[Any], Any], runner: Any) -> Any:
    """The factory, the release's own with its refusals and branches or another package's, constructs our class."""
    from sglang.srt.layers.attention import triton_backend

    from sglang_pp_mla.backend import TritonPPAttnBackend

    with Changes() as meanwhile:
        meanwhile.put(vars(triton_backend), "TritonAttnBackend", TritonPPAttnBackend)
        backend = factory(runner)
    if not isinstance(backend, TritonPPAttnBackend):
        logger.warning(
            "triton_pp gives way on this rank: %s.%s took the place of SGLang's Triton factory and built %s, "
            "which makes none of triton_pp's checks; remove that plugin to have them.",
            getattr(factory, "__module__", "?"),
            getattr(factory, "__qualname__", factory),
            type(backend).__qualname__,
        )
    return backend


def evidence(root: Path) -> list[str]:
    """The name is SGLang's to lack: it is needed wherever there is a Triton backend."""
    path = "srt/layers/attention/triton_backend.py"
    return [path] if (root / path).is_file() else []


FIX = Fix(
    name="triton-pp",
    why="SGLang has no attention backend called triton_pp; this makes it one, resolved as triton.",
    upstream=(),
    goes_away="when this package is uninstalled",
    evidence=evidence,
    changes={
        "sglang.srt.server_args": change_server_args,
        _REGISTRY: change_registry,
        "sglang.srt.ray.scheduler_actor": change_ray_actor,
        "sglang.srt.ray.engine": change_ray_engine,
        **around_runner_builders(_triton_is_triton_pp),
    },
)
