"""The real SGLang engine on a CPU: start it, ask it, and learn why it died, with no GPU and no weights.

Importing this costs neither torch nor SGLang; both are imported in child interpreters, or by
:mod:`.reference` when it is used.
"""

from sglang_pp_mla.rehearsal.environment import (
    FORK,
    KERNEL_LIBRARY,
    Installation,
    RehearsalError,
    find_sglang,
    rehearsal_environment,
)
from sglang_pp_mla.rehearsal.progress import Progress
from sglang_pp_mla.rehearsal.runner import (
    ENGINE_ARGUMENTS,
    EngineAnswer,
    EngineFailure,
    EngineRun,
    EngineSession,
    Server,
    engine,
    open_here,
    run_engine,
    server,
)
from sglang_pp_mla.rehearsal.shrink import shrink

__all__ = [
    "ENGINE_ARGUMENTS",
    "FORK",
    "KERNEL_LIBRARY",
    "EngineAnswer",
    "EngineFailure",
    "EngineRun",
    "EngineSession",
    "Installation",
    "Progress",
    "RehearsalError",
    "Server",
    "engine",
    "find_sglang",
    "open_here",
    "rehearsal_environment",
    "run_engine",
    "server",
    "shrink",
]
