"""The memory model and the exact search: against brute force, files, and transformers' own modules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from sglang_pp_mla.geometry import Model
from sglang_pp_mla.kv_splits import partial_bytes
from sglang_pp_mla.planner import (
    GIB,
    RUNTIME_BYTES,
    Budget,
    Deployment,
    DoesNotFit,
    best_partition,
    budget_of,
    decode_splits,
    decode_workspace,
    default_mem_fraction,
    graph_slots,
    make_plan,
    request_table,
    token_bytes,
    traffic,
)
from sglang_pp_mla.stage import default_partition
from sglang_pp_mla.weights import Weights, absorbed_bytes, checkpoint_tensors, configured_tensors, weights_of

DATA = Path(__file__).parents[1] / "data"
OLD, NEW = Version("0.5.11"), Version("0.5.23")


def config_of(name: str) -> dict[str, Any]:
    path = DATA / name
    return json.loads((path if path.suffix else path / "config.json").read_text())


def model_of(name: str, **changes: Any) -> Model:
    return Model.from_config({**config_of(name), **changes})


@pytest.fixture(scope="module")
def k26(kimi: dict[str, Any]) -> Model:
    return Model.from_config(kimi)


# The search


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, total))) for cut in cuts]


def tokens_by_hand(budget: Budget, counts: tuple[int, ...]) -> int:
    """What each rank of SGLang does, written out: all see the least memory, each divides it, all take the least."""
    ends = list(itertools.accumulate(counts))
    stages = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    loaded = []
    for rank, layers in enumerate(stages):
        weight = budget.weights.everywhere + sum(budget.weights.layers[layer] for layer in layers)
        weight += budget.weights.embedding * (rank == 0) + budget.weights.head * (rank == len(stages) - 1)
        loaded.append(budget.free[rank] - weight)
    pool = min(loaded) - budget.reserve
    each = [pool // sum(budget.token_bytes[layer] for layer in layers) for layers in stages]
    each = [tokens - tokens % budget.page_size for tokens in each]
    return max(0, min(each))


def allowed(budget: Budget, counts: tuple[int, ...]) -> bool:
    return all(budget.may_start[start] for start in (0, *itertools.accumulate(counts[:-1])))


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    layers = draw(st.integers(1, 9))
    stages = draw(st.integers(1, min(4, layers)))
    small = st.integers(1, 40)
    sizes = draw(st.one_of(st.lists(small, min_size=layers, max_size=layers), small.map(lambda size: [size] * layers)))
    cells = draw(st.one_of(st.lists(st.integers(1, 4), min_size=layers, max_size=layers), st.just([1] * layers)))
    free = draw(st.lists(st.integers(20, 400), min_size=stages, max_size=stages))
    starts = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    weights = Weights(tuple(sizes), draw(st.integers(0, 40)), draw(st.integers(0, 40)), draw(st.integers(0, 3)), False)
    everywhere = draw(st.booleans())
    may_start = tuple(index == 0 or everywhere or start for index, start in enumerate(starts))
    return Budget(weights, tuple(cells), tuple(free), draw(st.integers(0, 20)), draw(st.integers(1, 3)), may_start)


@settings(max_examples=500, deadline=None)
@given(budget=budgets())
def test_no_partition_is_better(budget: Budget) -> None:
    layers, stages = len(budget.token_bytes), len(budget.free)
    default = tuple(len(stage.layers) for stage in default_partition(layers, stages))
    possible = [counts for counts in compositions(layers, stages) if allowed(budget, counts)]
    for counts in possible:
        assert budget.tokens(counts) == tokens_by_hand(budget, counts)
    most = max((tokens_by_hand(budget, counts) for counts in possible), default=0)
    found = best_partition(budget, default)
    if most == 0:
        assert found is None
        return
    equals = [counts for counts in possible if tokens_by_hand(budget, counts) == most]

    def distance(counts: tuple[int, ...]) -> int:
        begins, usual = ((0, *itertools.accumulate(one[:-1])) for one in (counts, default))
        return sum(abs(a - b) for a, b in zip(begins, usual, strict=True))

    assert found == min(equals, key=lambda counts: (distance(counts), counts))


def test_layers_that_are_all_different() -> None:
    """Every segment has a cell of its own, so that there are as many limits to try as there can be."""
    layers = 61
    weights = Weights(tuple(1000 + 37 * index % 101 for index in range(layers)), 500, 700, 0, False)
    cells = tuple(100 + 7**index % 53 for index in range(layers))
    budget = Budget(weights, cells, (30_000,) * 8, 1_000, 1, (True,) * layers)
    default = tuple(len(stage.layers) for stage in default_partition(layers, 8))
    found = best_partition(budget, default)
    assert found is not None
    assert budget.tokens(found) >= budget.tokens(default)
    # No boundary moved by up to two layers makes it better.
    for boundary, step in itertools.product(range(7), (-2, -1, 1, 2)):
        moved = list(found)
        moved[boundary] += step
        moved[boundary + 1] -= step
        if min(moved) > 0:
            assert budget.tokens(moved) <= budget.tokens(found)


# SGLang's own numbers


def test_kimi_k26_on_eight_cards_of_96(k26: Model) -> None:
    deployment = Deployment((96 * GIB,) * 8, NEW)
    weights = weights_of(k26, None, pp_size=8)
    plan = make_plan(k26, weights, deployment)
    assert plan.default_partition == (7, 7, 7, 8, 8, 8, 8, 8)
    assert plan.partition == (7, 7, 8, 8, 8, 8, 8, 7)
    # By hand: eight layers of 9.15 GiB, and with the output head on the last of SGLang's own; 0.854 of 94 GiB.
    for counts, tokens in ((plan.partition, plan.kv_tokens), (plan.default_partition, plan.default_kv_tokens)):
        ends = itertools.accumulate(counts)
        heaviest = max(weights.stage(end - count, end) for end, count in zip(ends, counts, strict=True))
        pool = 94 * GIB - heaviest - int(94 * GIB * (1 - plan.mem_fraction_static))
        assert tokens == pool // (8 * 576 * 2)
    assert plan.gain == pytest.approx(0.448, abs=0.001)


@pytest.mark.parametrize(
    ("release", "gigabytes", "tp_size", "slots"),
    [
        # `cuda_graph_max_bs` of server_args.py in 0.5.11 and of memory_hook.py in 0.5.23, line by line
        *((OLD, 16, 1, 8), (OLD, 24, 1, 24), (OLD, 32, 4, 80), (OLD, 48, 1, 32), (OLD, 48, 8, 160)),
        *((OLD, 80, 1, 256), (OLD, 96, 8, 512), (OLD, 141, 2, 256), (OLD, 180, 1, 512)),
        *((NEW, 16, 8, 8), (NEW, 24, 1, 48), (NEW, 32, 4, 160), (NEW, 48, 1, 32), (NEW, 96, 1, 256)),
    ],
)
def test_graph_slots(release: Version, gigabytes: int, tp_size: int, slots: int) -> None:
    assert graph_slots(Deployment((gigabytes * GIB,), release, tp_size)) == slots


def test_the_decode_workspace_is_what_was_measured_of_both_backends(k26: Model) -> None:
    """8 GiB of partial results for 256 slots with stock, 1.5 with ours, besides the token indices."""
    ours = Deployment((96 * GIB,) * 8, NEW)
    assert decode_splits(k26, ours, 256, 262_144) == (47, 256)
    stock = dataclasses.replace(ours, attention_backend="triton")
    assert decode_splits(k26, stock, 256, 262_144) == (256, 256)
    assert decode_splits(k26, dataclasses.replace(ours, release=OLD), 256, 262_144) == (8, 8)
    # A short context needs no more splits than it has blocks of 32 tokens.
    assert decode_splits(k26, stock, 256, 1024) == (32, 32)
    size = decode_workspace(k26, stock, 256, 256, 262_144)
    assert 256 * partial_bytes(256, 64, 512) == 8 * GIB
    assert size == 8 * GIB + 256 * 256 * 64 * 4 + 256 * 262_144 * 8
    assert decode_workspace(k26, dataclasses.replace(stock, release=OLD), 256, 256, 262_144) == size + 256 * 262_144


@pytest.mark.parametrize(
    ("tokens", "context", "running", "requests"),
    [
        (800_000, 262_144, None, 2048),  # never fewer than 2048, for so small a share of the context
        (800_000, 100_000, None, 4096),
        (800_000, 150_000, None, 2730),
        (2_000, 100_000, None, 1000),  # but two tokens at least for each
        (800_000, 262_144, 16, 16),
    ],
)
def test_the_table_of_requests(tokens: int, context: int, running: int | None, requests: int) -> None:
    assert request_table(tokens, context, running) == (requests + 1) * (context + 4) * 4


@pytest.mark.parametrize(
    ("name", "dtype", "tp_size", "expected"),
    [
        ("deepseek-v3.json", "auto", 1, 576 * 2),
        ("deepseek-v3.json", "auto", 8, 576 * 2),  # whole on every rank
        ("deepseek-v3.json", "fp8_e4m3", 1, 576),
        ("minicpm3-4b.json", "bf16", 1, 288 * 2),
        ("qwen3-30b-a3b.json", "auto", 1, 4 * 2 * 128 * 2),
        ("qwen3-30b-a3b.json", "auto", 4, 1 * 2 * 128 * 2),
        ("qwen3-30b-a3b.json", "fp8_e5m2", 8, 1 * 2 * 128),  # fewer heads than ranks: one each
    ],
)
def test_bytes_a_token(name: str, dtype: str, tp_size: int, expected: int) -> None:
    assert token_bytes(model_of(name), 5, dtype, tp_size, NEW) == expected


def test_an_index_is_kept_where_it_is_made() -> None:
    """656 bytes of an fp8 latent, as DeepSeek publishes it, and 132 of the indexer's key."""
    config = {**config_of("deepseek-v3.json"), "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}
    config |= {"index_n_heads": 64, "index_head_dim": 128, "index_topk_freq": 4}
    model = Model.from_config(config)
    assert token_bytes(model, 1, "fp8_e4m3", 1, NEW) == 656 + 132
    assert token_bytes(model, 2, "fp8_e4m3", 1, NEW) == 656
    assert token_bytes(model, 2, "fp8_e4m3", 1, OLD) == 656 + 132
    assert token_bytes(model, 2, "auto", 1, NEW) == 1152


def test_layers_that_share_an_index_stay_together_where_it_does_not_travel() -> None:
    config = {**config_of("models/sparse"), "num_hidden_layers": 12, "index_topk_pattern": "FSSSFSSSFSSS"}
    model = Model.from_config(config)
    assert model.joined_layers == ((0, 4), (4, 8), (8, 12))
    weights = weights_of(model, None, pp_size=3)
    old = Deployment((4 * GIB,) * 3, Version("0.5.13"), context=1024)
    assert make_plan(model, weights, old).partition == (4, 4, 4)
    two = dataclasses.replace(old, gpu_bytes=(4 * GIB,) * 2)
    plan = make_plan(model, weights, two)
    assert plan.default_partition == (6, 6)
    assert plan.default_kv_tokens == 0, "SGLang's own split would tear a group apart"
    assert plan.partition in ((4, 8), (8, 4))
    assert make_plan(model, weights, dataclasses.replace(two, release=Version("0.5.14"))).partition == (6, 6)
    four = dataclasses.replace(old, gpu_bytes=(4 * GIB,) * 4)
    with pytest.raises(ValueError, match=r"No 4 stages keep together .*\(0-3, 4-7, 8-11\)"):
        make_plan(model, weights, four)


# Weights


def test_published_sizes(k26: Model) -> None:
    """DeepSeek V3 has 671 B parameters; Kimi K2 1.03 T, and K2.6 weighs 594 GB on disk."""
    deepseek = model_of("deepseek-v3.json")
    assert sum(tensor.elements for tensor in configured_tensors(deepseek)) == pytest.approx(671e9, rel=0.01)
    assert sum(tensor.elements for tensor in configured_tensors(k26)) == pytest.approx(1.03e12, rel=0.01)
    assert sum(tensor.size for tensor in configured_tensors(k26)) == pytest.approx(594e9, rel=0.01)


def parameters_a_layer(config: dict[str, Any]) -> tuple[list[int], int]:
    """Of transformers' own class for the architecture, on the meta device: each layer's, and all others'."""
    import torch
    import transformers

    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no class for it")
    settings = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    transformers_config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(transformers_config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in module.model.layers]
    return layers, sum(p.numel() for p in module.parameters()) - sum(layers)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("models/mla", {}),
        ("models/mla", {"q_lora_rank": None}),
        ("models/mla", {"n_shared_experts": 2, "first_k_dense_replace": 3}),
        ("models/mla", {"tie_word_embeddings": True}),
        ("mla-256x64.json", {}),
        ("models/mha", {}),
        ("qwen3-30b-a3b.json", {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 8, "vocab_size": 512}),
        ("minicpm3-4b.json", {"num_hidden_layers": 2, "vocab_size": 512}),
    ],
)
def test_parameters_are_those_of_transformers(name: str, changes: dict[str, Any]) -> None:
    config = {**config_of(name), **changes}
    model = Model.from_config(config)
    layers, others = parameters_a_layer(config)
    counted = [0] * model.num_layers
    for tensor in configured_tensors(model):
        if ".layers." in tensor.name:
            counted[int(tensor.name.split(".")[2])] += tensor.elements
    assert counted == layers
    assert sum(tensor.elements for tensor in configured_tensors(model)) - sum(counted) == others


