"""A model small enough for a laptop, with the architecture, layers and attention geometry of a real one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from sglang_pp_mla.geometry import MLA_WIDTHS, OTHER_ATTENTION, expert_count_key, is_mla, named

Config = dict[str, Any]

GEOMETRY = MLA_WIDTHS
"""Kept exactly."""

_HIDDEN = 64
_HEADS = 2
_EXPERTS = 4
_EXPERTS_PER_TOKEN = 2
_VOCABULARY = 512
_Q_RANK = 48
_YARN_POSITIONS = 256

# What has no meaning for weights that are made here, or would make a loader fetch something.
_DROPPED = (
    "quantization_config",
    "compression_config",
    "auto_map",
    "_name_or_path",
    "ep_size",
    "num_mtp_layers",
    "transformers_version",
)
# Attention that is not, or not only, what the Triton backend serves.
_OTHER_ATTENTION = {"index_topk": "sparse attention with an indexer", **OTHER_ATTENTION}
# Model types that are DeepSeek V3 under another name, and whose configuration class is remote code.
_SAME_AS_DEEPSEEK_V3 = ("kimi_k2", "kimi_k25", "kimi_vl")


def kimi_k26() -> Config:
    """The configuration of Kimi K2.6's text model, 61 layers, as published; carried by this package."""
    path = Path(__file__).with_name("models") / "kimi-k2.6-text.json"
    config: Config = json.loads(path.read_text(encoding="utf-8"))
    return config


