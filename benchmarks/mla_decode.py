#!/usr/bin/env python
"""One MLA decode on one NVIDIA GPU: SGLang's stock kernels, release by release, and this package's flat decode.

    python benchmarks/mla_decode.py --stock 0.5.11=FOLDER --stock 0.5.23=FOLDER [--seconds 200] [--json FILE]
    python benchmarks/mla_decode.py --stock … --check      no GPU: compare results of tiny shapes, time nothing

FOLDER holds the `sglang` package of a release, as `tools/wheels` prints it. Needs torch and Triton, and nothing
else: neither SGLang nor this package need be installed. All decode the same tensors: bf16, a latent of 512 and a
rope part of 64. Each result is compared with a float32 reference. Times are medians of CUDA events, taken in turns
with a cold L2 cache, with CUDA graphs and without. The number of KV splits is chosen beforehand, as SGLang does
once for all layers. Exit codes: 0 good, 1 a result is wrong, 2 the call is wrong or there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_pp_mla.kernelfit import launchers
from sglang_pp_mla.kernelfit.gpus import CAPABILITIES, Gpu
from sglang_pp_mla.kernels.flat_schedule import number_of_pieces

if TYPE_CHECKING:
    from types import ModuleType

    import torch

LATENT, ROPE = 512, 64
TOKEN_BYTES = (LATENT + ROPE) * 2
SCALE = (128 + 64) ** -0.5  # of DeepSeek-V3 and Kimi K2.6: their unabsorbed query heads are this wide
ASKED_SPLITS = 8  # SGLang's --triton-attention-num-kv-splits
LONGEST = 131072
CHECKED_ON = 6  # multiprocessors of a GPU that is made up
RUN = 64  # tokens of a request that lie side by side in the KV cache
TOLERANCE = 0.02  # bf16 keeps 8 bits; see worst_error()
FLAT = "flat"
MODES = {"graph_ms": "With CUDA graphs", "eager_ms": "Without"}

# The most important first: a run that is short of time leaves out the last ones.
HEADS = (64, 128)
CONTEXTS = ("8k", "skewed", "32k", "128k", "1k")
BATCHES = (16, 1, 64, 4, 160)

FLUSHED = 256 * 2**20  # bytes, more than any L2 cache
COPIED = 2**29
ROUNDS = (10, 100)
MEASURED_MS = 250.0  # all decodes of a shape, in one mode, if the bounds of the rounds allow


@dataclass(frozen=True)
class Shape:
    heads: int
    batch: int
    context: str

    @property
    def lengths(self) -> list[int]:
        """``skewed`` is one request of 128k among others of 2k."""
        if self.context == "skewed":
            return [LONGEST, *[2048] * (self.batch - 1)]
        return [1024 * int(self.context.removesuffix("k"))] * self.batch

    def __str__(self) -> str:
        return f"{self.heads} heads, batch {self.batch}, {self.context}"


def shapes() -> list[Shape]:
    """All of them, the most important first. A skewed batch of one is an even one."""
    ranks = {
        Shape(heads, batch, context): (len(HEADS) * h + c + b, h, c, b)
        for h, heads in enumerate(HEADS)
        for c, context in enumerate(CONTEXTS)
        for b, batch in enumerate(BATCHES)
        if (context, batch) != ("skewed", 1)
    }
    return sorted(ranks, key=ranks.__getitem__)


class Stock:
    """A release's decode, from its files alone. Raises ``FileNotFoundError`` or ``LookupError``, in one sentence."""

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        root = folder / "sglang"
        self.module: ModuleType = launchers.load(root, gpu, "decode_attention")
        self.split_kernel = launchers.split_kernel(root)
        self.cap = launchers.split_cap(root, ASKED_SPLITS, gpu, LONGEST)


