"""The backend name ``triton_pp``: ``triton`` to all of SGLang, built by our factory.

SGLang compares a backend's name with ``"triton"`` in far more places than can be listed (defaults,
deterministic and radix checks, speculative drafts, models), a different set in each release. So the name
ends where the arguments begin to be resolved: the fields become ``triton``, the record keeps a note of
who asked, and only the factory that builds the backend reads the note. Whatever a release does for
``triton`` it thereby does for ``triton_pp``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised

NAME = "triton_pp"
FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
# An underscore name is bookkeeping to SGLang, not configuration: it may be set at any time and is pickled
# with the record, which is how it reaches the scheduler processes.
_NOTE = "_sglang_pp_mla_asked_for_by"

logger = logging.getLogger("sglang_pp_mla")


def asked_for(runner: Any) -> bool:
    """Whether ``triton_pp`` was given for this runner: the draft's flag is none of the target's business."""
    fields = set(getattr(runner.server_args, _NOTE, ()))
    if not getattr(runner, "is_draft_worker", False):
        fields.discard("speculative_draft_attention_backend")
    return bool(fields)


def note_and_translate(server_args: Any) -> None:
    """Turn ``triton_pp`` into ``triton`` on a raw record and note the fields it stood in."""
    fields = tuple(name for name in FIELDS if getattr(server_args, name, None) == NAME)
    if not fields:
        return
    for name in fields:
        setattr(server_args, name, "triton")
    setattr(server_args, _NOTE, fields)
    flags = ", ".join("--" + name.replace("_", "-") for name in fields)
    logger.info("%s: SGLang resolves %s as triton; each stage reports the backend it builds.", flags, NAME)


def _before_resolution(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    note_and_translate(instance)
    return wrapped(*args, **kwargs)


def change_server_args(module: ModuleType, changes: Changes) -> None:
    choices = getattr(module, "ATTENTION_BACKEND_CHOICES", None)
    if not isinstance(choices, list) or "triton" not in choices:
        raise Unrecognised("server_args has no ATTENTION_BACKEND_CHOICES with triton in it")
    changes.append(choices, NAME)
    # From 0.5.20 a record is resolved by a call of its own; before, by its construction.
    start = "resolve_once" if "resolve_once" in vars(module.ServerArgs) else "__post_init__"
    changes.wrap(module.ServerArgs, start, _before_resolution)


def change_registry(module: ModuleType, changes: Changes) -> None:
    registry = getattr(module, "ATTENTION_BACKENDS", None)
    if not isinstance(registry, dict) or "triton" not in registry:
        raise Unrecognised("attention_registry has no ATTENTION_BACKENDS with triton in it")
    stock = registry["triton"]

    def create_triton_pp_backend(runner: Any) -> Any:
        from sglang.srt.layers.attention import triton_backend

        from sglang_pp_mla.backend import TritonPPAttnBackend

        # The release's own factory, with its refusals and branches, constructs our class.
        with Changes() as meanwhile:
            meanwhile.put(vars(triton_backend), "TritonAttnBackend", TritonPPAttnBackend)
            return stock(runner)

    def create_triton_backend(runner: Any) -> Any:
        return (create_triton_pp_backend if asked_for(runner) else stock)(runner)

    changes.put(registry, "triton", create_triton_backend)
    # For those who set the name on a record that is already resolved.
    changes.put(registry, NAME, create_triton_pp_backend)


def evidence(root: Path) -> list[str]:
    """The name is SGLang's to lack: it is needed wherever there is a Triton backend."""
    path = "srt/layers/attention/triton_backend.py"
    return [path] if (root / path).is_file() else []


FIX = Fix(
    name="triton-pp",
    why="SGLang has no attention backend called triton_pp; this makes it one, resolved as triton.",
    upstream=(),
    goes_away="when this package is uninstalled",
    evidence=evidence,
    changes={
        "sglang.srt.server_args": change_server_args,
        "sglang.srt.layers.attention.attention_registry": change_registry,
    },
)
