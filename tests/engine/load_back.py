"""Load a hybrid model's layers back from HiCache's host copy, stage by stage; print what each stage then holds.

Run as a script, in a rehearsal's environment, with nothing but real SGLang; the answer is one line of JSON:
``[{"stage": "first", "fixed": true, "wrong": […], "stock": […]}, …]``, where ``wrong`` and, without the fix, ``stock``
are the layers that do not hold what was on the host.
"""

from __future__ import annotations

import json
import types
from typing import Any

import torch
from sglang.srt.configs import mamba_utils
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import memory_pool, memory_pool_host
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler

from sglang_pp_mla.stage import Stage, stages_of

SLOTS = torch.arange(1, 4)


def do_without_gpu() -> None:
    """What this machine lacks, and only that: pinned memory, the kernel library's copy, CUDA's streams, 10 GB."""

    def allocate(dims: Any, dtype: Any, **_: Any) -> Any:
        return torch.zeros(dims, dtype=dtype)

    def copy(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    memory_pool_host.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    memory_pool_host.transfer_kv_direct = copy
    memory_pool_host.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    cache_controller.device_module = torch.cpu


def pools_of(stage: Stage) -> Any:
    """The stage's pools, as ``CacheInitParams`` hands them to HiCache: every second layer has full attention."""
    full, linear = list(stage.layers)[1::2], list(stage.layers)[0::2]
    shape = mamba_utils.KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=8)
    common: dict[str, Any] = {
        "size": 8,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": stage.start_layer,
    }
    requests = memory_pool.HybridReqToTokenPool(
        **common,
        mamba_size=8,
        mamba_spec_state_size=8,
        max_context_len=16,
        cache_params=mamba_utils.KimiLinearCacheParams(shape=shape, layers=linear),
        mamba_layer_ids=linear,
        enable_mamba_extra_buffer=False,
    )
    pool = memory_pool.HybridLinearKVPool(
        **common,
        dtype=torch.float32,
        page_size=1,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=full,
        enable_kvcache_transpose=False,
        mamba_pool=requests.mamba_pool,
        use_mla=True,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
    )
    allocator = types.SimpleNamespace(get_kvcache=lambda: pool)
    return types.SimpleNamespace(token_to_kv_pool_allocator=allocator, req_to_token_pool=requests)


def wrong_layers(stage: Stage, build: Any) -> list[int]:
    """Put each layer's number on the host, load back as the controller does, and look through the pools' getters."""
    params = pools_of(stage)
    pool, requests = params.token_to_kv_pool_allocator.get_kvcache(), params.req_to_token_pool
    group, controller = build(
        params=params,
        server_args=types.SimpleNamespace(
            hicache_ratio=2.0,
            hicache_size=0,
            hicache_mem_layout="layer_first",
            hicache_storage_backend=None,
            hicache_write_policy="write_through",
            hicache_io_backend="direct",
        ),
        kv_pool=pool.full_kv_pool,
        mamba_pool=requests.mamba_pool,
        full_layer_mapping=dict(pool.full_attention_layer_id_mapping),
        mamba_layer_mapping=dict(requests.mamba_map),
        page_size=1,
        tp_group=None,
        load_cache_event=None,
        storage_backend=None,
        use_mla=True,
    )
    for layer, place in pool.full_attention_layer_id_mapping.items():
        group.get_pool(PoolName.KV).kv_buffer[place] = float(layer + 1)
    for layer, place in requests.mamba_map.items():
        group.get_pool(PoolName.MAMBA).temporal_buffer[place] = float(layer + 1)
    state = PoolTransfer(name=PoolName.MAMBA, host_indices=SLOTS, device_indices=SLOTS)
    for index in range(controller.layer_num):
        group.load_to_device_per_layer(pool.full_kv_pool, SLOTS, SLOTS, index, "direct", pool_transfers=[state])
    full = pool.full_kv_pool
    full.layer_transfer_counter = None  # nothing is in flight
    held = {layer: pool.get_key_buffer(layer) for layer in pool.full_attention_layer_id_mapping}
    held |= {layer: requests.mamba2_layer_cache(layer).temporal for layer in requests.mamba_map}
    return sorted(layer for layer, buffer in held.items() if not (buffer[SLOTS] == layer + 1).all())


def main() -> None:
    do_without_gpu()
    build = hybrid_pool_assembler.build_hybrid_mamba_stack
    stock = getattr(build, "__wrapped__", build)
    answer = [
        {
            "stage": name,
            "fixed": build is not stock,
            "wrong": wrong_layers(stage, build),
            "stock": wrong_layers(stage, stock),
        }
        for name, stage in zip(("first", "later"), stages_of((4, 5)), strict=True)
    ]
    print(json.dumps(answer))


main()
