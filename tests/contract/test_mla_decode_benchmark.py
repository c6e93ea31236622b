"""benchmarks/mla_decode.py: its results on the CPU, and, with a GPU that is made up, what it does with times."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pp_mla.kernelfit import gpu_named, launchers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/mla_decode.py"
RELEASES = ("0.5.11", "0.5.23")
pytestmark = pytest.mark.release("0.5.23")

# Neither site-packages' .pth files nor any package of ours but the copy; what it depends on cannot be imported.
BARE = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
sys.modules.update(dict.fromkeys(("packaging", "pluggy", "rich", "sglang", "typer", "wrapt")))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    command = [sys.executable, ROOT / "tools/wheels", *RELEASES]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(zip(RELEASES, map(Path, printed.split()), strict=True))


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mla_decode", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def test_all_decodes_are_right_from_a_bare_checkout(wheels: dict[str, Path], tmp_path: Path) -> None:
    """With the files that docs/performance.md sends to a GPU's machine, torch and Triton, and no other package."""
    here = tmp_path / "checkout"
    for folder in ("sglang_pp_mla", "benchmarks"):
        shutil.copytree(ROOT / folder, here / folder, ignore=shutil.ignore_patterns("__pycache__"))
    stocks = []
    for release, wheel in wheels.items():
        for sent in ("kernels/ops/attention", "srt/environ.py", "srt/layers/attention"):
            source, target = wheel / "sglang" / sent, tmp_path / release / "sglang" / sent
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        stocks += ["--stock", f"{release}={tmp_path / release}"]
    command = [sys.executable, "-I", "-S", "-c", BARE, sysconfig.get_path("purelib")]
    done = subprocess.run(
        [*command, str(here / "benchmarks/mla_decode.py"), "--check", *stocks], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("stock 0.5.11", "stock 0.5.23", "flat"):
        assert done.stdout.count(f"{name} is right") == 2
    assert "WRONG" not in done.stdout


def test_no_gpu_no_kernels_and_no_folder_are_said_in_a_sentence(wheels: dict[str, Path], tmp_path: Path) -> None:
    def fails(*arguments: str) -> str:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=env)
        assert done.returncode == 2
        assert not done.stdout
        return done.stderr

    no_gpu = fails("--stock", f"0.5.11={wheels['0.5.11']}")
    assert no_gpu == "mla_decode.py needs an NVIDIA GPU, and torch finds none; --check compares results.\n"
    no_kernels = fails("--check", "--stock", f"0.5.11={tmp_path}")
    assert no_kernels.startswith(f"mla_decode.py: {tmp_path}/sglang has no Triton decode_attention.py")
    assert len(no_kernels.splitlines()) == 1
    assert "'0.5.11' is not RELEASE=FOLDER" in fails("--stock", "0.5.11")


def test_two_releases_in_one_process_and_no_trace_of_them(wheels: dict[str, Path]) -> None:
    before, finders = dict(sys.modules), [*sys.meta_path]
    old, new = (launchers.load(wheels[each] / "sglang", gpu_named("H100"), "decode_attention") for each in RELEASES)
    for module, release in ((old, "0.5.11"), (new, "0.5.23")):
        assert str(module.__file__).startswith(str(wheels[release]))
    assert {name: module for name, module in sys.modules.items() if name.startswith("sglang.")} == {
        name: module for name, module in before.items() if name.startswith("sglang.")
    }
    assert sys.meta_path == finders
    for root in (wheels[each] / "sglang" for each in RELEASES):
        splits = launchers.chosen_splits(launchers.split_kernel(root), torch.tensor([4096, 4096]), 16, 8, 32)
        assert splits.tolist() == [6, 6]  # 32 multiprocessors x log2(4096 / 64), for 2 x 16 programs a split


@pytest.mark.parametrize("lengths", [[1], [70, 3], [64, 128, 65]])
def test_the_reference_is_attention(benchmark: ModuleType, lengths: list[int]) -> None:
    """Against torch's own, in float64, a token of a request at a time."""
    batch = benchmark.Batch(torch.randn(512, 1, 576), lengths, 3)
    assert len({*batch.indices.tolist()}) == sum(lengths)
    for request, tokens in enumerate(lengths):
        start = int(batch.indptr[request])
        assert int(batch.indptr[request + 1]) == start + tokens
        kv = torch.stack([batch.kv[slot, 0] for slot in batch.indices[start : start + tokens]]).double()
        wanted = torch.nn.functional.scaled_dot_product_attention(
            batch.q[request, :, None].double(), *(part.expand(3, -1, -1) for part in (kv, kv[:, :512])), scale=192**-0.5
        )
        torch.testing.assert_close(batch.reference()[request].double(), wanted[:, 0], rtol=1e-4, atol=1e-6)


