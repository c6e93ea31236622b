"""Bytes of weights one GPU holds, layer by layer: from a checkpoint's headers, else from the configuration. Pure."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.geometry import Model, Quantization

COUNTED = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "kimi_k2",
    "llama",
    "minicpm3",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Model types whose layers are made up as :func:`configured_tensors` says."""

# Modules whose weights tensor parallelism divides; what is not here every rank has whole.
_DIVIDED = frozenset(
    (
        *("q_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "o_proj"),
        *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "experts"),
        *("embed_tokens", "lm_head"),
    )
)
_BY_KV_HEAD = frozenset(("k_proj", "v_proj"))
_NOT_TEXT = re.compile(r"(^|\.)(vision|visual|image|audio|mm_|multi_modal|patch_)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)embed_tokens\.")
_HEAD = re.compile(r"(^|\.)lm_head\.")
_DRAFT = re.compile(r"(^|\.)(mtp|eh_proj)\.")
_STORED_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}
_LONGEST_HEADER = 100 * 10**6  # the format's own limit


@dataclass(frozen=True)
class Tensor:
    """A weight under its name in a checkpoint; all routed experts of a layer may be one."""

    name: str
    elements: int
    size: int
    """Bytes on a GPU that holds the whole of it."""


@dataclass(frozen=True)
class Weights:
    """Bytes on one GPU: of each layer, and of what the first, the last or every stage has besides.

    ``embedding`` is on the first stage and ``head``, with the final norm, on the last. ``everywhere`` is what
    every stage loads, such as the vision tower of Kimi K2.5. ``measured`` is whether a checkpoint was read.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    everywhere: int
    measured: bool

    def stage(self, start: int, end: int) -> int:
        """Bytes of a stage with layers ``[start, end)``."""
        first = self.embedding if start == 0 else 0
        last = self.head if end == len(self.layers) else 0
        return self.everywhere + sum(self.layers[start:end]) + first + last


def weights_of(model: Model, folder: Path | None, *, tp_size: int = 1, pp_size: int = 1) -> Weights:
    """Weights of each layer on one of ``tp_size`` GPUs. ``folder`` is read where it has safetensors files.

    With ``pp_size`` above 1 the last stage keeps a copy of a tied embedding. Raises ``ValueError``, in one
    sentence, for safetensors files that cannot be read or hold nothing of a layer.
    """
    measured = folder is not None and any(folder.glob("*.safetensors"))
    tensors: Iterable[Tensor] = (
        checkpoint_tensors(folder, model) if measured and folder is not None else configured_tensors(model)
    )
    layers = [0] * model.num_layers
    embedding = head = everywhere = 0
    for tensor in tensors:
        size = share(tensor.name, tensor.size, tp_size, model.attention.num_kv_heads)
        layer = _LAYER.search(tensor.name)
        if _NOT_TEXT.search(tensor.name):
            everywhere += tensor.size
        elif layer is not None:
            # Layers beyond the model's own are a draft's, which another runner loads.
            if int(layer[1]) < model.num_layers:
                layers[int(layer[1])] += size
        elif _EMBEDDING.search(tensor.name):
            embedding += size
        elif not _DRAFT.search(tensor.name) and not (model.tie_word_embeddings and _HEAD.search(tensor.name)):
            head += size
    if measured and not all(layers):
        empty = layers.index(0)
        raise ValueError(f"The safetensors files of {folder} hold nothing of layer {empty}; are all shards there?")
    if model.tie_word_embeddings and pp_size > 1:
        # The last stage has no embedding to share, so it loads a copy.
        head += embedding
    if model.vision is not None and not measured:
        # Attention and an MLP of about four times the width; a checkpoint tells it exactly.
        depth, width = model.vision
        everywhere = 12 * depth * width**2 * model.dtype_bytes
    absorbed = math.ceil(absorbed_bytes(model) / tp_size)
    return Weights(tuple(size + absorbed for size in layers), embedding, head, everywhere, measured)


def absorbed_bytes(model: Model) -> int:
    """Bytes a layer of the two halves of ``kv_b_proj`` that SGLang keeps beside it, for decode over the latent.

    ``w_kc`` and ``w_vc``, copied after loading and in the model's own type (``deepseek_weight_loader.py``).
    """
    attention = model.attention
    if not attention.is_mla:
        return 0
    width = (attention.qk_nope_head_dim or 0) + (attention.v_head_dim or 0)
    return attention.num_heads * width * (attention.kv_lora_rank or 0) * model.dtype_bytes


def share(name: str, size: int, tp_size: int, num_kv_heads: int) -> int:
    """Bytes of a tensor on one of ``tp_size`` ranks."""
    parts = name.split(".")
    if _DIVIDED.intersection(parts) and "indexer" not in parts:
        return math.ceil(size / tp_size)
    if _BY_KV_HEAD.intersection(parts):
        return math.ceil(size / min(tp_size, num_kv_heads))
    return size


# From the configuration


def configured_tensors(model: Model) -> Iterator[Tensor]:
    """The weights that the configuration makes one expect."""
    make = _Maker(model)
    # SGLang pads the vocabulary to a multiple of 64; both ends have it so.
    vocabulary = -(-model.vocab_size // 64) * 64
    yield make.plain("model.embed_tokens.weight", vocabulary, model.hidden_size)
    for layer in range(model.num_layers):
        yield from _layer(model, layer, make)
    yield make.plain("model.norm.weight", model.hidden_size)
    if not model.tie_word_embeddings:
        yield make.plain("lm_head.weight", vocabulary, model.hidden_size)


class _Maker:
    def __init__(self, model: Model) -> None:
        self.dtype_bytes = model.dtype_bytes
        self.quantization = model.quantization

    def plain(self, name: str, *shape: int) -> Tensor:
        elements = math.prod(shape)
        return Tensor(name, elements, elements * self.dtype_bytes)

    def linear(self, module: str, outputs: int, inputs: int, count: int = 1) -> Tensor:
        """``count`` linear layers of one shape."""
        elements = count * outputs * inputs
        quant = self.quantization
        if quant is None or not quant.quantises(module):
            return Tensor(f"{module}.weight", elements, elements * self.dtype_bytes)
        return Tensor(f"{module}.weight", elements, count * quantised_bytes(quant, outputs, inputs))


def quantised_bytes(quant: Quantization, outputs: int, inputs: int) -> int:
    """Bytes of a quantised linear weight with its scales and zero points."""
    rows, columns = quant.block[0] or outputs, quant.block[1] or inputs
    blocks = -(-outputs // rows) * -(-inputs // columns)
    return -(-outputs * inputs * quant.bits // 8) + blocks * quant.scale_bytes + -(-blocks * quant.zero_bits // 8)


def _layer(model: Model, layer: int, make: _Maker) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}"
    hidden = model.hidden_size
    yield make.plain(f"{prefix}.input_layernorm.weight", hidden)
    yield make.plain(f"{prefix}.post_attention_layernorm.weight", hidden)
    attention = _mla if model.attention.is_mla else _grouped_attention
    yield from attention(model, layer, f"{prefix}.self_attn", make)
    if not model.moe_layers[layer]:
        yield from _gated_mlp(f"{prefix}.mlp", hidden, model.intermediate_size, make)
        return
    experts = model.experts
    assert experts is not None
    yield make.plain(f"{prefix}.mlp.gate.weight", experts.routed, hidden)
    yield from _gated_mlp(f"{prefix}.mlp.experts.0", hidden, experts.width, make, experts.routed)
    if experts.shared_width:
        one = "shared_expert" if model.model_type.startswith("qwen") else "shared_experts"
        yield from _gated_mlp(f"{prefix}.mlp.{one}", hidden, experts.shared_width, make)
        if one == "shared_expert":
            yield make.plain(f"{prefix}.mlp.shared_expert_gate.weight", hidden)


def _gated_mlp(prefix: str, hidden: int, width: int, make: _Maker, count: int = 1) -> Iterator[Tensor]:
    yield make.linear(f"{prefix}.gate_proj", width, hidden, count)
    yield make.linear(f"{prefix}.up_proj", width, hidden, count)
    yield make.linear(f"{prefix}.down_proj", hidden, width, count)


def _mla(model: Model, layer: int, prefix: str, make: _Maker) -> Iterator[Tensor]:
    attention, hidden = model.attention, model.hidden_size
    latent, rope = attention.kv_lora_rank or 0, attention.qk_rope_head_dim or 0
    nope, value = attention.qk_nope_head_dim or 0, attention.v_head_dim or 0
    queries = attention.num_heads * (nope + rope)
    if attention.q_lora_rank is None:
        yield make.linear(f"{prefix}.q_proj", queries, hidden)
    else:
        yield make.linear(f"{prefix}.q_a_proj", attention.q_lora_rank, hidden)
        yield make.plain(f"{prefix}.q_a_layernorm.weight", attention.q_lora_rank)
        yield make.linear(f"{prefix}.q_b_proj", queries, attention.q_lora_rank)
    yield make.linear(f"{prefix}.kv_a_proj_with_mqa", latent + rope, hidden)
    yield make.plain(f"{prefix}.kv_a_layernorm.weight", latent)
    yield make.linear(f"{prefix}.kv_b_proj", attention.num_heads * (nope + value), latent)
    yield make.linear(f"{prefix}.o_proj", hidden, attention.num_heads * value)
    if attention.bias:
        yield make.plain(f"{prefix}.bias", (attention.q_lora_rank or 0) + latent + rope + hidden)
    indexer = model.indexer
    if indexer is not None and not indexer.shared[layer]:
        yield make.linear(f"{prefix}.indexer.wq_b", indexer.heads * indexer.head_dim, attention.q_lora_rank or hidden)
        yield make.linear(f"{prefix}.indexer.wk", indexer.head_dim, hidden)
        yield make.plain(f"{prefix}.indexer.k_norm.weight", 2, indexer.head_dim)
        yield make.plain(f"{prefix}.indexer.weights_proj.weight", indexer.heads, hidden)


def _grouped_attention(model: Model, layer: int, prefix: str, make: _Maker) -> Iterator[Tensor]:
    attention, hidden = model.attention, model.hidden_size
    width = attention.head_dim or 0
    queries, keys = attention.num_heads * width, attention.num_kv_heads * width
    yield make.linear(f"{prefix}.q_proj", queries, hidden)
    yield make.linear(f"{prefix}.k_proj", keys, hidden)
    yield make.linear(f"{prefix}.v_proj", keys, hidden)
    yield make.linear(f"{prefix}.o_proj", hidden, queries)
    if attention.bias:
        # Qwen2 has none on the output; the others that have any have it there too.
        output = 0 if model.model_type.startswith("qwen2") else hidden
        yield make.plain(f"{prefix}.bias", queries + 2 * keys + output)
    if attention.qk_norm:
        yield make.plain(f"{prefix}.q_norm.weight", 2, width)


# From a checkpoint


def checkpoint_tensors(folder: Path, model: Model) -> Iterator[Tensor]:
    """What the safetensors files of a folder hold, by their headers alone; no tensor is read.

    Raises ``ValueError``, in one sentence, for a missing shard or a file that is no safetensors file.
    """
    for path in _shards(folder):
        for name, entry in _header(path).items():
            if name == "__metadata__" or name.endswith((".weight_shape", ".inv_freq")):
                continue
            try:
                shape, bits = entry["shape"], _STORED_BITS[entry["dtype"]]
                if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
                    raise TypeError(f"the shape {shape!r}")
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} describes {name} in a way that is not understood ({error}).") from error
            elements = math.prod(shape)
            if entry["dtype"][0] in "FB" and bits >= 16 and name.endswith((".weight", ".bias")):
                bits = 8 * model.dtype_bytes  # SGLang loads it into a parameter of the model's own type
            yield Tensor(name, elements, -(-elements * bits // 8))


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        # Some repositories hold the same weights a second time, in Mistral's own layout.
        return [path for path in found if not path.name.startswith("consolidated")] or found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read as the index of a checkpoint ({error!r}).") from error
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that its index names, "
            f"{missing[0]} for one; download them, or give the config.json alone."
        )
    return [folder / name for name in names]


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read ({error}).") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is a {type(header).__name__}.")
    return header
