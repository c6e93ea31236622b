"""What other packages may add, by pluggy: entry-point group ``sglang_pp_mla``, one module or object each."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from sglang_pp_mla.fixes.fix import Fix

PROJECT = "sglang_pp_mla"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def sglang_pp_mla_fixes() -> Iterable[Fix]:  # type: ignore[empty-body]
    """Fixes for faults of SGLang. Called once a process, before any module of ``sglang.srt`` is changed."""
