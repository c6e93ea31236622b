"""What tools/audit looks for and how it judges it. Data, and the one function that applies it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

# Methods that take a layer's number, or the layer itself.
CALLS = re.compile(
    r"_?(?:get|set)_(?:[a-z0-9]+_)*?(?:key|value|kv|k|v|label|compress|swa|raw|state|scale|index|tail)_buffers?"
    r"(?:_radix\w*|_fused\w*|_prefix_valid)?"
    r"|get_index_k\w*|set_index_\w+|_?get_unified_kv\w*|get_kv|set_kv|get_index_scale|get_state_cache"
    r"|get_k_and_scale|get_k_continuous|get_k_scale_continuous|get_local_buffer|get_broadcastable_buffer"
    r"|wait_until|wait_layer_transfer|_wait_for_layer|\w*per_layer(?:_physical)?"
    r"|mamba2_layer_cache|get_mamba_params|at_layer_idx|layer_cache|short_conv_layer_cache"
    r"|_store_kv_layer|get_layer_cache"
)
# Lists and tensors with one entry a layer of the stage, and the maps from the model's numbers to theirs.
LISTS = re.compile(
    r"(?:[a-z0-9]+_)*?(?:k|v|kv|label|index|index_k\w*|scale|compress_state|state)_(?:buffers?|pools?)"
    r"|layers?_mapping|full_attention_layer_id_mapping|mamba_map|load_events"
    r"|(?:src|dst|prefill|decode)_(?:k|v|kv)_ptrs|(?:kv|k|v)_data_ptrs"
    r"|req_device_buffer_tokens|req_device_buffer_token_locs|lru_slots|conv|temporal|kv_caches|kvcaches"
)

# Faults that no single call or index shows: text to look for in one file.
SOURCES = (
    (
        "srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py",
        re.compile(r"full_layer_mapping = dict\(\s*(?:kvcache|hybrid_kv)\.full_attention_layer_id_mapping\s*\)"),
    ),
    (
        "srt/mem_cache/hi_mamba_radix_cache.py",
        re.compile(r"full_layer_mapping = dict\(\s*self\.hybrid_kv_cache\.full_attention_layer_id_mapping\s*\)"),
    ),
    (
        "srt/disaggregation/prefill.py",
        re.compile(
            r"(?:prefill_start_layer =|else) (?:self\.token_to_kv_pool\.start_layer$|_transfer_start_layer\()", re.M
        ),
    ),
)


class Verdict(NamedTuple):
    verdict: str
    reason: str
    upstream: str = ""
    reachable_with_mla_triton_pp: bool = False
    fix: str = ""


class Rule(NamedTuple):
    """All patterns must match in full, but ``path`` and ``owner`` anywhere. The first rule that does decides."""

    verdict: Verdict
    kind: str = ".*"
    name: str = ".*"
    number: str = ".*"
    origin: str = ".*"
    path: str = ""
    owner: str = ""
    base: str = ".*"


def judge(path: str, place: Any) -> Verdict:
    for rule in RULES:
        if (
            re.search(rule.path, path)
            and re.search(rule.owner, place.owner)
            and all(
                re.fullmatch(getattr(rule, part), getattr(place, part))
                for part in ("kind", "name", "number", "origin", "base")
            )
        ):
            return rule.verdict
    return UNCLEAR


UNCLEAR = Verdict("unclear", "no rule matches and nobody has read it")


def _safe(reason: str) -> Verdict:
    return Verdict("safe", reason)


SUBTRACTS = _safe("the stage's first layer is taken off the model's number")
MODEL_TO_GETTER = _safe("the number of the layer at hand, which the stage holds, to a method that takes the model's")
OWN_FIRST = _safe("asks for the first layer that the pool holds")
OWN_RANGE = _safe("goes over the layers that the pool holds, in the model's numbers")
LOCAL_LOOP = _safe("goes over the list itself, from its own first entry")
FIRST_ENTRY = _safe("the list's own first or last entry, whatever layer it is")
MAP = _safe("a map from the model's numbers to the list's")
HOST = _safe("a host copy and its pool have the same entries, and the controller counts them from 0")
INNER = _safe("the number comes from the outer pool's map, and the inner pool starts at 0")

_AT_HOST = r"(?:host_|device_)?layer(?:_id|_idx|_index)?|self\._buffer_index_by_layer\[layer_id\]"
_MODEL = r"(?:\w+\.)*_?layer_(?:id|idx)|(?:\w+\.)?layer|m|(?:\w+\.)?(?:attn|attn_mqa|attn_mha|radix_attn)"
_LOCAL = (
    r"\w+ in (?:range|enumerate)\((?:\w+, )?(?:len\(.+\)|(?:\w+\.)*(?:layer_nums?|num_layers|num_mamba_layers|"
    r"layers_current_pp_stage|num_local_layers))\)"
)

# As they were read. The first that matches decides, so what is special comes first.
RULES: tuple[Rule, ...] = (
    # --- not one of our structures --------------------------------------------------------------------------
    Rule(_safe("a test or a benchmark, on pools of its own with one stage"), path=r"/tests?/|/benchmark|test_\w+\.py$"),
    Rule(_safe("a model's own convolution, not a state pool"), kind="list", name="conv", path=r"^srt/models/"),
    Rule(
        _safe("a method of the model that takes no layer number; what it calls is listed by itself"),
        kind="call",
        name="_[gs]et_mla_kv_buffer",
        path=r"^srt/models/|^srt/hardware_backend/npu/modules/",
    ),
    Rule(
        _safe("a helper of the backend that is given the batch; what it calls is listed by itself"),
        kind="call",
        number="forward_batch",
        path=r"^srt/layers/attention/",
    ),
    Rule(_safe("a page size, asked with a compression ratio and no layer"), name="get_index_k_page_size"),
    Rule(_safe("a kernel's wrapper, on the buffer of one layer"), path=r"^(?:kernels|jit_kernel)/"),
    # --- faults: layer 0 of a later stage --------------------------------------------------------------------
    Rule(
        Verdict(
            "faulty",
            "asks a later stage's pool for layer 0 while the backend is built: IndexError, or another layer's buffer",
            "sgl-project/sglang#30340",
            True,
            "buffer-probe",
        ),
        kind="call",
        number="0",
        path=r"^srt/layers/attention/triton_backend\.py$",
        owner=r"__init__$",
    ),
    Rule(
        _safe("the inner pool is built without a first layer and counts its full-attention layers from 0"),
        kind="call",
        number="0",
        path=r"^srt/mem_cache/memory_pool\.py$",
        owner=r"^HybridLinearKVPool\.get_v_head_dim$",
    ),
    Rule(
        Verdict(
            "faulty",
            "asks a later stage's pool for layer 0 while the backend is built; MiniMax M3, which has no MLA",
            "sgl-project/sglang#30340",
            False,
            "buffer-probe",
        ),
        kind="call",
        number="0",
        path=r"^srt/mem_cache/memory_pool\.py$",
        owner=r"^MiniMaxSparseKVPool\.get_v_head_dim$",
    ),
    Rule(
        Verdict(
            "faulty",
            "asks a later stage's pool for layer 0 while the backend is built; no part of Triton, and answered too",
            "sgl-project/sglang#7044",
            False,
            "buffer-probe",
        ),
        kind="call",
        number="0",
        path=r"^srt/layers/attention/(?:aiter|wave|intel_amx)_backend\.py$",
        owner=r"__init__$",
    ),
    Rule(
        Verdict("faulty", "asks for the model's layer 0, which a later stage's pool does not hold"),
        kind="call",
        name=r"_?get_(?:key|value|kv)_buffer",
        number="0|layer_id=0",
    ),
    Rule(
        Verdict(
            "faulty",
            "asks a later stage's pool for layer 0 while the backend is built, unless the model is hybrid; no part of "
            "Triton, and answered too",
            "sgl-project/sglang#7044",
            False,
            "buffer-probe",
        ),
        kind="call",
        origin=r"layer_id = 0 \| .*",
        path=r"^srt/layers/attention/intel_amx_backend\.py$",
        owner=r"__init__$",
    ),
    # --- faults: HiSparse --------------------------------------------------------------------------------------
    Rule(
        Verdict(
            "faulty",
            "HiSparse's tables and pools hold this stage's layers and are indexed by the model's number in a forward "
            "pass; HiSparse needs the sparse attention backend, never Triton",
            "sgl-project/sglang#36331",
        ),
        kind="list",
        number="layer_id",
        origin="layer_id parameter",
        path=r"hisparse_coordinator\.py$",
    ),
    Rule(
        Verdict(
            "faulty",
            "hands the model's number to HiSparse's tables, which hold this stage's layers; HiSparse needs the sparse "
            "attention backend, never Triton",
            "sgl-project/sglang#36331",
        ),
        kind="call",
        name="load_to_device_per_layer",
        number=r"(?:\w+\.)?layer_id",
        origin=r"layer_id parameter|layer parameter",
        path=r"hisparse_coordinator\.py$|(?:nsa|dsa)_backend\.py$|minimax_sparse",
    ),
    # --- faults: hybrid models ----------------------------------------------------------------------------------
    Rule(
        Verdict(
            "faulty",
            "HiCache's maps keep the model's numbers while layers are loaded back by the stage's: a later stage of a "
            "model that mixes MLA and linear attention gets back none or some of its layers, and answers wrongly",
            "sgl-project/sglang#38866",
            True,
            "hicache-hybrid-layers",
        ),
        kind="source",
        path=r"hybrid_pool_assembler\.py$",
    ),
    Rule(
        Verdict(
            "faulty",
            "HiCache's maps keep the model's numbers while layers are loaded back by the stage's; not repaired here, "
            "where the maps are made inside a long constructor: for a hybrid model leave --enable-hierarchical-cache "
            "off, or take 0.5.11",
            "sgl-project/sglang#38866",
            True,
        ),
        kind="source",
        path=r"hi_mamba_radix_cache\.py$",
    ),
    Rule(
        Verdict(
            "faulty",
            "a hybrid model's prefill stage gives its first layer in the model's numbers, but the peer's list has the "
            "full-attention layers only, so a decode server with one stage gets them in the wrong place; not repaired: "
            "there is no machine here to transfer a cache on. Other models are right. Take 0.5.19 or newer",
            "sgl-project/sglang#33457",
            True,
        ),
        kind="source",
        path=r"disaggregation/prefill\.py$",
        number=r"(?!.*_transfer_start_layer).*",
    ),
    Rule(
        _safe("a hybrid model's first layer is counted in full-attention layers, as in the peer's list"),
        kind="source",
        path=r"disaggregation/prefill\.py$",
    ),
    # --- faults elsewhere ----------------------------------------------------------------------------------------
    Rule(
        Verdict("faulty", "goes over the layers of the whole model; MindSpore's models take no part in a pipeline"),
        kind="call",
        origin=r".*num_hidden_layers.*",
        path=r"mindspore\.py$",
    ),
    Rule(
        Verdict("faulty", "goes over the layers of the whole model, of which the pool holds this stage's"),
        kind="call",
        name=r"_?[gs]et_\w+",
        origin=r".*range\([^,]*(?:num_hidden_layers|num_layers_total)\).*",
    ),
    Rule(
        Verdict(
            "faulty",
            "the prefill stage's first layer goes to the peer's layer 0; a prefill server with stages cannot use this "
            "transfer backend: take Mooncake, or a newer release",
            "",
            True,
        ),
        kind="list",
        name=r"dst_kv_ptrs",
        number=r"layer_id|0:len\(src_k_ptrs\)|num_kv_layers:num_kv_layers \+ len\(src_v_ptrs\)",
        origin=r"(?!.*layers_current_pp_stage).*",
        path=r"disaggregation/nixl/conn\.py$",
    ),
    Rule(
        Verdict(
            "faulty",
            "pairs a prefill stage's first layer with the peer's layer 0, in releases that have no branch for stages "
            "before it; on NPUs only",
        ),
        kind="list",
        name=r"dst_kv_ptrs",
        number=r"layer_id",
        path=r"disaggregation/ascend/conn\.py$",
        origin=r"layer_id in range\(num_layers\)",
    ),
    Rule(
        Verdict("faulty", "the stage's first layer is not taken off the model's number; on NPUs only"),
        kind="list",
        name="[kv]_buffer",
        number="layer_id",
        origin=r"layer_id = layer\.layer_id \| = layer_id_override",
        owner=r"AscendTokenToKVPool\.set_kv_buffer",
    ),
    Rule(
        Verdict(
            "faulty",
            "the stage's first layer is not taken off the model's number; DeepSeek V4, which has a backend of its own",
        ),
        kind="list",
        name="kv_buffer",
        number=r"self\.layer_id",
        path=r"^srt/models/deepseek_v4\.py$",
    ),
    # --- brought to the stage's numbers ---------------------------------------------------------------------------
    Rule(SUBTRACTS, number=r".*layer\w* - (?:\w+\.)*(?:start_layer|_stage_start)"),
    Rule(SUBTRACTS, origin=r".*= \(?[^|;]*layer[^|;]* - (?:\w+\.)*start_layer.*"),
    Rule(SUBTRACTS, origin=r".*= self\._(?:local_layer_idx|layer_index|swa_local_layer_id)\(\w+\).*"),
    Rule(SUBTRACTS, number=r"self\._(?:local_layer_idx|layer_index|swa_local_layer_id)\(\w+\)"),
    Rule(OWN_FIRST, kind="call", number=r"(?:\w+\.)*start_layer"),
    Rule(OWN_RANGE, kind="call", origin=r".*range\((?:\w+\.)*start_layer, .*"),
    Rule(OWN_FIRST, kind="call", origin=r".*\[\*\S+full_attention_layer_id_mapping\]\[0\].*"),
    # --- maps --------------------------------------------------------------------------------------------------------
    Rule(MAP, kind="list", name=r"layers?_mapping|full_attention_layer_id_mapping|mamba_map"),
    Rule(MAP, number=r"(?:\w+\.)*(?:mamba_map|layers_mapping|full_attention_layer_id_mapping)\[\w+\]"),
    Rule(MAP, origin=r".*= (?:self\._transfer_full_attention_id\(\w+\)|(?:anchor|entry)\.layer_mapper\(\w+\)).*"),
    Rule(MAP, number=r"self\._get_indexer_slot\(layer_id\)|self\.mamba2_layer_index\(layer_id\)"),
    Rule(MAP, number=r"self\.index_kv?_layer_id_mapping\[.+\]"),
    Rule(MAP, origin=r".*= self\.(?:index_kv?_layer_id_mapping|indexer_layer_id_to_slot)\.get\(.+\).*"),
    Rule(MAP, origin=r".*= (?:self\._side\(\w+\)|transfer\.layer_mapper\(\w+\).*)"),
    Rule(MAP, number=r"(?:item\.)?compress_layer_id", origin=r".*= \S*layer_mapping\[.+"),
    Rule(INNER, origin=r".*= self\.layers_mapping\[\w+\].*"),
    Rule(
        _safe("the number for the inner pool is given beside it, as layer_id_override"),
        kind="call",
        name="set_(?:mla_)?kv_buffer",
        number="None",
    ),
    # --- the list's own numbers ------------------------------------------------------------------------------------
    Rule(FIRST_ENTRY, kind="list", number=r"-?[0-9]+"),
    Rule(FIRST_ENTRY, kind="call", name="wait_until", number=r"counter\.num_layers - 1"),
    Rule(LOCAL_LOOP, kind="list", origin=_LOCAL),
    Rule(LOCAL_LOOP, kind="call", name=r"\w*per_layer(?:_physical)?", origin=_LOCAL),
    Rule(
        _safe("MLX pools serve one device, which holds every layer"),
        path=r"^srt/hardware_backend/mlx/",
    ),
    Rule(
        _safe("the transfer's own entries, counted from its first"),
        kind="list",
        origin=r".*(?:layers_current_pp_stage|_kv_ptrs_with_pp\().*",
        path="^srt/disaggregation/",
    ),
    Rule(
        _safe("the stage's part of a peer's list, cut by the stage's first layer; hybrid models: see prefill.py"),
        kind="list",
        name=r"(?:src|dst)_kv_ptrs|kv_data_ptrs",
        number=r"[^:]*:[^:]*",
        path=r"^srt/disaggregation/",
    ),
    Rule(
        _safe("both ends are paired by their layers' ids"),
        kind="list",
        origin=r".*in build_transfer_entry_pairs\(.*",
        path=r"^srt/disaggregation/",
    ),
    # --- called with the list's own numbers ---------------------------------------------------------------------
    Rule(
        _safe("a list with an entry for every layer of the model; those of other stages are empty"),
        kind="list",
        name=r"(?:indexer_)?compress_state_pools|state_pools",
    ),
    Rule(
        _safe("called with the number that DeepSeek V4's outer pool has brought over"),
        path=r"deepseek_v4_memory_pool\.py$|dsv4_memory_pool\.py$|dsv41_request_window\.py$",
        kind="list",
        number=r"(?:local_)?layer(?:_id)?",
    ),
    Rule(
        _safe("called with the stage's first layer taken off"),
        kind="list",
        number=r"layer_idx|local_layer(?:_id)?",
        origin=r"\w+ parameter",
        owner=r"_store_kv_layer$|_gather_pairs$|_get_cpu_offload_layer_buffers$",
    ),
    Rule(
        _safe("called with the number that the map of sparse layers gives"),
        kind="list",
        number="layer_id",
        owner=r"MHATokenToKOnlyPool\.set_k_buffer$",
    ),
    Rule(
        _safe("HiSparse's prefetch, which is off under a pipeline"),
        number="skip_layer",
        path=r"hisparse_coordinator\.py$",
    ),
    Rule(
        _safe("layers split over ranks; refused together with a pipeline"),
        path=r"dsa_cache_layer_split\.py$",
        number="layer_transfer_idx|i",
    ),
    Rule(LOCAL_LOOP, number="start:end", origin=r".*_owned_local_layer_range\(\).*"),
    Rule(_safe("an index pool that counts its own layers from 0"), owner=r"NPUMiniMaxSparseKVPool\.get_index_k_state_"),
    Rule(MODEL_TO_GETTER, kind="call", name=r"short_conv_layer_cache|layer_cache", number=r"(?:self\.)?layer_id"),
    # --- a host copy: the controller counts its entries, and the pool's, from 0 -------------------------------
    Rule(HOST, kind="list", number=_AT_HOST, path=r"memory_pool_host\.py$|/pool_host/"),
    Rule(HOST, kind="list", name="load_events", path=r"cache_controller\.py$|l2_transfer\.py$"),
    Rule(HOST, kind="call", name=r"\w*per_layer(?:_physical)?", number="layer_id|layer_idx|layer_index|layer"),
    Rule(HOST, kind="call", name=r"_backup_from_device_per_layer", path=r"memory_pool_host\.py$|/pool_host/"),
    Rule(
        _safe("called with the entry that the map of the request pool gives"),
        name="conv|temporal|at_layer_idx",
        number="layer|layer_id",
        path=r"^srt/mem_cache/memory_pool\.py$",
        owner="MambaPool",
    ),
    # --- the layer at hand ---------------------------------------------------------------------------------------
    Rule(
        MODEL_TO_GETTER,
        kind="call",
        name=r"_?[gs]et_\w+|mamba2_layer_cache|_wait_for_layer|_store_kv_layer|wait_layer_transfer",
        number=_MODEL,
        origin=r"(?!.*\b(?:range|enumerate)\().*",
    ),
)