def test_a_wrong_result_is_seen(benchmark: ModuleType) -> None:
    expected = torch.randn(4, 20, 512)
    rounded = expected.bfloat16()
    assert benchmark.is_right(benchmark.worst_error(rounded, expected))
    for place, value in [((3, 19, 511), None), ((0, 0), 0.0), ((2,), math.nan), ((1, 7, 5), math.inf)]:
        broken = rounded.clone()
        broken[place] = broken[place] + 0.05 * expected[place[:2]].abs().max() if value is None else value
        assert not benchmark.is_right(benchmark.worst_error(broken, expected))
    swapped = rounded[:, [1, 0, *range(2, 20)]]
    assert not benchmark.is_right(benchmark.worst_error(swapped, expected))


def test_a_kernel_that_leaves_a_result_unwritten_is_wrong(benchmark: ModuleType) -> None:
    batch = benchmark.Batch(torch.randn(128, 1, 576), [9, 30], 2)
    expected = batch.reference()
    assert benchmark.is_right(batch.error(lambda: batch.out.copy_(expected), expected))
    assert not benchmark.is_right(batch.error(lambda: batch.out[:1].copy_(expected[:1]), expected))


def test_every_combination_is_planned_once_and_the_first_matter_most(benchmark: ModuleType) -> None:
    planned = benchmark.shapes()
    assert len(planned) == len(set(planned)) == 2 * (5 * 4 + 4)
    assert str(planned[0]) == "64 heads, batch 16, 8k"
    assert str(planned[-1]) == "128 heads, batch 160, 1k"
    assert {(shape.batch, tuple(shape.lengths[:2])) for shape in planned if shape.context == "skewed"} == {
        (batch, (131072, 2048)) for batch in (4, 16, 64, 160)
    }


