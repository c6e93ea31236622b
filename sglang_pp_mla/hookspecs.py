"""What other packages may add, by pluggy: entry-point group ``sglang_pp_mla``, one module or object each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from sglang_pp_mla.fixes.fix import Fix

if TYPE_CHECKING:  # of no use to a server
    from sglang_pp_mla.preflight import Check
    from sglang_pp_mla.signatures import Signature

PROJECT = "sglang_pp_mla"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def sglang_pp_mla_fixes() -> Iterable[Fix]:  # type: ignore[empty-body]
    """Fixes for faults of SGLang. Called once a process, before any module of ``sglang.srt`` is changed."""


@hookspec
def sglang_pp_mla_signatures() -> Iterable[Signature]:  # type: ignore[empty-body]
    """Failures that ``sglang-pp-mla diagnose`` recognises besides its own. Called once a diagnosis."""


@hookspec
def sglang_pp_mla_checks() -> Iterable[Check]:  # type: ignore[empty-body]
    """Checks that ``sglang-pp-mla preflight`` makes besides its own. Called once a preflight."""
