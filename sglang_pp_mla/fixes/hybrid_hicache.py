"""Fix ``hicache-hybrid-layers``: HiCache loads back none, or not all, of a later stage's layers of a hybrid model."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised, lines_matching

# The maps keep the model's numbers, where the loop that loads back and the forward pass that waits for it count
# from the stage's first layer. Repaired, the map goes through a function that takes the first layer off.
_MAP_IN_MODEL_NUMBERS = re.compile(
    r"full_layer_mapping = dict\(\s*(?:kvcache|hybrid_kv)\.full_attention_layer_id_mapping\s*\)"
)


def evidence(root: Path) -> list[str]:
    return lines_matching(root, "srt/mem_cache/hybrid_cache", _MAP_IN_MODEL_NUMBERS)


_MAPS = ("full_layer_mapping", "mamba_layer_mapping")


def _with_stage_numbers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    start = kwargs["params"].token_to_kv_pool_allocator.get_kvcache().start_layer
    # A stage's first layer is in one of the maps: a caller that has brought them over starts at 0.
    if min((layer for name in _MAPS for layer in kwargs[name]), default=start) >= start:
        for name in _MAPS:
            kwargs[name] = {layer - start: place for layer, place in kwargs[name].items()}
    return wrapped(*args, **kwargs)


def change_assembler(module: ModuleType, changes: Changes) -> None:
    changes.wrap(module, "build_hybrid_mamba_stack", _with_stage_numbers)
    parameters = inspect.signature(module.build_hybrid_mamba_stack).parameters.values()
    if not {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} >= {"params", *_MAPS}:
        raise Unrecognised(f"build_hybrid_mamba_stack does not take params and {' and '.join(_MAPS)} by name alone")


FIX = Fix(
    name="hicache-hybrid-layers",
    why=(
        "With --enable-hierarchical-cache a model that mixes MLA and linear attention keeps its layer maps in the "
        "model's numbers, but layers are loaded back from the host by the stage's; on a later stage they are left "
        "out, and the answer is computed from what the pool held before."
    ),
    upstream=("sgl-project/sglang#38866", "sgl-project/sglang#39699"),
    goes_away="when the oldest supported release is 0.5.21",
    evidence=evidence,
    changes={"sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler": change_assembler},
)
