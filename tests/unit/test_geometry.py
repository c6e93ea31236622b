"""What is read from a configuration, against real ones and against SGLang's own reading."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from sglang_pp_mla.geometry import Experts, Model, Quantization, is_mla, read_config, text_config

TESTS = Path(__file__).parents[1]
CONFIGS = sorted(
    [
        *(TESTS / "data").glob("*.json"),
        *(TESTS / "data" / "models").glob("*/config.json"),
        *(TESTS.parent / "sglang_pp_mla" / "rehearsal" / "models").glob("*.json"),
    ]
)


def config_of(name: str) -> dict[str, Any]:
    return read_config(TESTS / "data" / name)


def test_there_are_configurations_to_read() -> None:
    assert len(CONFIGS) >= 12


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem if path.stem != "config" else path.parent.name)
def test_every_real_configuration_is_read(path: Path) -> None:
    config = read_config(path)
    model = Model.from_config(config)
    assert model.architecture == config["architectures"][0]
    assert (model.num_layers, model.hidden_size) == (config["num_hidden_layers"], config["hidden_size"])
    assert len(model.moe_layers) == model.num_layers
    assert model.attention.is_mla is is_mla(config)
    assert any(model.moe_layers) is (model.experts is not None)
    hash(model)


def test_deepseek_v3() -> None:
    model = Model.from_config(config_of("deepseek-v3.json"))
    assert model.moe_layers == (False,) * 3 + (True,) * 58
    assert model.experts == Experts(routed=256, per_token=8, shared=1, width=2048, shared_width=2048)
    assert model.attention.latent_width == 576
    assert model.attention.value_width == 512
    assert model.quantization == Quantization("fp8", 8, (128, 128), 4)


def test_kimi_k26_quantises_its_routed_experts_alone(kimi: dict[str, Any]) -> None:
    quantization = Model.from_config(kimi).quantization
    assert quantization is not None
    assert (quantization.bits, quantization.block, quantization.scale_bytes) == (4, (1, 32), 2)
    layer = "model.layers.3"
    assert quantization.quantises(f"{layer}.mlp.experts.7.gate_proj")
    for module in (
        "lm_head",
        f"{layer}.self_attn.kv_b_proj",
        f"{layer}.mlp.shared_experts.up_proj",
        "model.layers.0.mlp.down_proj",
    ):
        assert not quantization.quantises(module), module


def test_without_mla() -> None:
    model = Model.from_config(config_of("qwen3-30b-a3b.json"))
    assert (model.attention.num_kv_heads, model.attention.head_dim) == (4, 128)
    assert not model.attention.is_mla
    assert model.moe_layers == (True,) * 48


def test_a_wrapper_gives_its_text_model(kimi: dict[str, Any]) -> None:
    text = {key: value for key, value in kimi.items() if key not in ("architectures", "quantization_config")}
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2"},
        "quantization_config": kimi["quantization_config"],
    }
    plain, model = Model.from_config(kimi), Model.from_config(wrapper)
    assert text_config(wrapper) is wrapper["text_config"]
    assert (model.multimodal, plain.multimodal) == (True, False)
    assert (model.architecture, model.model_type) == ("KimiK25ForConditionalGeneration", "kimi_k2")
    assert model.attention == plain.attention
    assert model.quantization == plain.quantization
    # K2.6 as published keeps it with the text model.
    inside = copy.deepcopy(wrapper)
    inside["text_config"]["quantization_config"] = inside.pop("quantization_config")
    assert Model.from_config(inside).quantization == plain.quantization


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"first_k_dense_replace": 2, "moe_layer_freq": 1}, "001111"),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "001010"),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, "011011"),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3}, "000111"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [5]}, "010100"),
        ({"n_routed_experts": None}, "000000"),
    ],
)
def test_which_layers_are_mixtures(changes: dict[str, Any], sparse: str) -> None:
    config = {**config_of("models/mla"), "num_hidden_layers": 6, **changes}
    assert Model.from_config(config).moe_layers == tuple(kind == "1" for kind in sparse)


@st.composite
def index_sharing(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if draw(st.booleans()):
        config["index_topk_freq"] = draw(st.integers(1, 6))
    if draw(st.booleans()):
        config["index_skip_topk_offset"] = draw(st.integers(1, 6))
    if draw(st.booleans()):
        config["index_topk_pattern"] = "F" + draw(st.text("FS", max_size=14))
    if draw(st.integers(0, 3)) == 0:
        config["cli_factor"] = draw(st.integers(1, 4))
    if draw(st.integers(0, 3)) == 0:
        config["indexer_types"] = ["full", *draw(st.lists(st.sampled_from(["full", "shared"]), max_size=14))]
    return config


@pytest.fixture(scope="module")
def skips_topk(sglang_release: Version) -> Callable[[Any, int], bool]:
    """SGLang's own answer to whether a layer takes the indices of the one before."""
    if sglang_release < Version("0.5.20"):
        pytest.skip("this release decides it inside of the attention's constructor")
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    return dsa_layer_skips_topk