class Clock:
    """A device whose work takes the time it is said to take, at once."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.capturing: list[Callable[[], None]] | None = None

    def work(self, ms: float, run: Callable[[], Any]) -> Callable[[], None]:
        def once() -> None:
            if self.capturing is not None:
                self.capturing.append(once)
                return
            self.ms += ms
            run()

        return once

    @contextmanager
    def graph(self, graph: SimpleNamespace) -> Iterator[None]:
        self.capturing = graph.work = []
        yield
        self.capturing = None

    def new_graph(self) -> SimpleNamespace:
        graph = SimpleNamespace(work=[])
        graph.replay = lambda: [each() for each in graph.work]
        return graph

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.ms)
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, benchmark: ModuleType) -> Clock:
    """In the place of ``torch.cuda``, which this machine lacks."""
    clock = Clock()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    doubles: dict[str, Any] = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "CUDAGraph": clock.new_graph,
        "graph": clock.graph,
        "Event": clock.event,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (2 * 9000 * 1152, 0),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(benchmark.Run, "device", "cpu")
    monkeypatch.setattr(benchmark, "FLUSHED", 64)
    monkeypatch.setattr(benchmark, "CONTEXTS", ("1k", "8k", "128k"))
    monkeypatch.setattr(benchmark, "BATCHES", (1, 2))
    monkeypatch.setattr(benchmark, "HEADS", (3,))
    monkeypatch.setattr(benchmark, "copy_bandwidth", lambda flush: 0.01)
    return clock


@pytest.fixture
def run(benchmark: ModuleType) -> Any:
    return benchmark.Run({"stock a": None, "stock b": None}, gpu_named("H100"), time.monotonic(), 60.0)


def test_times_ratios_and_what_is_left_out(
    benchmark: ModuleType, clock: Clock, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At batch 2 stock b does not compile; at 8k one result of stock a is wrong in the graph alone."""

    def decodes_of(batch: Any, stocks: Any, multiprocessors: int, *, pdl: bool) -> dict[str, Callable[[], None]]:
        assert (multiprocessors, pdl) == (132, True)
        right = batch.reference()
        calls = iter(range(10**6))

        def wrong_later() -> None:
            batch.out.copy_(right)
            if batch.indices.numel() > 8000 and next(calls) > 1:
                batch.out[0, 1] += 0.1

        def refused() -> None:
            raise RuntimeError("out of resource: shared memory\nand more")

        long = float(batch.indices.numel())
        return {
            "stock a": clock.work(long, wrong_later),
            "stock b": clock.work(2 * long, lambda: batch.out.copy_(right)) if len(batch.lengths) == 1 else refused,
            "flat": clock.work(long / 2, lambda: batch.out.copy_(right)),
        }

    monkeypatch.setattr(benchmark, "decodes_of", decodes_of)
    run.measure_all()
    answer = json.loads(json.dumps(run.as_json(), allow_nan=False))
    rows = {(row["context"], row["batch"]): row for row in answer["rows"]}
    assert set(rows) == {("1k", 1), ("1k", 2), ("8k", 1)}
    assert rows["1k", 1]["ratio"] == {"graph_ms": 2.0, "eager_ms": 2.0}
    assert rows["1k", 1]["fastest"] == "flat"
    assert rows["1k", 1]["decodes"]["stock b"]["graph_ms"] == 2048
    assert not rows["8k", 1]["decodes"]["stock a"]["right"]
    assert rows["8k", 1]["decodes"]["stock a"]["eager_error"] < 0.01
    assert rows["8k", 1]["ratio"]["graph_ms"] == 4.0  # to b, since a is wrong
    assert rows["1k", 2]["decodes"]["stock b"]["failure"] == "RuntimeError: out of resource: shared memory"
    assert rows["1k", 2]["decodes"]["stock b"]["graph_ms"] is None
    assert {(each["context"], each["batch"]) for each in answer["left_out"]} == {("8k", 2), ("128k", 1), ("128k", 2)}
    assert all("of the free memory" in each["reason"] for each in answer["left_out"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | stock a | stock b | flat | ratio | GB/s | of copy | fastest |"
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:3] == ["3 heads, batch 1, 1k", "1024.000 / 1024.000", "2048.000 / 2048.000"]
    # 1024 tokens, three queries and three results are 1.186 MB, in 512 ms; copying is said to move 10 MB/s.
    assert cells[3:] == ["512.000 / 512.000", "2.00 / 2.00", "0", "23%", "flat"]
    assert {line.count("|") for line in lines} == {9}
    said = run.summary()
    assert "With CUDA graphs: geometric mean 2.52, worst 2.00 (3 heads, batch 1, 1k)." in said  # of 2, 2 and 4
    assert "WRONG or failed: 3 heads, batch 1, 8k." in said
    assert any(row.wrong for row in run.rows)


def test_it_stops_when_the_seconds_are_over_or_the_memory(
    benchmark: ModuleType, clock: Clock, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(batch: Any, *_: Any, **__: Any) -> dict[str, Callable[[], None]]:
        if len(batch.lengths) == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        run.seconds = 0.0
        return {"flat": clock.work(1.0, lambda: batch.out.copy_(batch.reference()))}

    monkeypatch.setattr(benchmark, "decodes_of", too_much)
    monkeypatch.setattr(benchmark, "BATCHES", (2, 1))
    run.measure_all()
    assert [str(row.shape) for row in run.rows] == ["3 heads, batch 1, 1k"]
    reasons = {str(shape): reason for shape, reason in run.left_out.items()}
    assert reasons["3 heads, batch 2, 1k"] == "the partial results do not fit beside the KV"
    assert reasons["3 heads, batch 1, 8k"] == "the 0 s were over"


def test_times_are_medians_taken_in_turns_after_a_flush(benchmark: ModuleType, clock: Clock) -> None:
    order: list[str] = []
    spent = {"a": iter([9.0, 9.0, 1.0, 50.0, *[3.0] * 100]), "b": iter([7.0] * 200)}

    def run(name: str) -> Callable[[], None]:
        def once() -> None:
            order.append(name)
            clock.ms += next(spent[name])

        return once

    flush = SimpleNamespace(zero_=lambda: (order.append("flush"), setattr(clock, "ms", clock.ms + 1000.0)))
    assert benchmark.timed({"a": run("a"), "b": run("b")}, flush) == {"a": 3.0, "b": 7.0}
    assert order == ["flush", "a", "flush", "b"] * (2 + 15)  # 250 ms by 16 a round
