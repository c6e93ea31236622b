#!/usr/bin/env python3
"""MLA models other than 512+64 and 256+32: the Triton decode kernel does not compile on the first token.

    python repro.py                   256+64 (Mistral Small 4), no GPU
    python repro.py 512+64 128+64     kv_lora_rank + qk_rope_head_dim of your own

From 0.5.12 the grouped decode kernel takes an MLA layer's values from its transposed key tile. The launcher
splits the rope part off that tile for key widths of 576 and 288 only. Elsewhere the tile is the next power
of two above both parts, wider than the value tile, and the product of weights and values has no shape.

The installed SGLang's own launcher and kernel run in Triton's interpreter and are compared with attention in
float64. GPU libraries that cannot be imported here are replaced by placeholders.

Exit status: 0 every geometry decodes; 1 one does not; 2 wrong input; 3 nothing could be run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import os
import re
import sys
import types

CLEAN, FAULT, WRONG_INPUT, INCONCLUSIVE = 0, 1, 2, 3
LENGTHS, HEADS, SPLITS, SCALE = (5, 40, 1), 2, 8, 0.2
MODULES = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")


class Placeholder(types.ModuleType):
    __path__: list = []
    __all__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a placeholder: its library is not available here")


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


def launcher():
    """`decode_attention_fwd` of the installed release."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", SGLANG_USE_CPU_ENGINE="1")
    sys.meta_path.insert(0, PlaceholderFinder())
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}.decode_attention").decode_attention_fwd
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(f"no decode_attention in {' or '.join(MODULES)}")


def worst_difference(decode, latent: int, rope: int) -> float:
    """From attention in float64, over three requests of 5, 40 and 1 tokens."""
    import torch

    random = torch.Generator().manual_seed(0)
    batch, tokens, width = len(LENGTHS), sum(LENGTHS), latent + rope
    q = torch.randn(batch, HEADS, width, generator=random)
    kv = torch.randn(tokens, 1, width, generator=random)
    indptr = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    out = torch.zeros(batch, HEADS, latent)
    parameters = inspect.signature(decode).parameters
    decode(
        q,
        kv,
        kv[..., :latent],
        out,
        indptr,
        torch.arange(tokens),
        torch.zeros(batch, HEADS, SPLITS, latent),
        torch.zeros(batch, HEADS, SPLITS),
        torch.full((batch,), 2, dtype=torch.int32),
        SPLITS,
        SCALE,
        *([1.0, 1.0] if "k_scale" in parameters else []),
        **({"has_mla": True} if "has_mla" in parameters else {}),
    )
    worst = 0.0
    for request in range(batch):
        own = kv[indptr[request] : indptr[request + 1], 0].double()
        answer = torch.softmax(q[request].double() @ own.T * SCALE, -1) @ own[:, :latent]
        worst = max(worst, float((out[request].double() - answer).abs().max()))
    return worst


def main(words: list[str]) -> int:
    if not all(re.fullmatch(r"\d+\+\d+", word) for word in words):
        print(f"{' '.join(words)}: write kv_lora_rank+qk_rope_head_dim, such as 256+64", file=sys.stderr)
        return WRONG_INPUT
    try:
        decode = launcher()
    except Exception as error:
        print(f"SGLang's decode could not be imported here: {type(error).__name__}: {error}", file=sys.stderr)
        return INCONCLUSIVE
    release, status = importlib.metadata.version("sglang"), CLEAN
    for word in words or ["256+64"]:
        try:
            worst = worst_difference(decode, *map(int, word.split("+")))
        except Exception as error:
            reason = [line.strip() for line in str(error).splitlines() if line.strip(" ^")][-1:]
            print(f"SGLang {release}, {word}: {type(error).__name__}: {' '.join(reason)}")
            status = FAULT
            continue
        right = worst < 1e-4
        print(f"SGLang {release}, {word}: {'right' if right else 'wrong'} ({worst:.1e} from float64)")
        status = status if right else FAULT
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
