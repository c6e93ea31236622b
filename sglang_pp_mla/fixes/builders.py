"""What builds a runner's attention backends, over all releases, and how a fix is put around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.fix import Change, Changes, Unrecognised

Within = AbstractContextManager[None]

# Each release has one or two of the methods, and from 0.5.16 on the functions that these call. They nest. All
# are wrapped, so that a plugin that replaces one of them outright does not take a fix out with it.
_METHODS = ("init_attention_backend", "init_attention_backends", "_get_attention_backend")
_FUNCTIONS = ("build_attention_backends", "get_attention_backend")


def around_runner_builders(around: Callable[[Any], Within]) -> Mapping[str, Change]:
    """Changes after which a runner's backends are built inside ``around(runner)``; uses nest.

    ``around`` is given None where a function names its runner otherwise, and then does nothing.
    """

    def of_function(_: Any, args: Any, kwargs: Any) -> Within:
        return around(kwargs.get("model_runner", args[0] if args else None))

    def change_model_runner(module: ModuleType, changes: Changes) -> None:
        wrap_all(module.ModelRunner, _METHODS, lambda runner, *_: around(runner), changes)

    def change_setup(module: ModuleType, changes: Changes) -> None:
        wrap_all(module, _FUNCTIONS, of_function, changes)

    return {
        "sglang.srt.model_executor.model_runner": change_model_runner,
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup": change_setup,
    }


def wrap_all(owner: Any, names: tuple[str, ...], within: Callable[[Any, Any, Any], Within], changes: Changes) -> None:
    """Call each of these functions, at least one of which ``owner`` has, inside ``within(instance, args, kwargs)``."""

    def build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with within(instance, args, kwargs):
            return wrapped(*args, **kwargs)

    present = [name for name in names if hasattr(owner, name)]
    if not present:
        raise Unrecognised(f"{owner.__name__} has none of {', '.join(names)}")
    for name in present:
        changes.wrap(owner, name, build)
