"""The release that a traceback's line numbers belong to. Pure; frames.json is written by tools/frames."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from sglang_pp_mla.releases import RELEASES

_FRAME = re.compile(r'File "[^"]*sglang/srt/(?P<file>[\w/]+\.py)", line (?P<line>\d{1,6}), in (?P<function>\w+)')


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, list[int]]]]:
    text = (files("sglang_pp_mla") / "frames.json").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, Mapping[str, list[int]]]] = json.loads(text)
    return table


def releases_with(line: str) -> frozenset[str] | None:
    """The releases in which a traceback can show this frame; None for a frame that says nothing of it.

    Only calls that start-up and the event loops make are in the table. A changed SGLang gives no release at all.
    """
    frame = _FRAME.search(line)
    functions = _table().get(frame["file"]) if frame else None
    places = functions.get(frame["function"]) if functions and frame else None
    if places is None or frame is None:
        return None
    number = int(frame["line"])
    return frozenset(release for release in RELEASES if number in places.get(release, ()))
