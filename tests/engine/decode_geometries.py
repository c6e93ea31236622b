"""Run by test_mla_geometry.py: the release's Triton decode, stock and as this package leaves it, by the interpreter."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch

sys.path.insert(0, sys.argv[1])
import repro

LENGTHS = (5, 40, 1)
HEADS = 2
SCALE = 0.2


def decode(function: Any, latent: int, rope: int) -> float | str:
    """Largest difference from attention in float64, or the error."""
    random = torch.Generator().manual_seed(latent + rope)
    tokens = sum(LENGTHS)
    q = torch.randn(len(LENGTHS), HEADS, latent + rope, generator=random)
    kv = torch.randn(tokens, 1, latent + rope, generator=random)
    indptr = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    out = torch.zeros(len(LENGTHS), HEADS, latent)
    partial, lse = torch.zeros(len(LENGTHS), HEADS, 8, latent), torch.zeros(len(LENGTHS), HEADS, 8)
    splits = torch.full((len(LENGTHS),), 2, dtype=torch.int32)
    arguments = (q, kv, kv[..., :latent], out, indptr, torch.arange(tokens), partial, lse, splits, 8, SCALE, 1.0, 1.0)
    options = {"has_mla": True} if HAS_MLA else {}
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    worst = 0.0
    for request in range(len(LENGTHS)):
        own = kv[indptr[request] : indptr[request + 1], 0].double()
        weights = torch.softmax(q[request].double() @ own.T * SCALE, -1)
        worst = max(worst, float((out[request].double() - weights @ own[:, :latent]).abs().max()))
    return worst


repro.run_without_gpu("triton")
for name in ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops"):
    try:
        module = importlib.import_module(f"{name}.decode_attention")
    except ModuleNotFoundError:
        continue
    break
ours = module.decode_attention_fwd
stock = getattr(ours, "__wrapped__", ours)
HAS_MLA = "has_mla" in stock.__code__.co_varnames
geometries = [tuple(map(int, word.split("+"))) for word in sys.argv[2:]]
print(json.dumps({f"{a}+{b}": {"stock": decode(stock, a, b), "ours": decode(ours, a, b)} for a, b in geometries}))