class Batch:
    """Queries, and the slots of the KV cache ``kv`` that hold the requests' tokens: runs of 64, in random order."""

    def __init__(self, kv: torch.Tensor, lengths: list[int], heads: int) -> None:
        import torch

        device = kv.device
        self.kv = kv
        self.lengths = torch.tensor(lengths, device=device)
        self.indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        runs = torch.randperm(kv.shape[0] // RUN, device=device)[: -(-sum(lengths) // RUN)]
        self.indices = (runs[:, None] * RUN + torch.arange(RUN, device=device)).flatten()[: sum(lengths)]
        self.q = torch.randn(len(lengths), heads, LATENT + ROPE, dtype=kv.dtype, device=device)
        self.out = torch.empty(len(lengths), heads, LATENT, dtype=kv.dtype, device=device)

    def stock(self, release: Stock, multiprocessors: int, *, pdl: bool) -> Callable[[], None]:
        heads = self.q.shape[1]
        splits = launchers.chosen_splits(release.split_kernel, self.lengths, heads, release.cap, multiprocessors)
        values = self.kv[..., :LATENT]
        where = self.q, self.kv, values, self.out, self.indptr, self.indices
        return launchers.decode_call(release.module, *where, splits, release.cap, scale=SCALE, mla=True, pdl=pdl)

    def flat(self, multiprocessors: int) -> Callable[[], None]:
        from sglang_pp_mla.kernels.flat_decode import flat_decode, workspace

        heads = self.q.shape[1]
        kept = workspace(number_of_pieces(heads, multiprocessors), heads, LATENT, self.kv.device)
        where = self.q, self.kv, self.out, self.indptr, self.indices
        return lambda: flat_decode(*where, *kept, latent=LATENT, scale=SCALE)

    def reference(self) -> torch.Tensor:
        """In float32, one request after another, so that memory stays small."""
        import torch

        answers = torch.empty(self.out.shape, device=self.kv.device)
        start = 0
        for request, tokens in enumerate(self.lengths.tolist()):
            kv = self.kv[self.indices[start : start + tokens], 0].float()
            weights = torch.softmax(self.q[request].float() @ kv.T * SCALE, -1)
            answers[request] = weights @ kv[:, :LATENT]
            start += tokens
        return answers

    def error(self, decode: Callable[[], None], expected: torch.Tensor) -> float:
        """Of what ``decode`` writes, or leaves unwritten."""
        self.out.fill_(math.nan)
        decode()
        return worst_error(self.out, expected)


def worst_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, each as a part of the largest value of its request and head; NaN if any is."""
    difference = (out.float() - expected).abs().amax(-1)
    return float((difference / expected.abs().amax(-1)).max())


def is_right(error: float) -> bool:
    return error <= TOLERANCE  # so NaN is wrong


def check(stocks: dict[str, Stock]) -> int:
    """Tiny shapes on the CPU, by Triton's interpreter, which cannot multiply bf16: float16. Returns an exit code."""
    import torch

    status = 0
    for heads, lengths in ((20, [70, 1]), (64, [150])):
        kv = torch.randn(1024, 1, LATENT + ROPE).half()
        batch = Batch(kv, lengths, heads)
        expected = batch.reference()
        for name, decode in decodes_of(batch, stocks, CHECKED_ON, pdl=False).items():
            error = batch.error(decode, expected)
            status |= not is_right(error)
            said = "right" if is_right(error) else "WRONG"
            print(f"{heads} heads, lengths {lengths}: {name} is {said}, error {error:.2e}", flush=True)
    return status


def decodes_of(
    batch: Batch, stocks: dict[str, Stock], multiprocessors: int, *, pdl: bool
) -> dict[str, Callable[[], None]]:
    every = {name: batch.stock(release, multiprocessors, pdl=pdl) for name, release in stocks.items()}
    return {**every, FLAT: batch.flat(multiprocessors)}


# ----- on a GPU


def captured(decode: Callable[[], None]) -> Callable[[], None]:
    """``decode`` as a CUDA graph. It has run before, so that its kernels are compiled."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    replay: Callable[[], None] = graph.replay
    return replay


def timed(runs: dict[str, Callable[[], Any]], flush: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of each, measured in turns, the L2 cache cold."""
    import torch

    def once(run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def rounds(number: int) -> dict[str, list[float]]:
        events = [{name: once(run) for name, run in runs.items()} for _ in range(number)]
        torch.cuda.synchronize()
        return {name: [each[name][0].elapsed_time(each[name][1]) for each in events] for name in runs}

    a_round = sum(min(times) for times in rounds(2).values())
    least, most = ROUNDS
    measured = rounds(min(most, max(least, int(MEASURED_MS / max(a_round, 1e-3)))))
    return {name: statistics.median(times) for name, times in measured.items()}


def copy_bandwidth(flush: torch.Tensor) -> float:
    """GB/s of copying on the device, what is read and what is written together."""
    import torch

    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device=flush.device) for _ in range(2))
    ms = timed({"copy": lambda: target.copy_(source)}, flush)["copy"]
    return 2 * COPIED / ms / 1e6


