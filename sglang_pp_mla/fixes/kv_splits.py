"""Fault ``kv-splits``: the room for an MLA decode's partial results does not count the heads a stage keeps.

Nothing is changed in SGLang for it: the backend ``triton_pp`` keeps less, by :mod:`sglang_pp_mla.kv_splits`
and :mod:`sglang_pp_mla.shared_partials`. The record is here for the patches and the reports.
"""

from __future__ import annotations

import re
from pathlib import Path

from sglang_pp_mla.fixes.fix import Fix, lines_matching

LIFT_WITHOUT_HEADS = re.compile(
    r"^def _mla_decode_kv_splits_cap\(\n    base_max_kv_splits: int, sm_count: int, max_context_len: int\n\)", re.M
)


def evidence(root: Path) -> list[str]:
    return lines_matching(root, "srt/layers/attention", LIFT_WITHOUT_HEADS, "triton_backend.py")


FIX = Fix(
    name="kv-splits",
    why=(
        "From 0.5.12 an MLA decode keeps room for as many KV splits as the GPU has multiprocessors, whatever the "
        "heads, for every slot of its CUDA graphs: 8 GiB on a pipeline stage that keeps all 64 heads of Kimi K2.6. "
        "Each split already is one program a tile of 16 heads, so the cap is divided by the head tiles; "
        "tensor-parallel ranks of 16 heads or fewer keep theirs."
    ),
    upstream=("sgl-project/sglang#20479", "sgl-project/sglang#24762"),
    goes_away="when SGLang's cap counts head tiles, or its partial results no longer grow with slots and cap",
    evidence=evidence,
)