def shrink(
    config: Config,
    *,
    layers: int | None = None,
    hidden_size: int = _HIDDEN,
    heads: int = _HEADS,
    experts: int = _EXPERTS,
    vocab_size: int = _VOCABULARY,
) -> Config:
    """Make a real model's configuration small, for float32 on a CPU.

    Kept: the architecture, the number of layers (unless ``layers`` asks for another), which layers are
    dense and which are mixtures of experts, the MLA geometry (:data:`GEOMETRY`) or, without MLA, the
    head size and whether key heads are shared. Everything else becomes small; quantization goes; a
    ``rope_scaling`` of type yarn is added to an MLA model that has none, since SGLang's CPU path asserts
    one. A multimodal wrapper gives its ``text_config``, as ``DeepseekV3ForCausalLM`` if that has MLA.

    ``config`` is what a ``config.json`` holds; it is not changed. Raises ``ValueError``, with one
    sentence, for a configuration that cannot be made small.
    """
    source = copy.deepcopy(config)
    wrapper = source.get("text_config")
    if isinstance(wrapper, dict):
        if "architectures" not in wrapper and not is_mla(wrapper):
            raise ValueError(
                f"The wrapper {named(source)} holds a text_config without MLA that names no architecture; "
                "rehearse the text model's own config.json."
            )
        source = wrapper
        if is_mla(source):
            source["architectures"] = ["DeepseekV3ForCausalLM"]
            source["model_type"] = "deepseek_v3"
    if source.get("model_type") in _SAME_AS_DEEPSEEK_V3 and is_mla(source):
        source["model_type"] = "deepseek_v3"
    for key, what in _OTHER_ATTENTION.items():
        if source.get(key):
            raise ValueError(
                f"{named(source)} has {what} ({key}), which a shrunk model cannot stand for; "
                "rehearse a model whose layers all use full attention."
            )
    if not source.get("architectures"):
        raise ValueError("The configuration names no architecture; add an `architectures` list with one class name.")
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(source.get(key), int) or isinstance(source[key], bool) or source[key] < 1:
            raise ValueError(
                f"The configuration of {named(source)} has {key} = {source.get(key)!r}; "
                "a positive whole number is needed."
            )
    small = {key: value for key, value in source.items() if key not in _DROPPED}
    _set_layers(small, source, source["num_hidden_layers"] if layers is None else layers)
    if is_mla(source):
        _shrink_mla(small, source, hidden_size, heads)
    else:
        _shrink_plain(small, source, heads)
    small["hidden_size"] = hidden_size
    small["num_attention_heads"] = heads
    small["vocab_size"] = vocab_size
    for key, value in (("intermediate_size", 2 * hidden_size), ("moe_intermediate_size", hidden_size // 2)):
        if key in source:
            small[key] = value
    _shrink_experts(small, source, experts)
    for key, fallback in (("bos_token_id", 0), ("eos_token_id", 1), ("pad_token_id", 0)):
        if source.get(key) is not None:
            small[key] = source[key] if _within(source[key], vocab_size) else fallback
    if "num_nextn_predict_layers" in source:
        # Draft layers are served by another runner; the target model does not have them.
        small["num_nextn_predict_layers"] = 0
    for key in ("torch_dtype", "dtype"):
        if key in source or key == "torch_dtype":
            small[key] = "float32"
    return small


def _within(token: Any, vocab_size: int) -> bool:
    tokens = token if isinstance(token, list) else [token]
    return all(isinstance(one, int) and 0 <= one < vocab_size for one in tokens)


def _set_layers(small: Config, source: Config, layers: int) -> None:
    total = source["num_hidden_layers"]
    if layers < 1:
        raise ValueError(f"A model needs at least one layer, not {layers}; ask for 1 to {total}.")
    small["num_hidden_layers"] = layers
    for key, value in source.items():
        if isinstance(value, list) and len(value) == total and total > 1 and key != "architectures":
            if layers > total:
                raise ValueError(
                    f"{named(source)} lists {key} for its {total} layers, so it cannot be given {layers}; "
                    f"ask for at most {total}."
                )
            small[key] = value[:layers]
    if isinstance(source.get("first_k_dense_replace"), int):
        small["first_k_dense_replace"] = min(source["first_k_dense_replace"], layers)
    if isinstance(source.get("max_window_layers"), int):
        small["max_window_layers"] = min(source["max_window_layers"], layers)


def _shrink_mla(small: Config, source: Config, hidden_size: int, heads: int) -> None:
    for key in GEOMETRY:
        if not isinstance(source.get(key), int):
            raise ValueError(
                f"{named(source)} has kv_lora_rank but {key} = {source.get(key)!r}; "
                "an MLA configuration must give all of " + ", ".join(GEOMETRY) + "."
            )
    small["num_key_value_heads"] = heads
    if source.get("q_lora_rank"):
        small["q_lora_rank"] = min(_Q_RANK, source["q_lora_rank"])
    theta = source.get("rope_theta")
    scaling = source.get("rope_scaling")
    if not isinstance(scaling, dict):
        # transformers 5 writes both in one.
        scaling = source.get("rope_parameters")
    yarn: Config = dict(scaling) if isinstance(scaling, dict) else {}
    theta = yarn.pop("rope_theta", theta)
    small.pop("rope_parameters", None)
    if (yarn.get("rope_type") or yarn.get("type")) not in ("yarn", "deepseek_yarn"):
        yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn.pop("rope_type", None)
    yarn["type"] = "yarn"
    # Positions are what the tables are long for; the factor is in the numbers and stays.
    yarn["original_max_position_embeddings"] = _YARN_POSITIONS
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if isinstance(yarn.get(key), int):
            # transformers 5 accepts nothing but a float here.
            yarn[key] = float(yarn[key])
    small["rope_scaling"] = yarn
    small["rope_theta"] = 10000.0 if theta is None else float(theta)
    small["max_position_embeddings"] = int(_YARN_POSITIONS * float(yarn.get("factor", 4.0)))


def _shrink_plain(small: Config, source: Config, heads: int) -> None:
    width = source.get("head_dim") or source["hidden_size"] // source["num_attention_heads"]
    small["head_dim"] = width
    shared = source.get("num_key_value_heads", source["num_attention_heads"]) < source["num_attention_heads"]
    small["num_key_value_heads"] = 1 if shared else heads
    if isinstance(source.get("max_position_embeddings"), int):
        small["max_position_embeddings"] = min(source["max_position_embeddings"], 4096)


def _shrink_experts(small: Config, source: Config, experts: int) -> None:
    total = expert_count_key(source)
    if total is None:
        return
    small[total] = min(experts, source[total])
    if isinstance(source.get("num_experts_per_tok"), int):
        small["num_experts_per_tok"] = min(_EXPERTS_PER_TOKEN, source["num_experts_per_tok"], small[total])
    for key in ("n_group", "topk_group"):
        if key in source:
            small[key] = 1
