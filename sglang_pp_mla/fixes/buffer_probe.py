"""Fix ``buffer-probe``: an attention backend asks the KV pool of a later stage for layer 0."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.builders import Within, around_runner_builders, wrap_all
from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised, lines_matching
from sglang_pp_mla.probes import stage_local_probes

# A literal 0 is the fault; a probe for start_layer, or for the layer at hand, is not.
_PROBE_FOR_LAYER_0 = re.compile(r"\.get_(?:key|value|kv)_buffer\(\s*(?:layer_id\s*=\s*)?0\s*[,)]")


def evidence(root: Path) -> list[str]:
    return [
        place
        for folder in ("srt/layers/attention", "srt/mem_cache")
        for place in lines_matching(root, folder, _PROBE_FOR_LAYER_0)
    ]


def _probes_of(runner: Any) -> Within:
    return stage_local_probes(getattr(runner, "token_to_kv_pool", None))


def change_draft_factory(module: ModuleType, changes: Changes) -> None:
    """Draft workers build their decode and extend backends outside the runner."""
    names = ("create_decode_backend", "create_draft_extend_backend")
    wrap_all(module.DraftBackendFactory, names, lambda factory, *_: _probes_of(factory.draft_model_runner), changes)


def change_frozen_kv_worker(module: ModuleType, changes: Changes) -> None:
    """The frozen-KV draft worker builds a Triton backend by itself when top-k is above 1."""
    worker = next(
        (cls for cls in vars(module).values() if isinstance(cls, type) and "_init_draft_attn_backend" in vars(cls)),
        None,
    )
    if worker is None:
        raise Unrecognised(f"{module.__name__} has no class with _init_draft_attn_backend")
    wrap_all(worker, ("_init_draft_attn_backend",), lambda worker, *_: _probes_of(worker.draft_model_runner), changes)


FIX = Fix(
    name="buffer-probe",
    why=(
        "Attention backends ask the KV pool for layer 0 to learn a head size; the pool of a later pipeline "
        "stage holds only its own layers, so it raises IndexError or answers with another layer's buffer."
    ),
    upstream=(
        "sgl-project/sglang#7044",
        "sgl-project/sglang#13837",
        "sgl-project/sglang#18369",
        "sgl-project/sglang#30335",
        "sgl-project/sglang#30340",
    ),
    goes_away=(
        "when the oldest supported release has no backend that probes layer 0: Triton is fixed in 0.5.18; in "
        "0.5.23 Wave still probes, and AITER for a pool without get_v_head_dim"
    ),
    evidence=evidence,
    changes={
        **around_runner_builders(_probes_of),
        "sglang.srt.speculative.draft_utils": change_draft_factory,
        "sglang.srt.speculative.frozen_kv_mtp_worker_v2": change_frozen_kv_worker,
    },
)
