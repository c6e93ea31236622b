"""What a fix is: why, upstream reference, evidence and change, in one place, so that none goes stale."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt


class Unrecognised(Exception):
    """SGLang's code is not the code this fix knows; it is left alone. The message says what is missing."""


class Changes(ExitStack):
    """Changes to a running SGLang. Leaving the block takes them back, unless ``keep`` was called."""

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Put a ``wrapt`` wrapper ``(wrapped, instance, args, kwargs)`` around a function of a module or class.

        A class may inherit it, as one does that another package put in SGLang's place. Should others have
        wrapped ours since, taking it back only switches it off: theirs stay.
        """
        owner = next((each for each in getattr(owner, "__mro__", (owner,)) if name in vars(each)), owner)
        if name not in vars(owner):
            raise Unrecognised(f"{getattr(owner, '__name__', owner)} has no {name}")
        original = vars(owner)[name]
        on = True
        ours = wrapt.FunctionWrapper(original, wrapper, enabled=lambda: on)

        def undo() -> None:
            nonlocal on
            on = False
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)

        setattr(owner, name, ours)
        self.callback(undo)

    def put(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set one entry of a registry; what others have put there since is not taken back."""
        missing = object()
        before = mapping.get(key, missing)

        def undo() -> None:
            if mapping.get(key, missing) is not value:
                return
            if before is missing:
                del mapping[key]
            else:
                mapping[key] = before

        mapping[key] = value
        self.callback(undo)

    def append(self, names: list[Any], name: Any) -> None:
        """Add to a list of choices, once."""
        if name in names:
            return

        def undo() -> None:
            if name in names:
                names.remove(name)

        names.append(name)
        self.callback(undo)

    def keep(self) -> None:
        """The change is complete: leave it in place."""
        self.pop_all()


Change = Callable[[ModuleType, Changes], None]


@dataclass(frozen=True)
class Fix:
    """One fault of SGLang and what is done about it.

    ``evidence`` is given the folder of the ``sglang`` package and returns the places that show the fault
    (``"srt/…/triton_backend.py:120"``), read from the source text; none means that it is not there.
    ``changes`` names, for each SGLang module to change, the function that changes it once imported.
    """

    name: str
    why: str
    upstream: tuple[str, ...]
    goes_away: str
    evidence: Callable[[Path], list[str]]
    changes: Mapping[str, Change] = field(default_factory=dict)


def lines_matching(root: Path, folder: str, pattern: re.Pattern[str], files: str = "*.py") -> list[str]:
    """Places, ``"path:line"`` relative to ``root``, in a folder's own Python files that match a regex."""
    places = []
    for path in sorted((root / folder).glob(files)):
        text = path.read_text(encoding="utf-8", errors="replace")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            places.append(f"{path.relative_to(root).as_posix()}:{line}")
    return places
