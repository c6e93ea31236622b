"""One module a fault. A fix looks at the SGLang it meets and acts only where it finds the fault."""

from __future__ import annotations

from sglang_pp_mla.fixes import buffer_probe, hybrid_hicache, missing_host, mla_geometry, ray_plugins, triton_pp
from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised

BUILT_IN: tuple[Fix, ...] = (
    triton_pp.FIX,
    buffer_probe.FIX,
    mla_geometry.FIX,
    hybrid_hicache.FIX,
    ray_plugins.FIX,
    missing_host.FIX,
)

__all__ = ["BUILT_IN", "Changes", "Fix", "Unrecognised"]