@dataclass(frozen=True)
class Figures:
    """Of one decode. ``failure`` says why it did not run."""

    graph_ms: float = math.nan
    eager_ms: float = math.nan
    graph_error: float = math.nan
    eager_error: float = math.nan
    failure: str | None = None

    @property
    def right(self) -> bool:
        return is_right(self.graph_error) and is_right(self.eager_error)

    def as_json(self) -> dict[str, Any]:
        """JSON has no NaN."""
        figures = dataclasses.asdict(self)
        return {name: None if value != value else value for name, value in figures.items()} | {"right": self.right}


@dataclass(frozen=True)
class Row:
    """``gigabytes`` is what a decode must read and write at the least: each token's KV once, queries, results."""

    shape: Shape
    gigabytes: float
    figures: dict[str, Figures]

    @property
    def wrong(self) -> bool:
        return not all(each.right for each in self.figures.values())

    @property
    def fastest(self) -> str | None:
        """With CUDA graphs, of those that are right."""
        right = {name: each.graph_ms for name, each in self.figures.items() if each.right}
        return min(right, key=right.__getitem__, default=None)

    def ratio(self, mode: str) -> float | None:
        """How many times as fast as the better stock the flat decode is; None where either is not right."""
        right = {name: float(getattr(each, mode)) for name, each in self.figures.items() if each.right}
        flat = right.pop(FLAT, None)
        return min(right.values()) / flat if flat and right else None


def measure(shape: Shape, kv: torch.Tensor, stocks: dict[str, Stock], gpu: Gpu, flush: torch.Tensor) -> Row:
    """All decodes of one shape. Raises ``torch.cuda.OutOfMemoryError`` where they do not fit beside the KV cache."""
    import torch

    batch = Batch(kv, shape.lengths, shape.heads)
    expected = batch.reference()
    eager = decodes_of(batch, stocks, gpu.multiprocessors, pdl=gpu.capability.number >= 90)
    graphs: dict[str, Callable[[], None]] = {}
    errors: dict[str, tuple[float, float]] = {}
    failures: dict[str, Figures] = {}
    for name, decode in eager.items():
        try:
            eager_error = batch.error(decode, expected)  # compiles, too
            replay = captured(decode)
            errors[name] = batch.error(replay, expected), eager_error
            graphs[name] = replay
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as problem:  # a compiler refuses in many ways, and the others are still to be measured
            failures[name] = Figures(failure=f"{type(problem).__name__}: {problem}".splitlines()[0])
    graph_ms = timed(graphs, flush)
    eager_ms = timed({name: eager[name] for name in graphs}, flush)
    found = {name: failures.get(name) or Figures(graph_ms[name], eager_ms[name], *errors[name]) for name in eager}
    elements = batch.indices.numel() * (LATENT + ROPE) + batch.q.numel() + batch.out.numel()
    return Row(shape, elements * kv.element_size() / 1e9, found)


