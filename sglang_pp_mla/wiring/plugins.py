"""Fixes, failure signatures and checks from other packages, found through pluggy."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from sglang_pp_mla import hookspecs
from sglang_pp_mla.fixes.fix import Fix

if TYPE_CHECKING:  # of no use to a server
    from sglang_pp_mla.preflight import Check
    from sglang_pp_mla.signatures import Signature

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
    return _named("sglang_pp_mla_fixes", "fixes")


def signatures_of_plugins() -> list[Signature]:
    """What the plugins' ``sglang_pp_mla_signatures`` return; a plugin that raises is reported and left out."""
    return _named("sglang_pp_mla_signatures", "failure signatures")


def checks_of_plugins() -> list[Check]:
    """What the plugins' ``sglang_pp_mla_checks`` return; a plugin that raises is reported and left out."""
    return _named("sglang_pp_mla_checks", "checks")


def _named(hook: str, what: str) -> list[Any]:
    named: list[Any] = []
    for implementation in getattr(plugin_manager().hook, hook).get_hookimpls():
        try:
            named.extend(implementation.function())
        except Exception:
            logger.exception("The plugin %s failed to name its %s; it is left out.", implementation.plugin_name, what)
    return named
