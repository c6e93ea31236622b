"""What triton_pp refuses, on real pools, and what it says."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_pp_mla.stage import Stage, stages_of
from tests.unit.pools import KINDS, LATENT, ROPE, VALUE_HEAD, call, make_pool

STAGE = stages_of((4, 3))[1]


@pytest.fixture(scope="module")
def backend():
    import sglang_pp_mla.backend

    return sglang_pp_mla.backend


def test_a_stage_without_an_attention_layer_is_refused(backend):
    pool = call(
        HybridLinearKVPool,
        size=8,
        page_size=1,
        dtype=torch.bfloat16,
        device="cpu",
        head_num=2,
        head_dim=VALUE_HEAD,
        use_mla=True,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        full_attention_layer_ids=[],
        enable_kvcache_transpose=False,
        mamba_pool=None,
        start_layer=4,
    )
    sentence = r"PP1 of 2 \(layers 4-6\) holds no full-attention layer.*PARTITION"
    with pytest.raises(ValueError, match=sentence) as refusal:
        backend.refuse_without_attention(STAGE, pool)
    assert "\n" not in str(refusal.value)


def test_mixed_value_heads_are_refused_with_the_layer(backend):
    pool = call(
        SWAKVPool,
        size=8,
        size_swa=8,
        page_size=1,
        dtype=torch.bfloat16,
        device="cpu",
        head_num=2,
        head_dim=VALUE_HEAD,
        swa_head_num=2,
        swa_head_dim=2 * VALUE_HEAD,
        swa_v_head_dim=2 * VALUE_HEAD,
        swa_attention_layer_ids=[5],
        full_attention_layer_ids=[4, 6],
        enable_kvcache_transpose=False,
    )
    sizes = {pool.get_value_buffer(layer).shape[-1] for layer in STAGE.layers}
    if len(sizes) == 1:  # this release's constructor spells the second size differently
        pool.swa_kv_pool.v_buffer = [buffer.repeat(1, 1, 2) for buffer in pool.swa_kv_pool.v_buffer]
    with pytest.raises(ValueError, match=r"PP1 of 2 .* value head of 48 on layer 5 .* expect 24;.*PARTITION"):
        backend.refuse_mixed_value_heads(STAGE, pool, {VALUE_HEAD, None})
    backend.refuse_mixed_value_heads(STAGE, pool, {VALUE_HEAD, 2 * VALUE_HEAD})


@pytest.mark.parametrize("kind", KINDS)
def test_every_ordinary_stage_is_accepted(backend, kind):
    for stage in stages_of((4, 3)):
        pool = make_pool(kind, stage)
        backend.refuse_without_attention(stage, pool)
        backend.refuse_mixed_value_heads(stage, pool, {LATENT if kind.endswith("mla") else VALUE_HEAD})


def test_the_stage_is_read_off_either_kind_of_runner(backend):
    class Group:
        rank_in_group, world_size = 1, 2

    class Layers:
        start_layer, end_layer = 4, 7

    class Older(Layers):
        pp_group = Group

    class Newer:
        pp_group = Group
        layer_info = Layers

    assert backend.stage_of(Older()) == backend.stage_of(Newer()) == Stage(1, 2, 4, 7)


@pytest.mark.parametrize("dequantises", [False, True])
def test_room_is_shared_where_a_layer_is_known_by_its_buffer(backend, dequantises):
    pool = make_pool("mla", STAGE)
    if dequantises:  # the whole layer for each answer, as the pool of --kv-cache-dtype fp4_e2m1 does
        stored = pool.get_key_buffer
        pool.get_key_buffer = lambda layer_id: stored(layer_id).clone()
    built = object.__new__(backend.TritonPPAttnBackend)
    built.asked_kv_splits, built.lifted_kv_splits = 8, 32
    built.decode_attention_fwd = stock = object()
    built.share_partials(pool)
    assert built.shares_partials is not dequantises
    assert (built.decode_attention_fwd is stock) is dequantises
