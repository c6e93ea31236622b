"""One module a fault. A fix looks at the SGLang it meets and acts only where it finds the fault."""

from __future__ import annotations

from sglang_pp_mla.fixes import (
    buffer_probe,
    hybrid_hicache,
    kv_splits,
    missing_host,
    mla_geometry,
    ray_plugins,
    triton_pp,
)
from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised

BUILT_IN: tuple[Fix, ...] = (
    triton_pp.FIX,
    buffer_probe.FIX,
    mla_geometry.FIX,
    hybrid_hicache.FIX,
    ray_plugins.FIX,
    missing_host.FIX,
)
BY_BACKEND: tuple[Fix, ...] = (kv_splits.FIX,)
"""Faults that stay in SGLang's own code: the backend ``triton_pp`` does without them."""

__all__ = ["BUILT_IN", "BY_BACKEND", "Changes", "Fix", "Unrecognised"]
