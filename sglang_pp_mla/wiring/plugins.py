"""Fixes from other packages, found through pluggy when SGLang is imported."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import entry_points

import pluggy

from sglang_pp_mla import hookspecs
from sglang_pp_mla.fixes.fix import Fix

logger = logging.getLogger("sglang_pp_mla")


def plugin_manager() -> pluggy.PluginManager:
    """A manager with every plugin that loads; one that does not is reported and left out."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for entry_point in entry_points(group=hookspecs.PROJECT):
        try:
            manager.register(entry_point.load(), name=entry_point.name)
        except Exception:
            logger.exception("The plugin %s (%s) does not load; it is left out.", entry_point.name, entry_point.value)
    return manager


def fixes_of_plugins() -> list[Fix]:
    """What the plugins' ``sglang_pp_mla_fixes`` return; a plugin that raises is reported and left out."""
    manager = plugin_manager()
    fixes: list[Fix] = []
    for implementation in manager.hook.sglang_pp_mla_fixes.get_hookimpls():
        try:
            named: Iterable[Fix] = implementation.function()  # type: ignore[assignment]
            fixes.extend(named)
        except Exception:
            logger.exception("The plugin %s failed to name its fixes; it is left out.", implementation.plugin_name)
    return fixes
