"""Fix ``mla-geometry``: the Triton decode takes an MLA layer's values from the wrong half of its key tile."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.fixes.fix import Changes, Fix, Unrecognised, lines_matching

# The kernel is told to take values from keys whatever the tiles' widths.
_VALUES_FROM_KEYS = re.compile(r"^ *HAS_MLA=has_mla,$", re.M)
_MODULES = ("sglang.srt.layers.attention.triton_ops.decode_attention", "sglang.kernels.ops.attention.decode_attention")
# Key widths whose rope part the launcher puts in a tile of its own.
_SPLIT = {576: 512, 288: 256}


def evidence(root: Path) -> list[str]:
    files = "decode_attention.py"
    folders = ("srt/layers/attention/triton_ops", "kernels/ops/attention")
    return [place for folder in folders for place in lines_matching(root, folder, _VALUES_FROM_KEYS, files)]


def _power_of_2(width: int) -> int:
    return 1 << (width - 1).bit_length()


def key_tile_is_value_tile(key_width: int, value_width: int) -> bool:
    """Whether the kernel's first key tile is as wide as a value tile, so that it may serve as one."""
    return _SPLIT.get(key_width, _power_of_2(key_width)) == _power_of_2(value_width)


def _with_values_of_their_own(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 2 and kwargs.get("has_mla") and not key_tile_is_value_tile(args[1].shape[-1], args[2].shape[-1]):
        kwargs = {**kwargs, "has_mla": False}
    return wrapped(*args, **kwargs)


def change_decode(module: ModuleType, changes: Changes) -> None:
    if not hasattr(module, "decode_attention_fwd"):
        raise Unrecognised(f"{module.__name__} has no decode_attention_fwd")
    changes.wrap(module, "decode_attention_fwd", _with_values_of_their_own)


FIX = Fix(
    name="mla-geometry",
    why=(
        "From 0.5.12 the Triton decode kernel uses the transposed key tile as the values of an MLA layer, which is "
        "right only where both tiles are equally wide (512+64, 256+32); other geometries fail to compile on the "
        "first token. They get their values loaded, as up to 0.5.11."
    ),
    upstream=("sgl-project/sglang#27367", "sgl-project/sglang#27369"),
    goes_away="when SGLang takes values from keys only where the tiles are equally wide",
    evidence=evidence,
    changes=dict.fromkeys(_MODULES, change_decode),
)
