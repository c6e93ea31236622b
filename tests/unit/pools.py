"""SGLang's real KV pools, small and on the CPU, for one stage of a pipeline."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_pp_mla.stage import Stage

LATENT, ROPE, VALUE_HEAD = 32, 16, 24
KINDS = ("mla", "mha", "hybrid-mla", "hybrid-mha", "swa")


def make_pool(kind: str, stage: Stage, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The pool of ``stage``. Hybrid kinds keep every other layer of the stage, SWA splits them in two."""
    common = {"size": 8, "page_size": 1, "dtype": dtype, "device": "cpu", "enable_memory_saver": False}
    heads = {"head_num": 2, "head_dim": VALUE_HEAD}
    latent = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
    of_stage = {
        "layer_num": len(stage.layers),
        "start_layer": stage.start_layer,
        "end_layer": stage.end_layer,
    }
    if kind == "mla":
        return call(MLATokenToKVPool, **common, **latent, **of_stage)
    if kind == "mha":
        return call(MHATokenToKVPool, **common, **heads, **of_stage)
    if kind.startswith("hybrid"):
        return call(
            HybridLinearKVPool,
            **common,
            **heads,
            **(latent | {"use_mla": True} if kind == "hybrid-mla" else {}),
            full_attention_layer_ids=list(stage.layers)[-1::-2][::-1],
            enable_kvcache_transpose=False,
            mamba_pool=None,
            start_layer=stage.start_layer,
        )
    common.pop("enable_memory_saver")
    return call(
        SWAKVPool,
        **common,
        **heads,
        size_swa=8,
        swa_attention_layer_ids=list(stage.layers)[1::2],
        full_attention_layer_ids=list(stage.layers)[0::2],
        enable_kvcache_transpose=False,
    )


def call(pool_class: type, **kwargs: Any) -> Any:
    """Construct a pool with those of the arguments that this release's class has."""
    parameters = inspect.signature(pool_class.__init__).parameters
    return pool_class(**{name: value for name, value in kwargs.items() if name in parameters})


def own_layers(kind: str, stage: Stage) -> list[int]:
    """Global ids of the layers whose buffers ``make_pool(kind, stage)`` holds."""
    return list(stage.layers)[-1::-2][::-1] if kind.startswith("hybrid") else list(stage.layers)
