"""What a model's configuration says of its layers: attention, experts, quantisation. Pure, no torch, no SGLang."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

MLA_WIDTHS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""What SGLang's MLA kernels specialise on."""

OTHER_ATTENTION = {
    "linear_attn_config": "linear attention layers",
    "mamba_config": "state-space layers",
    "attn_type_list": "linear attention layers",
    "hybrid_override_pattern": "state-space layers",
    "full_attention_interval": "linear attention layers",
    "compress_ratios": "layers with a compressed cache",
}
"""Keys of a configuration whose layers do not all keep each token's keys and values, and what such layers are."""

_MOST_LAYERS = 1024
"""Several times those of any model; what is counted layer by layer would not end for a number gone wrong."""

_EVERY_TOKEN = ("full_attention", "indexed_attention")

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""The names under which configurations give the number of routed experts of a layer."""

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def is_mla(config: Config) -> bool:
    """Whether the configuration describes multi-head latent attention."""
    return bool(config.get("kv_lora_rank"))


def expert_count_key(config: Config) -> str | None:
    """The name under which the configuration gives its routed experts, if it has any."""
    return next((key for key in EXPERT_COUNTS if config.get(key)), None)


def text_config(config: Config) -> Config:
    """The language model's own configuration: ``text_config`` of a multimodal wrapper, else ``config``."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def named(config: Config) -> str:
    """What to call the model in a sentence."""
    architectures = config.get("architectures") or [config.get("model_type")]
    return str(architectures[0] or "the model")