class Run:
    """Shapes measured one after another, for about ``seconds`` from ``began``, and a line of a table for each."""

    device = "cuda"

    def __init__(self, stocks: dict[str, Stock], gpu: Gpu, began: float, seconds: float) -> None:
        import torch

        self.stocks, self.gpu, self.began, self.seconds = stocks, gpu, began, seconds
        self.flush = torch.empty(FLUSHED, dtype=torch.uint8, device=self.device)
        self.copied = copy_bandwidth(self.flush)
        self.rows: list[Row] = []
        self.left_out: dict[Shape, str] = {}

    def measure_all(self) -> None:
        import torch

        torch.cuda.empty_cache()
        room = torch.cuda.mem_get_info()[0] // 2  # the other half is for partial results
        for shape in shapes():
            size = sum(shape.lengths) * TOKEN_BYTES
            if size > room:
                self.left_out[shape] = f"its KV takes {size / 2**30:.1f} GiB, more than half of the free memory"
        slots = max(sum(shape.lengths) for shape in shapes() if shape not in self.left_out)
        kv = torch.empty((slots, 1, LATENT + ROPE), dtype=torch.bfloat16, device=self.device).normal_()
        print("\n".join(self.heading()), flush=True)
        for shape in shapes():
            if shape not in self.left_out:
                self.measure(shape, kv)

    def measure(self, shape: Shape, kv: torch.Tensor) -> None:
        import torch

        if time.monotonic() - self.began > self.seconds:
            self.left_out[shape] = f"the {self.seconds:.0f} s were over"
            return
        try:
            row = measure(shape, kv, self.stocks, self.gpu, self.flush)
        except torch.cuda.OutOfMemoryError:
            self.left_out[shape] = "the partial results do not fit beside the KV"
        else:
            self.rows.append(row)
            print(self.line(row), flush=True)
        torch.cuda.empty_cache()

    def heading(self) -> list[str]:
        columns = ["", *self.stocks, FLAT, "ratio", "GB/s", "of copy", "fastest"]
        return [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 2)} --- |"]

    def line(self, row: Row) -> str:
        cells = [str(row.shape)]
        for each in row.figures.values():
            said = f"{each.graph_ms:.3f} / {each.eager_ms:.3f}"
            cells.append(each.failure or (said if each.right else f"{said} WRONG"))
        cells.append(" / ".join("" if (ratio := row.ratio(mode)) is None else f"{ratio:.2f}" for mode in MODES))
        rate = row.gigabytes / row.figures[FLAT].graph_ms * 1e3
        cells += [f"{rate:,.0f}", f"{rate / self.copied:.0%}", row.fastest or "none"]
        return f"| {' | '.join(cells)} |"

    def summary(self) -> list[str]:
        lines = ["Milliseconds and ratios: with CUDA graphs / without. Ratio: the better stock to flat. GB/s: of flat."]
        lines.append(f"Copying moves {self.copied:,.0f} GB/s on {self.gpu.name}.")
        for mode, name in MODES.items():
            ratios = {row.shape: ratio for row in self.rows if (ratio := row.ratio(mode)) is not None}
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                mean = statistics.geometric_mean(ratios.values())
                lines.append(f"{name}: geometric mean {mean:.2f}, worst {ratios[worst]:.2f} ({worst}).")
        for each in (*self.stocks, FLAT):
            number = sum(row.fastest == each for row in self.rows)
            lines.append(f"{each} is the fastest in {number} of {len(self.rows)} shapes.")
        lines += [f"WRONG or failed: {row.shape}." for row in self.rows if row.wrong]
        lines += [f"Left out: {shape}, since {reason}." for shape, reason in self.left_out.items()]
        return lines

    def as_json(self) -> dict[str, Any]:
        import torch
        import triton

        machine = {"gpu": self.gpu.name, "multiprocessors": self.gpu.multiprocessors, "copy_gb_s": self.copied}
        machine |= {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        rows = [
            {
                **dataclasses.asdict(row.shape),
                "gigabytes": row.gigabytes,
                "decodes": {name: each.as_json() for name, each in row.figures.items()},
                "ratio": {mode: row.ratio(mode) for mode in MODES},
                "fastest": row.fastest,
            }
            for row in self.rows
        ]
        left_out = [{**dataclasses.asdict(shape), "reason": reason} for shape, reason in self.left_out.items()]
        return {"machine": machine, "rows": rows, "left_out": left_out}


def gpu_here() -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(0)
    # Nothing here asks what a block may take, so it is left as some other GPU's.
    capability = dataclasses.replace(CAPABILITIES["sm_90"], name=f"sm_{found.major}{found.minor}")
    return Gpu(found.name, capability, found.multi_processor_count)


def named_folder(argument: str) -> tuple[str, Path]:
    release, _, folder = argument.partition("=")
    if not folder:
        raise argparse.ArgumentTypeError(f"{argument!r} is not RELEASE=FOLDER")
    return f"stock {release}", Path(folder)


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=named_folder, action="append", required=True, metavar="RELEASE=FOLDER")
    parser.add_argument("--seconds", type=float, default=200.0, help="leave out the least important shapes after these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--check", action="store_true", help="on the CPU: compare results of tiny shapes, time nothing")
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"{options.json.parent} is no folder to write to")
    if options.check:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not options.check and (not torch.cuda.is_available() or torch.version.hip):
        print("mla_decode.py needs an NVIDIA GPU, and torch finds none; --check compares results.", file=sys.stderr)
        return 2
    gpu = Gpu("none", CAPABILITIES["sm_90"], CHECKED_ON) if options.check else gpu_here()
    try:
        stocks = {name: Stock(folder, gpu) for name, folder in options.stock}
    except (FileNotFoundError, LookupError) as problem:
        print(f"mla_decode.py: {problem}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # of the reference
    if options.check:
        return check(stocks)
    run = Run(stocks, gpu, began, options.seconds)
    try:
        run.measure_all()
    finally:
        print("\n".join(["", *run.summary()]))
        if options.json:
            options.json.write_text(json.dumps(run.as_json(), indent=1))
    return int(any(row.wrong for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