@given(sharing=index_sharing())
def test_layers_without_an_indexer_are_those_of_sglang(
    sharing: dict[str, Any], skips_topk: Callable[[Any, int], bool]
) -> None:
    config = {**config_of("models/sparse"), "num_hidden_layers": 13, **sharing}
    indexer = Model.from_config(config).indexer
    assert indexer is not None
    assert indexer.shared == tuple(skips_topk(SimpleNamespace(**config), layer) for layer in range(13))


def test_layers_that_share_an_index_are_ranges() -> None:
    config = {**config_of("models/sparse"), "num_hidden_layers": 7, "index_topk_pattern": "FFSSFSF"}
    assert Model.from_config(config).joined_layers == ((1, 4), (4, 6))
    assert Model.from_config(config_of("models/sparse")).joined_layers == ()
    assert Model.from_config(config_of("models/mla")).joined_layers == ()


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Quantization("awq", 4, (1, 128), 2, 4)),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "dynamic": {r"-:.*attn.*": {}}},
            Quantization("gptq", 8, (1, 0), 2, 8, (r"re:.*attn.*",)),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*self_attn*"]},
            Quantization("modelopt", 4, (1, 16), 1, 0, ("lm_head", "re:.*self_attn.*$")),
        ),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, Quantization("fp8", 8, (0, 0), 4, 0, ("lm_head",))),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
            },
            Quantization("compressed-tensors", 8, (1, 0), 4),
        ),
        ({}, None),
    ],
)
def test_quantisations(quantization: dict[str, Any], expected: Quantization | None) -> None:
    config = {**config_of("models/mla"), "quantization_config": quantization}
    assert Model.from_config(config).quantization == expected


@pytest.mark.parametrize(
    ("name", "what"),
    [("linear", "linear attention"), ("sinks", "sliding attention"), ("sliding", "sliding attention"), ("mla", "")],
)
def test_other_attention_is_told(name: str, what: str) -> None:
    assert what in (said := Model.from_config(config_of(f"models/{name}")).other_attention)
    assert bool(said) is bool(what)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 0}, "has num_hidden_layers = 0; a positive whole number is needed"),
        ({"hidden_size": None}, "has hidden_size = None"),
        ({"num_attention_heads": True}, "has num_attention_heads = True"),
        ({"vocab_size": "many"}, "has vocab_size = 'many'"),
        ({"v_head_dim": None, "qk_rope_head_dim": None}, "kv_lora_rank but no qk_rope_head_dim and no v_head_dim"),
        ({"kv_lora_rank": -64}, "has kv_lora_rank = -64; no width is negative"),
        ({"kv_lora_rank": None, "head_dim": None, "hidden_size": 1}, "has heads of 0 elements"),
        ({"kv_lora_rank": None, "head_dim": -8}, "has heads of -8 elements"),
        ({"torch_dtype": "int3"}, "has the dtype 'int3'"),
        ({"mlp_layer_types": ["dense"]}, "lists 1 layers as dense or sparse but has 4"),
        ({"intermediate_size": None}, "has intermediate_size = None"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "is quantised by bitnet, whose bytes are not known"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "has no group_size"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "has no config_groups with weights"),
        ({"quantization_config": "fp8"}, "is a str, not an object"),
        ({"architectures": None, "model_type": None}, "names neither an architecture nor a model_type"),
        ({"num_hidden_layers": 10**6}, "has num_hidden_layers = 1000000; at most 1,024 are counted"),
        ({"architectures": 3}, "has a value of another kind than expected"),
        ({"architectures": {"a": 1}}, "has a value of another kind than expected"),
        ({"layer_types": 1.5}, "has a value of another kind than expected"),
        ({"mlp_layer_types": 7}, "has a value of another kind than expected"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "has a value of another kind"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}}, "has a value of another kind"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": ["g"]}},
            "has a value of another kind",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        Model.from_config({**config_of("models/mla"), **changes})
    assert "\n" not in str(refusal.value)


def test_a_file_or_its_folder() -> None:
    folder = TESTS / "data" / "models" / "mla"
    assert (
        read_config(folder)
        == read_config(str(folder / "config.json"))
        == json.loads((folder / "config.json").read_text())
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read as a model configuration"),
        ("[" * 100_000, "cannot be read as a model configuration"),
        ("[]", "holds a list, not an object"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_config(tmp_path)
    assert "\n" not in str(refusal.value)


def test_the_hub_is_asked_only_if_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"the hub may not be asked for moonshotai/Kimi-K2\.6"):
        read_config("moonshotai/Kimi-K2.6")
    # No machine that runs this test may reach the hub; that it was asked is what is seen.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"The hub did not give the config\.json of moonshotai/Kimi-K2\.6"):
        read_config("moonshotai/Kimi-K2.6", allow_network=True)