def read_config(model: str | Path, *, allow_network: bool = False) -> dict[str, Any]:
    """What a ``config.json`` holds: given as the file, as a folder that has one, or as a hub id.

    A hub id is asked for only with ``allow_network`` and where ``huggingface_hub`` is installed. Raises
    ``ValueError``, in one sentence, for anything else.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        path = _from_hub(str(model), path, allow_network)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a model configuration ({error}).") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a model configuration: it holds a {type(config).__name__}, not an object.")
    return config


def _from_hub(model: str, path: Path, allow_network: bool) -> Path:
    looks_like_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not model.endswith(".json")
    if not looks_like_id:
        raise ValueError(f"{path} does not exist; give a config.json, a folder that holds one, or a hub id.")
    if not allow_network:
        raise ValueError(
            f"There is no {path} here, and the hub may not be asked for {model}; "
            "give a config.json or allow the network."
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"There is no {path} here, and without huggingface_hub the hub cannot be asked for {model}; install it."
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub's own errors, and its transport's: none of them is a kind of ValueError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"The hub did not give the config.json of {model} ({reason}).") from error


@dataclass(frozen=True)
class Attention:
    """Attention of every layer. With MLA ``head_dim`` is None, and without it the five widths are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    bias: bool = False
    qk_norm: bool = False

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def latent_width(self) -> int:
        """Elements of a token's cache in one MLA layer: latent and rope part."""
        return (self.kv_lora_rank or 0) + (self.qk_rope_head_dim or 0)

    @property
    def value_width(self) -> int:
        """Width of a decode result of one head: the latent under MLA, else a head."""
        return self.kv_lora_rank or self.head_dim or 0


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts layer: gated MLPs of ``width`` and one shared one of ``shared_width`` (0 if none)."""

    routed: int
    per_token: int
    shared: int
    width: int
    shared_width: int


@dataclass(frozen=True)
class Indexer:
    """The indexer of DeepSeek sparse attention: its heads, and which layers use the one before's choice.

    ``shared[i]`` is true where layer ``i`` has no indexer and takes the indices that layer ``i - 1`` used.
    """

    heads: int
    head_dim: int
    topk: int
    shared: tuple[bool, ...]


@dataclass(frozen=True)
class Quantization:
    """How linear weights are stored.

    ``bits`` a weight; a scale of ``scale_bytes`` for each block of ``block`` (output, input) weights, where 0
    stands for the whole side; a zero point of ``zero_bits`` a block. ``ignored`` are module names, dotted parts
    of them, or ``re:`` patterns, that stay in the model's own type. ``method`` is the configuration's word.
    """

    method: str
    bits: int
    block: tuple[int, int]
    scale_bytes: int
    zero_bits: int = 0
    ignored: tuple[str, ...] = ()

    def quantises(self, module: str) -> bool:
        """Whether the linear layer ``module``, such as ``model.layers.3.mlp.experts.0.up_proj``, is stored so."""
        return not any(_matches(pattern, module) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


@dataclass(frozen=True)
class Model:
    """What the planner and the checks need to know of a model. Made by :meth:`from_config`.

    ``moe_layers[i]`` is whether layer ``i`` is a mixture of experts. ``dtype_bytes`` are of a weight that is
    not quantised. ``multimodal`` is whether the configuration wraps a ``text_config``. ``other_attention``
    says which layers do not keep each token's keys and values, and the key that shows it; ``""`` if all do.
    ``vision`` are layers and width of a wrapper's vision tower.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    attention: Attention
    moe_layers: tuple[bool, ...]
    intermediate_size: int
    experts: Experts | None
    first_k_dense_replace: int
    moe_layer_freq: int
    dtype_bytes: int
    quantization: Quantization | None
    indexer: Indexer | None
    max_position_embeddings: int | None
    multimodal: bool
    other_attention: str
    vision: tuple[int, int] | None = None

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read what a ``config.json`` holds. Raises ``ValueError``, in one sentence that names what is missing."""
        try:
            return cls._read(config)
        except (AttributeError, IndexError, KeyError, TypeError, re.error) as error:
            raise ValueError(
                f"The configuration has a value of another kind than expected ({type(error).__name__}: {error}); "
                "give the config.json as the model's makers publish it."
            ) from error

    @classmethod
    def _read(cls, config: Config) -> Model:
        text = text_config(config)
        architectures = config.get("architectures") or text.get("architectures") or []
        if not architectures and not (text.get("model_type") or config.get("model_type")):
            raise ValueError(
                "The configuration names neither an architecture nor a model_type; "
                "add an `architectures` list with one class name."
            )
        name = named(config if config.get("architectures") else text)
        layers = _positive(text, "num_hidden_layers", name)
        if layers > _MOST_LAYERS:
            raise ValueError(
                f"The configuration of {name} has num_hidden_layers = {layers}; at most {_MOST_LAYERS:,} are counted."
            )
        experts = _experts(text, name)
        moe_layers = _moe_layers(text, layers, experts is not None, name)
        return cls(
            architecture=str(architectures[0]) if architectures else "",
            model_type=str(text.get("model_type") or config.get("model_type") or ""),
            num_layers=layers,
            hidden_size=_positive(text, "hidden_size", name),
            vocab_size=_positive(text, "vocab_size", name),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            attention=_attention(text, name),
            moe_layers=moe_layers,
            intermediate_size=_dense_width(text, moe_layers, name),
            experts=experts,
            first_k_dense_replace=_whole(text, "first_k_dense_replace") or 0,
            moe_layer_freq=_whole(text, "moe_layer_freq") or 1,
            dtype_bytes=_dtype_bytes(text, config, name),
            quantization=_quantization(config, text, name),
            indexer=_indexer(text, layers, name),
            max_position_embeddings=_whole(text, "max_position_embeddings"),
            multimodal=text is not config,
            other_attention=_other_attention(text),
            vision=_vision(config),
        )

    @property
    def joined_layers(self) -> tuple[tuple[int, int], ...]:
        """Ranges ``[first, end)`` of more than one layer that share an indexer's choice, in order.

        SGLang to 0.5.13.post1 hands hidden states alone to the next stage, so there a stage must not begin
        within such a range; from 0.5.14 on the indices travel too (``topk_indices`` in ``deepseek_v2.py``).
        """
        if self.indexer is None:
            return ()
        starts = [layer for layer, shared in enumerate(self.indexer.shared) if not shared or layer == 0]
        ends = [*starts[1:], self.num_layers]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if end - start > 1)


def _whole(config: Config, key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(config: Config, key: str, name: str) -> int:
    value = _whole(config, key)
    if value is None or value < 1:
        raise ValueError(
            f"The configuration of {name} has {key} = {config.get(key)!r}; a positive whole number is needed."
        )
    return value


def _other_attention(text: Config) -> str:
    for key, what in OTHER_ATTENTION.items():
        if text.get(key):
            return f"{what} ({key})"
    listed = text.get("layer_types")
    other = sorted({str(kind) for kind in listed or ()} - set(_EVERY_TOKEN))
    if other:
        return f"{other[0].replace('_', ' ')} layers (layer_types)"
    windowed = listed is None and text.get("sliding_window") and text.get("use_sliding_window") is not False
    return "sliding attention layers (sliding_window)" if windowed else ""


def _vision(config: Config) -> tuple[int, int] | None:
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return None
    # SGLang takes the same for a tower that does not say; Kimi's says it with a prefix.
    layers = _whole(tower, "num_hidden_layers") or _whole(tower, "vt_num_hidden_layers") or 24
    return layers, _whole(tower, "hidden_size") or _whole(tower, "vt_hidden_size") or 1024


def _attention(text: Config, name: str) -> Attention:
    heads = _positive(text, "num_attention_heads", name)
    bias = bool(text.get("attention_bias") or text.get("qkv_bias") or text.get("model_type") in ("qwen2", "qwen2_moe"))
    kv_heads = _whole(text, "num_key_value_heads") or heads
    if not is_mla(text):
        width = _whole(text, "head_dim") or _positive(text, "hidden_size", name) // heads
        if width < 1:
            raise ValueError(f"The configuration of {name} has heads of {width} elements; a head needs at least one.")
        qk_norm = bool(text.get("use_qk_norm")) or str(text.get("model_type", "")).startswith(("qwen3", "gemma3"))
        return Attention(heads, kv_heads, head_dim=width, bias=bias, qk_norm=qk_norm)
    widths = {key: _whole(text, key) for key in MLA_WIDTHS}
    if widths["v_head_dim"] is None and text.get("model_type") == "minicpm3":
        # SGLang's and transformers' class for it both take the head size.
        widths["v_head_dim"] = _positive(text, "hidden_size", name) // heads
    missing = [key for key, value in widths.items() if value is None]
    if missing:
        raise ValueError(
            f"The configuration of {name} has kv_lora_rank but no {' and no '.join(missing)}; "
            f"MLA needs all of {', '.join(MLA_WIDTHS)}."
        )
    for key, value in widths.items():
        if value is not None and value < 0:
            raise ValueError(f"The configuration of {name} has {key} = {value}; no width is negative.")
    return Attention(
        heads,
        kv_heads,
        kv_lora_rank=widths["kv_lora_rank"],
        q_lora_rank=_whole(text, "q_lora_rank"),
        qk_rope_head_dim=widths["qk_rope_head_dim"],
        qk_nope_head_dim=widths["qk_nope_head_dim"],
        v_head_dim=widths["v_head_dim"],
        bias=bias,
    )


def _experts(text: Config, name: str) -> Experts | None:
    key = expert_count_key(text)
    if key is None:
        return None
    routed = _positive(text, key, name)
    width = _whole(text, "moe_intermediate_size") or _positive(text, "intermediate_size", name)
    shared = _whole(text, "n_shared_experts") or _whole(text, "num_shared_experts") or 0
    shared_width = _whole(text, "shared_expert_intermediate_size") or shared * width
    per_token = _whole(text, "num_experts_per_tok") or _whole(text, "num_experts_per_token") or 1
    return Experts(routed, per_token, shared or int(shared_width > 0), width, shared_width)


def _moe_layers(text: Config, layers: int, has_experts: bool, name: str) -> tuple[bool, ...]:
    if not has_experts:
        return (False,) * layers
    listed = text.get("mlp_layer_types")
    if listed is None and isinstance(text.get("moe_layer_freq"), list):
        listed = text["moe_layer_freq"]
    if listed is not None:
        if len(listed) < layers:
            raise ValueError(
                f"The configuration of {name} lists {len(listed)} layers as dense or sparse but has {layers}; "
                "the list needs one entry a layer."
            )
        return tuple(kind not in ("dense", 0) for kind in listed[:layers])
    if "decoder_sparse_step" in text or "mlp_only_layers" in text:
        step, dense = _whole(text, "decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
        return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    first, every = _whole(text, "first_k_dense_replace") or 0, _whole(text, "moe_layer_freq") or 1
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))


def _dense_width(text: Config, moe_layers: tuple[bool, ...], name: str) -> int:
    if all(moe_layers):
        return _whole(text, "intermediate_size") or 0
    return _positive(text, "intermediate_size", name)


def _dtype_bytes(text: Config, config: Config, name: str) -> int:
    found = (text.get("torch_dtype") or text.get("dtype")) or (config.get("torch_dtype") or config.get("dtype"))
    dtype = str(found or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(
            f"The configuration of {name} has the dtype {dtype!r}; one of {', '.join(DTYPE_BYTES)} is needed."
        )
    # SGLang serves a float32 checkpoint in half precision unless `--dtype` says otherwise.
    return min(DTYPE_BYTES[dtype], 2)


def _indexer(text: Config, layers: int, name: str) -> Indexer | None:
    topk = _whole(text, "index_topk")
    if topk is None:
        return None
    heads, head_dim = _positive(text, "index_n_heads", name), _positive(text, "index_head_dim", name)
    return Indexer(
        heads, head_dim, topk, tuple(_takes_the_indices_before(text, layer, name) for layer in range(layers))
    )


def _takes_the_indices_before(text: Config, layer: int, name: str) -> bool:
    """As ``dsa_layer_skips_topk`` of ``sglang/srt/configs/model_config.py`` (0.5.23) decides it."""
    kinds = text.get("indexer_types")
    if kinds is not None:
        return layer < len(kinds) and kinds[layer] == "shared"
    factor = _whole(text, "cli_factor") or 1
    if factor > 1:
        return layer % factor != 0
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return layer < len(pattern) and pattern[layer] == "S"
    every = 1 if text.get("index_topk_freq") is None else _positive(text, "index_topk_freq", name)
    offset = 2 if text.get("index_skip_topk_offset") is None else _positive(text, "index_skip_topk_offset", name)
    return max(layer - offset + 1, 0) % every != 0


def _quantization(config: Config, text: Config, name: str) -> Quantization | None:
    quant: Any = None
    for source in (config, text):
        quant = quant or source.get("quantization_config") or source.get("compression_config")
    if not quant:
        return None
    if not isinstance(quant, Mapping):
        raise ValueError(f"The quantization_config of {name} is a {type(quant).__name__}, not an object.")
    method = str(quant.get("quant_method") or quant.get("quant_algo") or "").lower()
    ignored = _ignored(quant)
    if method == "fp8":
        block = quant.get("weight_block_size")
        return Quantization("fp8", 8, (int(block[0]), int(block[1])) if block else (0, 0), 4, ignored=ignored)
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        bits = _quant_number(quant, ("bits", "w_bit"), name)
        group = _quant_number(quant, ("group_size", "q_group_size"), name)
        # Both store a zero point a group, whether it is used or not.
        return Quantization(method, bits, (1, max(group, 0)), 2, zero_bits=bits, ignored=ignored)
    if method == "compressed-tensors":
        return _compressed_tensors(quant, ignored, name)
    if method.startswith("modelopt") or method in ("nvfp4", "fp8_pb_wo"):
        algorithm = str(quant.get("quant_algo") or method).upper()
        if "NVFP4" in algorithm or "FP4" in algorithm:
            return Quantization(method, 4, (1, 16), 1, ignored=ignored)
        if "FP8" in algorithm:
            return Quantization(method, 8, (0, 0), 4, ignored=ignored)
    raise ValueError(
        f"{name} is quantised by {method or 'an unnamed method'}, whose bytes are not known here; "
        "give the folder with its safetensors files."
    )


def _ignored(quant: Config) -> tuple[str, ...]:
    found: list[str] = []
    for key in ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"):
        listed = quant.get(key)
        if isinstance(listed, Iterable) and not isinstance(listed, str):
            found += [_as_pattern(str(one)) for one in listed]
    # GPTQ's own way: "-:" and a pattern for what stays as it was.
    dynamic = quant.get("dynamic")
    if isinstance(dynamic, Mapping):
        found += [_as_pattern("re:" + one[2:]) for one in dynamic if str(one).startswith("-:")]
    return tuple(dict.fromkeys(found))


def _as_pattern(one: str) -> str:
    if one.startswith("re:"):
        re.compile(one[3:])  # an error in it is the configuration's, and told where that is read
        return one
    if "*" not in one:
        return one
    return "re:" + ".*".join(re.escape(part) for part in one.split("*")) + "$"


def _quant_number(quant: Config, keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        value = _whole(quant, key)
        if value is not None:
            return value
    raise ValueError(f"The quantization_config of {name} has no {keys[0]}; a whole number is needed.")


def _compressed_tensors(quant: Config, ignored: tuple[str, ...], name: str) -> Quantization:
    groups = [group for group in (quant.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
    if not weights:
        raise ValueError(f"The quantization_config of {name} has no config_groups with weights.")
    first = weights[0]
    if any(other.get("num_bits") != first.get("num_bits") for other in weights):
        raise ValueError(
            f"{name} mixes weights of {first.get('num_bits')} bits and others; "
            "give the folder with its safetensors files."
        )
    bits = _quant_number(first, ("num_bits",), name)
    strategy = first.get("strategy")
    if strategy in ("group", "tensor_group"):
        group = _quant_number(first, ("group_size",), name)
        # NVFP4 keeps its scales in fp8.
        scale = 1 if strategy == "tensor_group" and first.get("type") == "float" else 2
        return Quantization(
            "compressed-tensors", bits, (1, group), scale, 0 if first.get("symmetric", True) else bits, ignored
        )
    if strategy == "block":
        block = first.get("block_structure")
        if not isinstance(block, list) or len(block) != 2:
            raise ValueError(f"The quantization_config of {name} has block weights but no block_structure of two.")
        return Quantization("compressed-tensors", bits, (int(block[0]), int(block[1])), 4, 0, ignored)
    return Quantization("compressed-tensors", bits, (1, 0) if strategy == "channel" else (0, 0), 4, 0, ignored)
