"""Unit tests for the KV-splits cap of the Triton MLA decode -- no server, no model."""

import json
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import (
    CustomTestCase,
    maybe_stub_sgl_kernel,
    published_topology,
)

maybe_stub_sgl_kernel()  # must precede any import that pulls in sgl_kernel

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import triton_backend
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.utils import next_power_of_2

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CONTEXT_LEN = 262144
KV_LORA_RANK = 512
HEADS_PER_PROGRAM = 16


def make_runner(num_head, folder):
    """A rank that keeps `num_head` heads of an MLA model; `folder` takes its config."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": num_head,
        "num_key_value_heads": num_head,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": CONTEXT_LEN,
        "vocab_size": 128,
    }
    Path(folder, "config.json").write_text(json.dumps(config))
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        page_size=1,
        is_draft_worker=False,
        kv_cache_dtype=torch.float32,
        kv_index_translator=None,
        sliding_window_size=None,
        decode_num_tokens_per_req=lambda: 1,
        req_to_token_pool=ReqToTokenPool(
            size=2, max_context_len=64, device="cpu", enable_memory_saver=False
        ),
        token_to_kv_pool=MLATokenToKVPool(
            size=16,
            page_size=1,
            dtype=torch.float32,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=64,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        ),
        token_to_kv_pool_allocator=None,
        model_config=ModelConfig(folder),
    )


class TestMlaKvSplitsCap(CustomTestCase):
    def test_one_request_can_give_every_sm_a_program(self):
        for sm_count in (108, 132, 148, 188, 304):
            for num_head in (1, 8, 12, 16, 32, 64, 96, 128):
                splits = triton_backend._mla_decode_kv_splits_cap(
                    8, sm_count, CONTEXT_LEN, num_head
                )
                tiles = -(-num_head // HEADS_PER_PROGRAM)
                self.assertGreaterEqual(splits * tiles, sm_count, (sm_count, num_head))

    def test_the_cap_of_up_to_16_heads_is_the_sm_count_rounded_up(self):
        for num_head in (1, 8, 12, 16):
            for sm_count in (108, 132, 188, 304):
                splits = triton_backend._mla_decode_kv_splits_cap(
                    8, sm_count, CONTEXT_LEN, num_head
                )
                self.assertEqual(splits, next_power_of_2(sm_count))

    def test_never_below_what_the_user_asked_for(self):
        for base, sm_count in ((100, 188), (8, 0)):
            splits = triton_backend._mla_decode_kv_splits_cap(
                base, sm_count, CONTEXT_LEN, 128
            )
            self.assertEqual(splits, base)

    def test_partial_results_of_a_slot_do_not_grow_with_the_heads(self):
        """8 heads are a rank of TP8, 64 a stage of PP8, of the same model."""
        kept = {}
        for num_head in (8, 16, 64, 128):
            with (
                tempfile.TemporaryDirectory() as folder,
                published_topology(),
                patch.object(triton_backend, "get_device_core_count", return_value=188),
            ):
                runner = make_runner(num_head, folder)
                backend = triton_backend.TritonAttnBackend(runner)
                backend.init_cuda_graph_state(1, 1)
            kept[num_head] = backend.cuda_graph_attn_logits
        self.assertEqual(tuple(kept[8].shape), (1, 8, 256, KV_LORA_RANK))
        self.assertEqual(tuple(kept[64].shape), (1, 64, 64, KV_LORA_RANK))
        for num_head in (64, 128):
            self.assertEqual(kept[num_head].numel(), kept[16].numel())


if __name__ == "__main__":
    unittest.main()
