"""How the fixes reach SGLang: a ``.pth`` in every process, an entry point, and post-import hooks.

Two ways lead to one idempotent :func:`arm`: the ``.pth`` (:mod:`.autoload`), which reaches every Python
process of the environment, and SGLang's own plugin entry point, where a release has plugins. Arming only
registers hooks; a fix acts when the SGLang module that it changes is imported.
"""

from __future__ import annotations


def arm() -> None:
    """Register every fix with the import system; safe to call any number of times, from any thread."""
    from sglang_pp_mla.wiring.arming import arm as arm_now

    arm_now()
