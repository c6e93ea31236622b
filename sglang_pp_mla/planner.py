"""Which layers for which stage: SGLang's memory arithmetic, and the partition that leaves the most KV tokens. Pure.

SGLang sizes the KV pool of every stage from the same two numbers: the least memory free on any rank once
weights are loaded, and the least that was free before, whose share ``1 - mem_fraction_static`` stays in reserve.
Each stage divides what is between by the bytes a token takes in its own layers, and all take the smallest
result. So the heaviest stage and the one with most cache decide, and they need not be the same one. Read in
``_profile_available_bytes``, ``calculate_pool_sizes`` and ``_apply_token_constraints`` of 0.5.11 and 0.5.23
(``profile_max_num_token`` before 0.5.10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from packaging.version import Version

from sglang_pp_mla.geometry import Model
from sglang_pp_mla.kv_splits import fit_kv_splits, partial_bytes
from sglang_pp_mla.stage import default_partition
from sglang_pp_mla.weights import Weights

GIB = 2**30
MIB = 2**20

RUNTIME_BYTES = 2 * GIB
"""What a GPU has lost when loading begins: the driver's share of the label, the CUDA context, NCCL."""
MULTIPROCESSORS = 188
"""Of the largest GPU we know of; the decode workspace grows with them, so this errs on the safe side."""
KV_DTYPE_BYTES = {"bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
TRITON = ("triton", "triton_pp")
"""The backends whose buffers are known here."""
KV_SPLITS = 8
"""SGLang's default of ``--triton-attention-num-kv-splits``."""

# Releases that changed what is counted here; read in the wheels.
_EVEN_SPLIT = Version("0.5.6")
_PREFILL_GRAPHS = Version("0.5.10")
_LIFTED_SPLITS = Version("0.5.12")
_HANDS_ON_INDICES = Version("0.5.14")
_NO_MASK = Version("0.5.17")
_SHARED_INDEX_KEYS = _VISION_CACHE_KEPT = _MULTIMODAL_PREFILL_GRAPHS = Version("0.5.18")
_LARGER_SMALL_GPUS = Version("0.5.20")
_SLOTS_BY_REQUESTS = Version("0.5.22")

_VISION_CACHE = 100 * MIB  # SGLANG_VLM_CACHE_SIZE_MB, of a multimodal model
_SCALE_BLOCK = 128  # elements of an fp8 latent or indexer key that share a scale of four bytes


class DoesNotFit(Exception):
    """No partition leaves room for a token. ``rank`` lacks ``missing`` bytes in the best of them."""

    def __init__(self, message: str, *, rank: int, missing: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.missing = missing


@dataclass(frozen=True)
class Deployment:
    """What is to be started: GPUs, one size a stage, and the flags that matter for memory."""

    gpu_bytes: tuple[int, ...]
    release: Version
    tp_size: int = 1
    attention_backend: str = "triton_pp"
    kv_cache_dtype: str = "auto"
    mem_fraction_static: float | None = None
    context: int | None = None
    max_running: int | None = None
    multiprocessors: int = MULTIPROCESSORS
    page_size: int = 1

    @property
    def pp_size(self) -> int:
        return len(self.gpu_bytes)


@dataclass(frozen=True)
class Budget:
    """The numbers that decide: bytes of weights, bytes a token, and bytes free before loading, one a stage.

    ``token_bytes[i]`` is of layer ``i``; ``reserve`` are bytes of every GPU that SGLang leaves to activations,
    graphs and buffers. A stage may begin at layer ``i`` where ``may_start[i]``.
    """

    weights: Weights
    token_bytes: tuple[int, ...]
    free: tuple[int, ...]
    reserve: int
    page_size: int
    may_start: tuple[bool, ...]

    def tokens(self, counts: Sequence[int]) -> int:
        """KV tokens of a partition, as SGLang works them out; 0 if it does not start."""
        bounds = list(_bounds(counts))
        left = min(free - self.weights.stage(*bound) for free, bound in zip(self.free, bounds, strict=True))
        cell = max(sum(self.token_bytes[start:end]) for start, end in bounds)
        return max(0, (left - self.reserve) // cell) // self.page_size * self.page_size

    def allows(self, counts: Sequence[int]) -> bool:
        """Whether no stage begins where it must not."""
        return all(self.may_start[start] for start, _ in _bounds(counts))


def _bounds(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    for end, count in zip(accumulate(counts), counts, strict=True):
        yield end - count, end


# The search


@dataclass(frozen=True)
class _Cuts:
    """All segments ``[start, end)`` a stage may be, with what each costs."""

    budget: Budget
    default: tuple[int, ...]

    def segments(self, rank: int, end: int, cell_limit: int) -> Iterator[tuple[int, int]]:
        """Where stage ``rank`` may start if it ends at ``end``, and what stays free on its GPU."""
        budget = self.budget
        sizes, tokens = budget.weights.layers, budget.token_bytes
        last = budget.weights.head if end == len(sizes) else 0
        weight, cell = budget.weights.everywhere + last, 0
        for start in range(end - 1, rank - 1, -1):
            weight += sizes[start]
            cell += tokens[start]
            if cell > cell_limit:
                return
            if budget.may_start[start] and (start == 0) == (rank == 0):
                first = budget.weights.embedding if start == 0 else 0
                yield start, budget.free[rank] - weight - first

    def most_left(self, cell_limit: int) -> int | None:
        """The most that the fullest GPU can have left where no stage's cell is larger; None if no partition is so."""
        layers, stages = len(self.budget.token_bytes), len(self.budget.free)
        best: dict[int, int] = {0: 2**63}
        for rank in range(stages):
            ends = range(rank + 1, layers - (stages - rank - 1) + 1) if rank < stages - 1 else (layers,)
            after: dict[int, int] = {}
            for end in ends:
                found = [
                    min(best[start], left) for start, left in self.segments(rank, end, cell_limit) if start in best
                ]
                if found:
                    after[end] = max(found)
            best = after
        return best.get(layers)

    def nearest(self, cell_limit: int, least_left: int) -> tuple[int, tuple[int, ...]] | None:
        """The partition nearest to the default, and how far off, among those within both limits."""
        layers, stages = len(self.budget.token_bytes), len(self.budget.free)
        best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
        for rank in range(stages):
            ends = range(rank + 1, layers - (stages - rank - 1) + 1) if rank < stages - 1 else (layers,)
            after: dict[int, tuple[int, tuple[int, ...]]] = {}
            for end in ends:
                for start, left in self.segments(rank, end, cell_limit):
                    if start in best and left >= least_left:
                        far, counts = best[start]
                        found = (far + abs(start - self.default[rank]), (*counts, end - start))
                        after[end] = min(after.get(end, found), found)
            best = after
        return best.get(layers)


def best_partition(budget: Budget, default: Sequence[int]) -> tuple[int, ...] | None:
    """Layer counts with the most :meth:`Budget.tokens` of all partitions; None if no partition leaves a token.

    Exact: for each size that the largest cell can have, smallest first, a dynamic programme finds the most that
    the fullest GPU can have left. It ends where even the most left with no limit could not do better with the
    next cell. Among equals the partition is the one whose stages begin nearest to ``default``'s (sum of the
    distances in layers), and of those the first in the order of their counts.
    """
    starts = tuple(start for start, _ in _bounds(default))
    cuts = _Cuts(budget, starts)
    sums = [0, *accumulate(budget.token_bytes)]
    cells = sorted({end - start for index, start in enumerate(sums) for end in sums[index + 1 :] if end > start})
    ceiling = cuts.most_left(cells[-1])
    if ceiling is None:
        return None
    low, high = 0, len(cells) - 1  # the smallest cell that some partition keeps to
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cuts.most_left(cells[middle]) is not None else (middle + 1, high)
    page, most, useful = budget.page_size, 0, []
    for cell in cells[low:]:
        if (ceiling - budget.reserve) // cell // page * page < max(most, 1):
            break
        left = cuts.most_left(cell)
        assert left is not None
        tokens = (left - budget.reserve) // cell // page * page
        useful.append((tokens, cell))
        most = max(most, tokens)
    if most < 1:
        return None
    nearest = [cuts.nearest(cell, budget.reserve + most * cell) for tokens, cell in useful if tokens == most]
    return min(found for found in nearest if found is not None)[1]


# What SGLang would take for a deployment


def graph_slots(deployment: Deployment) -> int:
    """The largest batch of SGLang's CUDA graphs: ``--cuda-graph-max-bs``, by GPU memory and TP."""
    memory, many = min(deployment.gpu_bytes) / GIB, deployment.tp_size >= 4
    small = (48, 160) if deployment.release >= _LARGER_SMALL_GPUS else (24, 80)
    table = ((20, 8, 8), (35, *small), (60, 32, 160), (160, 256, 512))
    return next((wide if many else narrow for limit, narrow, wide in table if memory < limit), 512)


def chunked_prefill_size(deployment: Deployment) -> int:
    """Tokens of a prefill chunk: ``--chunked-prefill-size``, by GPU memory."""
    memory = min(deployment.gpu_bytes) / GIB
    small = 4096 if deployment.release >= _LARGER_SMALL_GPUS else 2048
    table = ((20, 2048), (35, small), (60, 4096), (160, 8192))
    return next((tokens for limit, tokens in table if memory < limit), 16384)


def default_mem_fraction(model: Model, deployment: Deployment) -> float:
    """SGLang's own ``--mem-fraction-static``, rounded as SGLang rounds it.

    512 MiB, 1.5 MiB a token of a prefill chunk, 2 MiB a graph slot and 1 GiB for eight GPUs are kept; above
    60 GiB at least 10. The smallest GPU counts, as ``nvidia-smi`` is asked for the least. A vision tower takes
    a share of the rest. Source: ``server_args.py``, since 0.5.19 ``arg_groups/memory_hook.py``.
    """
    memory = min(deployment.gpu_bytes) / MIB
    reserved = 512 + 1.5 * chunked_prefill_size(deployment)
    slots = graph_slots(deployment)
    if deployment.max_running is not None and deployment.release >= _SLOTS_BY_REQUESTS:
        slots = min(slots, deployment.max_running)
    reserved += 2 * slots + deployment.tp_size * deployment.pp_size / 8 * 1024
    graphs_since = _MULTIMODAL_PREFILL_GRAPHS if model.multimodal else _PREFILL_GRAPHS
    if deployment.pp_size == 1 and model.attention.is_mla and deployment.release >= graphs_since:
        reserved += 1.5 * 1024  # graphs of prefill, which a pipeline has not
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3) * _share_beside_vision(model)


def _share_beside_vision(model: Model) -> float:
    """What SGLang multiplies the fraction by: 0.95, and less for towers larger than a ViT-L/14."""
    if model.vision is None:
        return 1.0
    layers, width = model.vision
    larger = layers * width**2 / (24 * 1024**2) - 1
    return 0.95 * max(0.8, min(1.05, 1 - 0.1 * larger))


def mem_fraction(model: Model, deployment: Deployment) -> float:
    """The fraction that is given, else SGLang's own."""
    return deployment.mem_fraction_static or default_mem_fraction(model, deployment)


def token_bytes(model: Model, layer: int, kv_cache_dtype: str, tp_size: int, release: Version) -> int:
    """Bytes of one token in one layer's cache on one GPU.

    MLA's latent and rope part are whole on every rank of tensor parallelism; key and value heads are divided.
    The indexer of DeepSeek sparse attention keeps a key in fp8 with its scales besides.
    """
    element = KV_DTYPE_BYTES.get(kv_cache_dtype, model.dtype_bytes)
    attention = model.attention
    if not attention.is_mla:
        return 2 * max(1, attention.num_kv_heads // tp_size) * (attention.head_dim or 0) * element
    indexer = model.indexer
    if indexer is None:
        return attention.latent_width * element
    width = attention.latent_width
    if kv_cache_dtype == "fp8_e4m3":
        # Scales of four bytes for 128 elements of the latent, and the rope part in bf16.
        latent, rope = attention.kv_lora_rank or 0, attention.qk_rope_head_dim or 0
        width = latent + latent // _SCALE_BLOCK * 4 + 2 * rope
    own_index = not indexer.shared[layer] or release < _SHARED_INDEX_KEYS
    index = indexer.head_dim + indexer.head_dim // _SCALE_BLOCK * 4 if own_index else 0
    return width * element + index


def decode_splits(model: Model, deployment: Deployment, slots: int, context: int) -> tuple[int, int]:
    """KV splits that the deployment's backend keeps room for, and those that stock Triton would."""
    heads = max(1, model.attention.num_heads // deployment.tp_size)
    stock = KV_SPLITS
    if model.attention.is_mla and deployment.release >= _LIFTED_SPLITS:
        stock = max(stock, min(_power_of_two(deployment.multiprocessors), _power_of_two(-(-context // 32))))
    if deployment.attention_backend != "triton_pp":
        return stock, stock
    ours = fit_kv_splits(
        stock,
        KV_SPLITS,
        num_heads=heads,
        value_width=model.attention.value_width,
        sm_count=deployment.multiprocessors,
        slots=slots,
    )
    return ours, stock


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def decode_workspace(model: Model, deployment: Deployment, splits: int, slots: int, context: int) -> int:
    """Bytes the Triton backend keeps for its CUDA graphs: partial results with their sums, and token indices.

    fp32 results of every split, head and slot, and eight bytes a slot and position of the context (nine up to
    0.5.16, with the mask).
    """
    heads = max(1, model.attention.num_heads // deployment.tp_size)
    partial = partial_bytes(splits, heads, model.attention.value_width) + splits * heads * 4
    index = 8 if deployment.release >= _NO_MASK else 9
    return slots * (partial + index * context)


def request_table(tokens: int, context: int, max_running: int | None) -> int:
    """Bytes of the table from requests to their tokens: four a position, for as many requests as SGLang admits."""
    requests = max(2048, min(4096, tokens * 512 // context))
    return (min(requests if max_running is None else max_running, max(1, tokens // 2)) + 1) * (context + 4) * 4


# The plan


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan; bytes of one GPU of it. ``kv_bytes`` are what the pool takes, and ``spare`` what no
    one takes since another stage decides."""

    rank: int
    layers: int
    gpu_bytes: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    reserve_bytes: int
    spare_bytes: int


@dataclass(frozen=True)
class Plan:
    """A partition, what it leaves, and SGLang's own for comparison; see ``docs/plan.md``.

    ``default_kv_tokens`` is 0 where SGLang's split does not start. ``workspace_stock_bytes`` is what stock
    Triton would keep on a GPU where ``stages`` say what the deployment's backend does.
    """

    partition: tuple[int, ...]
    kv_tokens: int
    default_partition: tuple[int, ...]
    default_kv_tokens: int
    stages: tuple[StagePlan, ...]
    mem_fraction_static: float
    context: int
    slots: int
    splits: int
    stock_splits: int
    workspace_stock_bytes: int
    weights_measured: bool

    @property
    def gain(self) -> float | None:
        """How many more tokens than the default leaves, as a fraction of them; None where that leaves none."""
        return self.kv_tokens / self.default_kv_tokens - 1 if self.default_kv_tokens else None


def check(model: Model, deployment: Deployment) -> None:
    """Raise ``ValueError``, in one sentence, for what cannot be planned."""
    if model.other_attention:
        raise ValueError(
            f"{model.architecture} has {model.other_attention}, whose memory SGLang divides by other rules; "
            "plan handles models whose layers all keep each token."
        )
    if deployment.pp_size > model.num_layers:
        raise ValueError(
            f"{model.num_layers} layers cannot fill {deployment.pp_size} pipeline stages; "
            f"use a --pp-size of at most {model.num_layers}."
        )
    if model.attention.num_heads % deployment.tp_size:
        raise ValueError(
            f"{model.attention.num_heads} heads cannot be divided over {deployment.tp_size} GPUs; "
            "use a --tp-size that divides them."
        )
    smallest, largest = min(deployment.gpu_bytes), max(deployment.gpu_bytes)
    if deployment.tp_size > 1 and smallest < 0.9 * largest:
        raise ValueError(
            f"SGLang refuses --tp-size {deployment.tp_size} where a GPU has {smallest / GIB:g} GB and another "
            f"{largest / GIB:g}; use GPUs within a tenth of each other, or --tp-size 1."
        )
    if deployment.kv_cache_dtype != "auto" and deployment.kv_cache_dtype not in KV_DTYPE_BYTES:
        raise ValueError(
            f"The KV cache dtype {deployment.kv_cache_dtype} is not one of auto, {', '.join(KV_DTYPE_BYTES)}."
        )


def budget_of(model: Model, weights: Weights, deployment: Deployment) -> Budget:
    """The numbers the search works on."""
    free = tuple(max(0, size - RUNTIME_BYTES) for size in deployment.gpu_bytes)
    may_start = [True] * model.num_layers
    if deployment.release < _HANDS_ON_INDICES:
        for first, end in model.joined_layers:
            may_start[first + 1 : end] = [False] * (end - first - 1)
    cells = tuple(
        token_bytes(model, layer, deployment.kv_cache_dtype, deployment.tp_size, deployment.release)
        for layer in range(model.num_layers)
    )
    reserve = int(min(free) * (1 - mem_fraction(model, deployment)))
    if model.multimodal and deployment.release >= _VISION_CACHE_KEPT:
        reserve += _VISION_CACHE
    return Budget(weights, cells, free, reserve, deployment.page_size, tuple(may_start))


def make_plan(
    model: Model, weights: Weights, deployment: Deployment, *, partition: Sequence[int] | None = None
) -> Plan:
    """The partition with the most KV tokens, or what the given one leaves, and SGLang's own beside it.

    Raises ``ValueError`` for what cannot be planned and :class:`DoesNotFit` where no partition starts, or not
    the given one.
    """
    check(model, deployment)
    budget = budget_of(model, weights, deployment)
    old_split = deployment.release < _EVEN_SPLIT
    stages = default_partition(model.num_layers, deployment.pp_size, remainder_last=old_split)
    default = tuple(len(stage.layers) for stage in stages)
    best = tuple(partition) if partition else best_partition(budget, default)
    if best is None:
        counts = _least_lacking(model, deployment, budget, default)
        raise _does_not_fit(deployment, budget, counts, "in the best partition", _remedy(model, weights, deployment))
    if not budget.tokens(best):
        remedy = "have `sglang-pp-mla plan` find the partition, or use more or larger GPUs"
        raise _does_not_fit(deployment, budget, best, "with this partition", remedy)
    return _plan(model, deployment, budget, best, default)


def _plan(
    model: Model, deployment: Deployment, budget: Budget, best: tuple[int, ...], default: tuple[int, ...]
) -> Plan:
    tokens = budget.tokens(best)
    context = deployment.context or model.max_position_embeddings or 4096
    slots = min(graph_slots(deployment), deployment.max_running or 2**31)
    splits, stock = decode_splits(model, deployment, slots, context)
    table = request_table(tokens, context, deployment.max_running)
    # Of other backends' buffers nothing is known here; they come out of the reserve.
    known = deployment.attention_backend in TRITON
    workspace = table + (decode_workspace(model, deployment, splits, slots, context) if known else 0)
    stages = []
    for rank, (start, end) in enumerate(_bounds(best)):
        weight = budget.weights.stage(start, end)
        cell = sum(budget.token_bytes[start:end])
        spare = budget.free[rank] - weight - cell * tokens - budget.reserve
        stages.append(
            StagePlan(
                rank=rank,
                layers=end - start,
                gpu_bytes=deployment.gpu_bytes[rank],
                weight_bytes=weight,
                workspace_bytes=workspace,
                kv_bytes_per_token=cell,
                kv_bytes=cell * tokens,
                reserve_bytes=budget.reserve,
                spare_bytes=spare,
            )
        )
    if workspace > budget.reserve:
        raise DoesNotFit(
            f"Rank 0 keeps {budget.reserve / GIB:.1f} GiB in reserve, but graphs for {slots} requests of {context} "
            f"tokens need {workspace / GIB:.1f} GiB, {(workspace - budget.reserve) / GIB:.1f} GiB more; "
            "lower --mem-fraction-static, the longest context or the number of requests.",
            rank=0,
            missing=workspace - budget.reserve,
        )
    return Plan(
        partition=best,
        kv_tokens=tokens,
        default_partition=default,
        default_kv_tokens=budget.tokens(default) if budget.allows(default) else 0,
        stages=tuple(stages),
        mem_fraction_static=mem_fraction(model, deployment),
        context=context,
        slots=slots,
        splits=splits,
        stock_splits=stock,
        workspace_stock_bytes=decode_workspace(model, deployment, stock, slots, context) + table,
        weights_measured=budget.weights.measured,
    )


def _least_lacking(model: Model, deployment: Deployment, budget: Budget, default: tuple[int, ...]) -> tuple[int, ...]:
    """The partition whose fullest GPU has the most left, where none has enough."""
    # With cells of no size the search is for that alone.
    weightless = replace(budget, token_bytes=(0,) * model.num_layers)
    cuts = _Cuts(weightless, tuple(start for start, _ in _bounds(default)))
    left = cuts.most_left(0)
    if left is None:
        groups = ", ".join(f"{first}-{end - 1}" for first, end in model.joined_layers)
        raise ValueError(
            f"No {deployment.pp_size} stages keep together the layers that share an index ({groups}), "
            f"which SGLang {deployment.release} needs; use a smaller --pp-size or SGLang 0.5.14 or later."
        )
    found = cuts.nearest(0, left)
    assert found is not None
    return found[1]


def _does_not_fit(
    deployment: Deployment, budget: Budget, counts: tuple[int, ...], where: str, remedy: str
) -> DoesNotFit:
    """Say what a partition lacks, and on which rank."""
    bounds = list(_bounds(counts))
    spare = [free - budget.weights.stage(*bound) for free, bound in zip(budget.free, bounds, strict=True)]
    rank = spare.index(min(spare))
    cell = max(sum(budget.token_bytes[slice(*bound)]) for bound in bounds)
    missing = budget.reserve + cell * budget.page_size - spare[rank]
    start, end = bounds[rank]
    return DoesNotFit(
        f"Rank {rank} of {deployment.pp_size} lacks {missing / GIB:.1f} GiB {where}: layers "
        f"{start}-{end - 1} weigh {budget.weights.stage(start, end) / GIB:.1f} GiB, SGLang keeps "
        f"{budget.reserve / GIB:.1f} GiB in reserve and {budget.free[rank] / GIB:.1f} GiB are free before loading; "
        f"{remedy}.",
        rank=rank,
        missing=missing,
    )


def _remedy(model: Model, weights: Weights, deployment: Deployment) -> str:
    """A larger fraction where that alone does it, else the smallest pipeline of the same GPUs, else in general."""
    plain = round(default_mem_fraction(replace(model, vision=None), deployment), 3)
    if mem_fraction(model, deployment) < plain:
        larger = replace(deployment, mem_fraction_static=plain)
        default = tuple(len(stage.layers) for stage in default_partition(model.num_layers, deployment.pp_size))
        if best_partition(budget_of(model, weights, larger), default) is not None:
            return f"use --mem-fraction-static {plain:g}"
    if len(set(deployment.gpu_bytes)) == 1:
        for pp_size in range(deployment.pp_size + 1, min(model.num_layers, 4 * deployment.pp_size) + 1):
            larger = replace(deployment, gpu_bytes=deployment.gpu_bytes[:1] * pp_size)
            # A pipeline of one has its tied head for nothing, a longer one has not: that is the weights' affair.
            stages = default_partition(model.num_layers, pp_size)
            default = tuple(len(stage.layers) for stage in stages)
            if best_partition(budget_of(model, weights, larger), default) is not None:
                return f"use --pp-size {pp_size}, a larger --tp-size or larger GPUs"
    return "use more or larger GPUs, or a smaller quantisation of the model"


# What crosses the link


@dataclass(frozen=True)
class Traffic:
    """For one decoded token: what it waits for, one after the other, and the bytes that the busiest GPU sends.

    An all-reduce of ``n`` bytes over ``t`` GPUs makes each send ``2 n (t - 1) / t``, as a ring does it. A stage
    hands on two tensors, hidden states and residual, of which every rank of tensor parallelism sends its part.
    """

    all_reduces: int
    hops: int
    bytes_sent: int


def traffic(model: Model, tp_size: int, counts: Sequence[int]) -> Traffic:
    """Two all-reduces a layer, and one for the embedding, under TP; one hop from stage to stage under PP.

    The gathering of logits, once a token, is left out.
    """
    row = model.hidden_size * model.dtype_bytes
    divided = tp_size > 1
    ring = 2 * row * (tp_size - 1) // tp_size
    sent = []
    for rank, count in enumerate(counts):
        reduces = 2 * count + (rank == 0) if divided else 0
        sent.append(reduces * ring + (2 * row // tp_size if rank < len(counts) - 1 else 0))
    return Traffic(2 * sum(counts) + 1 if divided else 0, len(counts) - 1, max(sent))
