"""Unit tests for the head-size probe of Wave and AITER under PP -- no server, no model."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import (
    CustomTestCase,
    maybe_stub_sgl_kernel,
    published_topology,
)

maybe_stub_sgl_kernel()  # must precede any import that pulls in sgl_kernel

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.aiter_backend import AiterAttnBackend
from sglang.srt.layers.attention.wave_backend import WaveAttnBackend
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

# (start_layer, layers held). Layer 0 is outside of a later stage's pool: where the
# stage starts beyond its own number of layers, indexing raises; where it does not,
# Python wraps the negative index to another layer's buffer.
STAGES = [(0, 4), (4, 3), (3, 4)]


def make_pool(arch, start_layer, layer_num):
    common = dict(
        size=16,
        page_size=1,
        dtype=torch.float32,
        layer_num=layer_num,
        device="cpu",
        enable_memory_saver=False,
        start_layer=start_layer,
        end_layer=start_layer + layer_num,
    )
    if arch == AttentionArch.MLA:
        return MLATokenToKVPool(**common, kv_lora_rank=512, qk_rope_head_dim=64)
    return MHATokenToKVPool(**common, head_num=2, head_dim=32)


def make_runner(arch, pool):
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        kv_index_translator=None,
        is_draft_worker=False,
        sliding_window_size=None,
        req_to_token_pool=ReqToTokenPool(
            size=2, max_context_len=64, device="cpu", enable_memory_saver=False
        ),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        model_config=SimpleNamespace(
            attention_arch=arch,
            dtype=torch.float32,
            context_len=64,
            head_dim=32,
            is_multimodal=False,
            num_attention_heads=2,
            get_num_kv_heads=lambda tp_size: 2,
        ),
    )


def build_wave(arch, pool):
    """The kernels need wave_lang, a GPU library; the constructor only stores them."""
    names = (
        "wave_lang",
        "wave_lang.kernel.wave.cache",
        "sglang.srt.layers.attention.wave_ops.decode_attention",
        "sglang.srt.layers.attention.wave_ops.extend_attention",
    )
    with patch.dict("sys.modules", {name: MagicMock() for name in names}):
        return WaveAttnBackend(make_runner(arch, pool))


class TestPPValueHeadDim(CustomTestCase):
    def check(self, build, arch, v_head_dim, of_pool=lambda pool: pool):
        for start_layer, layer_num in STAGES:
            with self.subTest(start_layer=start_layer, layer_num=layer_num):
                pool = make_pool(arch, start_layer, layer_num)
                asked = MagicMock(wraps=pool.get_value_buffer)
                with (
                    published_topology(),
                    patch.object(pool, "get_value_buffer", asked),
                ):
                    backend = build(arch, of_pool(pool))
                self.assertEqual(backend.v_head_dim, v_head_dim)
                asked.assert_called_once_with(start_layer)

    def test_wave_asks_an_mla_pool_for_a_layer_it_holds(self):
        self.check(build_wave, AttentionArch.MLA, 512)

    def test_wave_asks_an_mha_pool_for_a_layer_it_holds(self):
        self.check(build_wave, AttentionArch.MHA, 32)

    def test_aiter_asks_a_pool_without_get_v_head_dim_for_a_layer_it_holds(self):
        def without_get_v_head_dim(pool):
            return SimpleNamespace(
                start_layer=pool.start_layer, get_value_buffer=pool.get_value_buffer
            )

        self.check(
            lambda arch, pool: AiterAttnBackend(make_runner(arch, pool)),
            AttentionArch.MHA,
            32,
            without_get_v_head_dim,
        )


if __name__ == "__main__":
    unittest.main()
