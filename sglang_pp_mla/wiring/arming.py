"""Arm the fixes: decide for each whether it acts, and keep the record of what was decided."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import wrapt

from sglang_pp_mla.fixes import BUILT_IN, Changes, Fix, Unrecognised

DISABLE = "SGLANG_PP_MLA_DISABLE"

logger = logging.getLogger("sglang_pp_mla")


@dataclass
class Decision:
    """What became of a fix in this process.

    ``state`` is ``armed`` (its SGLang module is not imported yet), ``applied``, ``not needed``,
    ``unrecognised`` (SGLang was left alone) or ``disabled``; ``detail`` says why, in words.
    """

    fix: Fix
    state: str
    detail: str


_decisions: dict[str, Decision] = {}
_lock = threading.RLock()


def decisions() -> tuple[Decision, ...]:
    """The record of this process, one entry a fix, in the order they were armed."""
    return tuple(_decisions.values())


def arm() -> None:
    """Register the built-in fixes now and other packages' when ``sglang.srt`` appears."""
    with _lock:
        if _decisions:
            return
        for fix in BUILT_IN:
            arm_fix(fix)
    _mention_unknown_names(os.environ.get(DISABLE, ""))
    if not _words(os.environ.get(DISABLE, "")) & _EVERYTHING:
        _mention_other_copies()
        wrapt.register_post_import_hook(_arm_plugins, "sglang.srt")


def arm_fix(fix: Fix) -> None:
    """Register one fix; a second fix of the same name is refused."""
    if fix.name in _decisions:
        raise ValueError(f"There are two fixes called {fix.name!r}; uninstall or rename one.")
    if is_disabled(fix.name, os.environ.get(DISABLE, "")):
        _decisions[fix.name] = Decision(fix, "disabled", f"by {DISABLE}={os.environ[DISABLE]}")
        return
    _decisions[fix.name] = Decision(fix, "armed", "waits for " + ", ".join(fix.changes))
    for module_name in fix.changes:
        wrapt.register_post_import_hook(partial(_on_import, fix, module_name), module_name)


def is_disabled(name: str, setting: str) -> bool:
    """Whether ``SGLANG_PP_MLA_DISABLE=setting`` turns the fix ``name`` off."""
    words = _words(setting)
    return name in words or bool(words & _EVERYTHING)


_EVERYTHING = {"1", "true", "yes", "all"}
_NOTHING = {"", "0", "false", "no"}


def _words(setting: str) -> set[str]:
    return {word.strip().lower() for word in setting.split(",")}


def _arm_plugins(_sglang_srt: ModuleType) -> None:
    try:
        from sglang_pp_mla.wiring.plugins import fixes_of_plugins

        fixes = fixes_of_plugins()
    except Exception:  # pluggy is missing, or a package's metadata cannot be read: no matter of SGLang's
        logger.exception("Fixes of other packages could not be looked for and are left out.")
        return
    for fix in fixes:
        try:
            arm_fix(fix)
        except Exception:
            logger.exception("The fix %s of another package could not be armed; SGLang is as it was.", fix)


def _mention_unknown_names(setting: str) -> None:
    """A misspelt fix would stay on in silence. Plugins' fixes are armed later, so this is no error."""
    unknown = _words(setting) - _EVERYTHING - _NOTHING - _decisions.keys()
    if unknown:
        logger.warning(
            "%s names %s, which is no fix of this package (%s); it has no effect unless a plugin has it.",
            DISABLE,
            ", ".join(sorted(unknown)),
            ", ".join(_decisions),
        )


def copies_on(path: Iterable[str], used: Path) -> list[Path]:
    """Copies of the package ``used`` on ``path`` that are not it; a clone one stands in comes after the .pth."""
    used = used.resolve()
    try:
        copies = {(Path(entry) / used.name).resolve() for entry in path} - {used, Path.cwd() / used.name}
    except (OSError, RuntimeError, ValueError):  # the current folder is gone, or an entry is no good path
        return []
    return sorted(copy for copy in copies if (copy / "__init__.py").is_file())


def _mention_other_copies() -> None:
    """With two copies on the path the first is used, which may not be the one that was meant."""
    used = Path(__file__).resolve().parents[1]
    for other in copies_on(sys.path, used):
        logger.warning(
            "sglang-pp-mla is on the path twice: %s is used, %s is not; uninstall one or take it off PYTHONPATH.",
            used,
            other,
        )


def _on_import(fix: Fix, module_name: str, module: ModuleType) -> None:
    """Apply a fix to a module just imported. Whatever goes wrong, the import itself must succeed.

    The lock is not held meanwhile: a change may import, and wait for another thread that is importing.
    """
    decision = _decisions[fix.name]
    try:
        places = _evidence(fix)
        if places:
            with Changes() as changes:
                fix.changes[module_name](module, changes)
                changes.keep()
    except Unrecognised as reason:
        _leave_alone(decision, module_name, str(reason))
    except Exception as error:
        _leave_alone(decision, module_name, f"{type(error).__name__}: {error}", error)
    else:
        with _lock:
            if places and decision.state != "unrecognised":
                decision.state, decision.detail = "applied", "found in " + ", ".join(places)
            elif decision.state == "armed":
                decision.state, decision.detail = "not needed", "its fault is not in this SGLang"


def _leave_alone(decision: Decision, module_name: str, reason: str, error: Exception | None = None) -> None:
    with _lock:
        decision.state, decision.detail = "unrecognised", f"{module_name}: {reason}"
    logger.warning(
        "The fix %s does not recognise this SGLang (%s in %s) and left that module as it was; "
        "report it with SGLang's version, or silence it with %s=%s.",
        decision.fix.name,
        reason,
        module_name,
        DISABLE,
        decision.fix.name,
        exc_info=error,
    )


_evidence_of: dict[str, list[str]] = {}


def _evidence(fix: Fix) -> list[str]:
    """The evidence of a fix, read once a process and only when a module of its own is imported."""
    if fix.name not in _evidence_of:
        _evidence_of[fix.name] = fix.evidence(_sglang_root())
    return _evidence_of[fix.name]


def _sglang_root() -> Path:
    # Not an import: this runs inside one, possibly of another thread's SGLang.
    path = list(sys.modules["sglang"].__path__)
    root = next((Path(entry) for entry in path if os.path.isdir(entry)), None)
    if root is None:  # a zip file, say
        raise Unrecognised(f"its source cannot be read in {', '.join(path) or 'nowhere'}")
    return root
