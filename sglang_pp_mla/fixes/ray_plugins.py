"""Fix ``ray-plugins``: under ``--use-ray`` the schedulers never load SGLang's plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised

_ACTOR = "srt/ray/scheduler_actor.py"
_FRAMEWORK = "srt/plugins/__init__.py"


def evidence(root: Path) -> list[str]:
    """The actor stands in for ``run_scheduler_process``, which begins by loading the plugins."""
    actor, framework = root / _ACTOR, root / _FRAMEWORK
    if not actor.is_file() or not framework.is_file() or "def load_plugins" not in framework.read_text("utf-8"):
        return []
    return [] if "load_plugins" in actor.read_text("utf-8") else [_ACTOR]


def around_actor(module: ModuleType, changes: Changes, around: Callable[[Callable[..., None]], Any]) -> None:
    """Replace the initialiser of the scheduler actor by ``around(initialiser)``.

    Ray pickles the class, by value, in the process that starts the actors. So the new initialiser travels
    to every node and must be a function within a function that names nothing of this package, which a node
    may lack; a ``wrapt`` wrapper cannot be pickled. What Ray starts is a class of its own over SGLang's, with
    an initialiser that calls the one SGLang wrote.
    """
    actor = getattr(getattr(getattr(module, "SchedulerActor", None), "__ray_metadata__", None), "modified_class", None)
    if actor is None or "__init__" not in vars(actor):
        raise Unrecognised("there is no SchedulerActor that ray.remote made of a class with an __init__")
    init = actor.__init__
    actor.__init__ = functools.wraps(init)(around(init))
    changes.callback(setattr, actor, "__init__", init)


def _load_plugins_first(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()  # once a process; it reports a plugin that fails and goes on
        init(self, *args, **kwargs)

    return __init__


def change_scheduler_actor(module: ModuleType, changes: Changes) -> None:
    around_actor(module, changes, _load_plugins_first)


FIX = Fix(
    name="ray-plugins",
    why="Ray's scheduler actors do not load plugins, so those that SGLang found elsewhere are absent there.",
    upstream=("sgl-project/sglang#26723",),
    goes_away="when the oldest supported release loads plugins in srt/ray/scheduler_actor.py; 0.5.23 does not",
    evidence=evidence,
    changes={"sglang.srt.ray.scheduler_actor": change_scheduler_actor},
)