def test_tied_embeddings_are_twice_in_a_pipeline() -> None:
    """SGLang's last stage builds a head of its own where the pipeline has more than one."""
    tied, untied = model_of("models/mla", tie_word_embeddings=True), model_of("models/mla")
    embedding = 512 * 64 * 2
    assert weights_of(tied, None, pp_size=1).head == 64 * 2, "the final norm alone"
    for model in (tied, untied):
        weights = weights_of(model, None, pp_size=2)
        assert (weights.embedding, weights.head) == (embedding, embedding + 64 * 2)


def write_checkpoint(folder: Path, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The weights of transformers' own class, saved by it in shards, and extra tensors in a shard of their own."""
    import torch
    import transformers
    from safetensors.torch import save_file

    settings = {key: value for key, value in config.items() if key != "architectures"}
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    module.to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB")
    (folder / "config.json").write_text(json.dumps(config))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    if more:
        save_file(more, folder / "extra.safetensors")
        content["weight_map"] |= dict.fromkeys(more, "extra.safetensors")
        index.write_text(json.dumps(content))
    return content


def test_a_checkpoint_is_read_by_its_headers(tmp_path: Path) -> None:
    import torch

    config = config_of("models/mha")
    content = write_checkpoint(
        tmp_path,
        config,
        **{
            "model.layers.4.mlp.up_proj.weight": torch.zeros(1000, dtype=torch.bfloat16),  # a draft's
            "vision_tower.encoder.layers.0.weight": torch.zeros(300, dtype=torch.bfloat16),
            "model.layers.2.mlp.up_proj.weight_scale_inv": torch.zeros(7, dtype=torch.float32),
            "model.layers.2.mlp.up_proj.weight_shape": torch.zeros(2, dtype=torch.int64),
        },
    )
    assert len(set(content["weight_map"].values())) > 2, "several shards"
    model = Model.from_config(config)
    counted = weights_of(model, None)
    read = weights_of(model, tmp_path)
    assert read.measured
    expected = list(counted.layers)
    expected[2] += 7 * 4
    assert read == Weights(tuple(expected), counted.embedding, counted.head, 300 * 2, True)
    # Four ranks: all linear weights in four, but two key heads; norms whole.
    divided = weights_of(model, tmp_path, tp_size=4)
    keys, norms = 2 * 64 * 128 * 2, 2 * 64 * 2
    rest = counted.layers[0] - keys - norms
    assert divided.layers[0] == rest // 4 + keys // 2 + norms
    assert divided.everywhere == 600


def test_full_precision_weights_are_served_in_half(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = config_of("models/mha")
    name = "model.layers.0.mlp.up_proj"
    save_file(
        {f"{name}.weight": torch.zeros(10, 3), f"{name}.weight_scale": torch.zeros(5)}, tmp_path / "a.safetensors"
    )
    sizes = {tensor.name: tensor.size for tensor in checkpoint_tensors(tmp_path, Model.from_config(config))}
    assert sizes == {f"{name}.weight": 60, f"{name}.weight_scale": 20}


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no safetensors file"),
        (b"\xff" * 64, "no safetensors file"),
        (header("[]"), "is a list"),
        (header("[" * 100_000), "no safetensors file"),
        (header('{"w": {"dtype": "F16", "shape": ["x"]}}'), r"describes w .*the shape \['x'\]"),
        (header('{"w": {"dtype": "F16", "shape": [-5]}}'), r"describes w .*the shape \[-5\]"),
        (header('{"w": {"dtype": "F16", "shape": [1e400]}}'), r"describes w .*the shape \[inf\]"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        weights_of(model_of("models/mha"), tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", '{"weight_map": {"w": 5}}'])
def test_what_is_no_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header("{}"))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="cannot be read as the index of a checkpoint"):
        weights_of(model_of("models/mha"), tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config_of("models/mha"))
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of the .* files that its index names, {gone.name}"):
        weights_of(model_of("models/mha"), tmp_path)


def test_quantised_sizes(k26: Model) -> None:
    """Kimi K2.6: experts in four bits with a bf16 scale for 32, all else in bf16."""
    sizes = {tensor.name: tensor.size for tensor in configured_tensors(k26)}
    one = 7168 * 2048
    assert sizes["model.layers.1.mlp.experts.0.up_proj.weight"] == 384 * (one // 2 + one // 32 * 2)
    assert sizes["model.layers.1.mlp.shared_experts.up_proj.weight"] == one * 2
    assert sizes["model.layers.1.self_attn.o_proj.weight"] == 64 * 128 * 7168 * 2
    assert sizes["model.layers.0.mlp.up_proj.weight"] == 18432 * 7168 * 2
    deepseek = {tensor.name: tensor.size for tensor in configured_tensors(model_of("deepseek-v3.json"))}
    assert deepseek["model.layers.3.mlp.experts.0.up_proj.weight"] == 256 * (one + one // 128**2 * 4)
    # 576 rows are four and a half blocks of 128, so five scales.
    assert deepseek["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"] == 576 * 7168 + 5 * 56 * 4
    assert deepseek["model.layers.3.mlp.gate.weight"] == 256 * 7168 * 2


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_what_tensor_parallelism_divides(k26: Model, tp_size: int) -> None:
    whole, part = weights_of(k26, None), weights_of(k26, None, tp_size=tp_size)
    # The latent projections, the router and the norms are on every rank.
    kept = (1536 + 576) * 7168 * 2 + (1536 + 512) * 2 + 2 * 7168 * 2 + 384 * 7168 * 2
    assert part.layers[5] == pytest.approx((whole.layers[5] - kept) / tp_size + kept, abs=16)
    assert part.embedding == math.ceil(whole.embedding / tp_size)


def test_the_absorbed_halves_are_counted(k26: Model) -> None:
    halves = 64 * (128 + 128) * 512 * 2
    assert absorbed_bytes(k26) == halves
    stored = sum(tensor.size for tensor in configured_tensors(k26) if ".layers.5." in tensor.name)
    assert weights_of(k26, None).layers[5] == stored + halves
    assert weights_of(k26, None, tp_size=8).layers[5] < (stored + halves) / 4
    assert absorbed_bytes(model_of("models/mha")) == 0


# What is refused


def test_what_does_not_fit_is_told_with_rank_and_bytes(k26: Model) -> None:
    deployment = Deployment((80 * GIB,) * 8, NEW)
    weights = weights_of(k26, None, pp_size=8)
    with pytest.raises(DoesNotFit) as refusal:
        make_plan(k26, weights, deployment)
    said = str(refusal.value)
    assert f"Rank {refusal.value.rank} of 8 lacks {refusal.value.missing / GIB:.1f} GiB" in said
    assert "use --pp-size 9" in said
    assert "\n" not in said
    # With just so much more on each GPU, and the same in reserve, there is room for one token; with less, none.
    budget = budget_of(k26, weights, deployment)
    default = (7, 7, 7, 8, 8, 8, 8, 8)
    for more, fits in ((refusal.value.missing, True), (refusal.value.missing - 1, False)):
        larger = dataclasses.replace(budget, free=tuple(free + more for free in budget.free))
        assert (best_partition(larger, default) is not None) is fits
    make_plan(k26, weights_of(k26, None, pp_size=9), Deployment((80 * GIB,) * 9, NEW))


def test_buffers_larger_than_the_reserve_are_told(k26: Model) -> None:
    deployment = Deployment((96 * GIB,) * 8, NEW, mem_fraction_static=0.97)
    with pytest.raises(DoesNotFit, match=r"keeps 2.8 GiB in reserve, but graphs for 256 requests of 262144 tokens"):
        make_plan(k26, weights_of(k26, None, pp_size=8), deployment)


@pytest.mark.parametrize(
    ("name", "deployment", "sentence"),
    [
        ("models/linear", Deployment((GIB,), NEW), "has linear attention layers"),
        ("models/sliding", Deployment((GIB,), NEW), "has sliding attention layers"),
        ("models/mla", Deployment((GIB,) * 5, NEW), "4 layers cannot fill 5 pipeline stages"),
        ("models/mla", Deployment((GIB,), NEW, tp_size=3), "4 heads cannot be divided over 3 GPUs"),
        ("models/mla", Deployment((96 * GIB, 80 * GIB), NEW, tp_size=2), "refuses --tp-size 2"),
        ("models/mla", Deployment((GIB,), NEW, kv_cache_dtype="fp3"), "fp3 is not one of"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_sentence(name: str, deployment: Deployment, sentence: str) -> None:
    model = model_of(name)
    with pytest.raises(ValueError, match=sentence) as refusal:
        make_plan(model, Weights((1,) * model.num_layers, 0, 0, 0, False), deployment)
    assert "\n" not in str(refusal.value)


def test_gpus_of_different_size_get_what_they_can_hold(k26: Model) -> None:
    sizes = (96, 96, 96, 96, 96, 96, 80, 141)
    deployment = Deployment(tuple(size * GIB for size in sizes), NEW)
    weights = weights_of(k26, None, pp_size=8)
    plan = make_plan(k26, weights, deployment)
    assert plan.default_kv_tokens == 0, "eight layers are too much for the seventh"
    assert plan.partition[6] < 7
    assert plan.kv_tokens > 0
    # The smallest sets what all keep in reserve, as SGLang takes the least memory of all ranks.
    fraction = default_mem_fraction(k26, deployment)
    assert {stage.reserve_bytes for stage in plan.stages} == {int((80 * GIB - RUNTIME_BYTES) * (1 - fraction))}
    for stage in plan.stages:
        used = stage.weight_bytes + stage.kv_bytes + stage.reserve_bytes + stage.spare_bytes + RUNTIME_BYTES
        assert used == stage.gpu_bytes
        assert stage.spare_bytes >= 0


# What crosses the link


def test_traffic(k26: Model) -> None:
    row = 7168 * 2
    eight = traffic(k26, 8, (61,))
    assert (eight.all_reduces, eight.hops) == (123, 0)
    assert eight.bytes_sent == 123 * (2 * row * 7 // 8)
    pipeline = traffic(k26, 1, (7, 7, 8, 8, 8, 8, 8, 7))
    assert (pipeline.all_reduces, pipeline.hops, pipeline.bytes_sent) == (0, 7, 2 * row)
    mixed = traffic(k26, 2, (16, 15, 15, 15))
    assert (mixed.all_reduces, mixed.hops) == (123, 3)
    assert mixed.bytes_sent == 33 * row + row
