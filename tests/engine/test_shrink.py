"""Shrinking real configurations."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_pp_mla.rehearsal import shrink
from sglang_pp_mla.rehearsal.shrink import GEOMETRY, kimi_k26

DATA = Path(__file__).parents[1] / "data"
MLA = ["kimi-k2.6-text", "deepseek-v3", "minicpm3-4b", "mla-256x64"]


def load(name: str) -> dict[str, Any]:
    if name == "kimi-k2.6-text":  # the one the package itself carries
        return kimi_k26()
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MLA)
def test_geometry_layers_and_architecture_are_kept(name: str) -> None:
    real = load(name)
    before = copy.deepcopy(real)
    small = shrink(real)
    assert real == before
    for key in (*GEOMETRY, "architectures", "num_hidden_layers", "rms_norm_eps", "hidden_act"):
        assert small[key] == real[key]
    assert small["hidden_size"] == 64
    assert small["num_attention_heads"] == small["num_key_value_heads"] == 2
    assert small["vocab_size"] == 512
    assert small["torch_dtype"] == "float32"
    assert "quantization_config" not in small
    assert small["rope_scaling"]["type"] == "yarn"


def test_the_routing_is_kept_and_its_sizes_are_small() -> None:
    small = shrink(load("deepseek-v3"))
    assert (small["n_routed_experts"], small["num_experts_per_tok"]) == (4, 2)
    assert small["n_group"] == small["topk_group"] == 1
    assert small["first_k_dense_replace"] == 3
    assert small["scoring_func"] == "sigmoid"
    assert small["num_nextn_predict_layers"] == 0


def test_yarn_keeps_what_enters_the_numbers() -> None:
    real, small = load("kimi-k2.6-text"), shrink(load("kimi-k2.6-text"))
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        assert small["rope_scaling"][key] == real["rope_scaling"][key]
    assert small["rope_theta"] == real["rope_theta"]


def test_rope_parameters_of_transformers_5_are_read() -> None:
    real = load("kimi-k2.6-text")
    real["rope_parameters"] = {**real.pop("rope_scaling"), "rope_type": "yarn", "rope_theta": real.pop("rope_theta")}
    small = shrink(real)
    assert "rope_parameters" not in small
    assert small["rope_theta"] == 50000.0
    assert small["rope_scaling"]["factor"] == 64.0


def test_fewer_layers_keep_the_dense_ones_within() -> None:
    assert shrink(load("deepseek-v3"), layers=2)["first_k_dense_replace"] == 2
    assert shrink(load("kimi-k2.6-text"), layers=7)["num_hidden_layers"] == 7


def test_lists_of_layers_are_cut() -> None:
    real = {**load("kimi-k2.6-text"), "moe_layer_freq": [0] + [1] * 60}
    assert shrink(real, layers=3)["moe_layer_freq"] == [0, 1, 1]
    with pytest.raises(ValueError, match="at most 61"):
        shrink(real, layers=62)


def test_a_wrapper_gives_its_text_model() -> None:
    text = load("kimi-k2.6-text")
    del text["architectures"]
    text["model_type"] = "kimi_k2"
    small = shrink({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text})
    assert small["architectures"] == ["DeepseekV3ForCausalLM"]
    assert small["model_type"] == "deepseek_v3"
    assert small["num_hidden_layers"] == 61


def test_a_model_without_mla_keeps_its_head_size() -> None:
    small = shrink(load("qwen3-30b-a3b"))
    assert small["head_dim"] == 128
    assert small["num_key_value_heads"] == 1
    assert small["num_experts"] == 4
    assert small["num_hidden_layers"] == 48


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": None}, "architectures"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_attention_heads": "many"}, "num_attention_heads = 'many'"),
        ({"v_head_dim": None}, "v_head_dim = None"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear attention"),
    ],
)
def test_what_cannot_be_shrunk_is_said_in_one_sentence(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        shrink({**load("kimi-k2.6-text"), **change})
    assert "\n" not in str(raised.value)


def test_no_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer, not 0"):
        shrink(load("kimi-k2.6-text"), layers=0)
