"""What this package costs, against stock in the same run: start-up, arming, building a backend, a decode step.

    python benchmarks/overhead.py [--json FILE] [--no-engine]

Run it with an interpreter that has SGLang and this package (`make bench`). Each pair is measured in turns,
so that what else the machine does falls on both; the figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import sglang_pp_mla
from sglang_pp_mla.probes import stage_local_probes
from sglang_pp_mla.rehearsal import FORK, engine, shrink
from sglang_pp_mla.rehearsal.shrink import kimi_k26

PACKAGE = Path(sglang_pp_mla.__file__).parent
# What SGLang imports of the standard library in any case, and wrapt before it.
STANDARD = "import asyncio, dataclasses, importlib.metadata, inspect, logging, pathlib, threading"
ARM = """
import time
began = time.perf_counter()
from sglang_pp_mla.wiring import arm
arm()
print(time.perf_counter() - began)
"""
PROMPT = list(range(3, 35))
TOKENS = 3


def in_turns(one: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each, measured alternately after one round that does not count."""
    pairs = [(one(), other()) for _ in range(rounds + 1)][1:]
    return [first for first, _ in pairs], [second for _, second in pairs]


def interpreter_start(rounds: int) -> tuple[list[float], list[float]]:
    """``python -c pass`` in two bare environments, one of which has this package and its ``.pth``."""
    with tempfile.TemporaryDirectory() as folder:
        pythons = []
        for name in ("without", "with"):
            venv.create(Path(folder, name), symlinks=True)
            pythons.append(str(Path(folder, name, "bin", "python")))
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.run([pythons[1], "-c", purelib], capture_output=True, text=True, check=True).stdout.strip()
        shutil.copytree(PACKAGE, Path(site, "sglang_pp_mla"))
        shutil.copy(PACKAGE.parent / "sglang_pp_mla.pth", site)

        def start(python: str) -> Callable[[], float]:
            def run() -> float:
                began = time.perf_counter()
                subprocess.run([python, "-c", "pass"], check=True)
                return time.perf_counter() - began

            return run

        return in_turns(start(pythons[0]), start(pythons[1]), rounds)


def arming(rounds: int, before: str) -> list[float]:
    """The first ``arm()`` of a fresh interpreter, its imports included, after some others."""
    command = [sys.executable, "-c", f"{before}\n{ARM}"]
    return [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds + 1)
    ][1:]


def backend_construction(rounds: int) -> tuple[list[float], list[float]]:
    """Stage 1 of 2 of an MLA model, real pool and real backend: the stock class, and ours with its probes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "upstream_repro" / "buffer-probe"))
    import repro

    repro.run_without_gpu("triton")
    logging.getLogger("sglang_pp_mla").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        release = repro.Release(Path(folder), "triton", "mla")
        server_args, model_config = release.configure(layers=7)
        from sglang.srt.distributed.parallel_state import get_pp_group
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        pool = release.pool(model_config, 3, 7)  # starts within its own count, so that stock does not die
        runner = release.runner(server_args, model_config, pool)
        with contextlib.suppress(AttributeError):  # a property in newer releases
            runner.pp_group = get_pp_group()

        def timed(build: Callable[[Any], Any]) -> Callable[[], float]:
            def run() -> float:
                began = time.perf_counter()
                build(runner)
                return time.perf_counter() - began

            return run

        def ours(runner: Any) -> Any:
            with stage_local_probes(pool):
                return ATTENTION_BACKENDS["triton_pp"](runner)

        return in_turns(timed(TritonAttnBackend), timed(ours), rounds)


def decode_step(rounds: int) -> tuple[list[float], list[float]]:
    """One generated token of a 7-layer MLA model on the CPU engine: stock ``triton``, and ``triton_pp``."""
    arguments = {"load_format": "dummy", "sleep_on_idle": True, "disable_radix_cache": True}
    options: dict[str, Any] = {"engine_args": arguments, "timeout_s": 1800}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shrink(kimi_k26(), layers=7)))
        with (
            engine(folder, attention_backend="triton", env={**FORK, "SGLANG_PP_MLA_DISABLE": "1"}, **options) as stock,
            engine(folder, attention_backend="triton_pp", env=FORK, **options) as ours,
        ):

            def per_token(session: Any) -> Callable[[], float]:
                def run() -> float:
                    session.generate([PROMPT], max_new_tokens=1)
                    first = session.answers_s
                    session.generate([PROMPT], max_new_tokens=1 + TOKENS)
                    return float(session.answers_s - first) / TOKENS

                return run

            return in_turns(per_token(stock), per_token(ours), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--no-engine", action="store_true", help="leave out the decode step, which takes minutes")
    options = parser.parse_args()
    console = Console(stderr=True)
    results: dict[str, dict[str, float]] = {}

    def pair(name: str, measured: tuple[list[float], list[float]]) -> None:
        stock, ours = (statistics.median(side) for side in measured)
        difference = statistics.median(b - a for a, b in zip(*measured, strict=True))
        results[name] = {"stock_ms": stock * 1e3, "ours_ms": ours * 1e3, "ratio": ours / stock}
        results[name]["difference_ms"] = difference * 1e3

    with console.status("starting interpreters"):
        pair("interpreter start", interpreter_start(60))
    with console.status("arming"):
        for name, before in (("arm() from nothing", ""), ("arm() after SGLang's standard library", STANDARD)):
            results[name] = {"ours_ms": statistics.median(arming(15, before)) * 1e3}
    with console.status("building backends"):
        pair("backend of stage 1 of 2", backend_construction(60))
    if not options.no_engine:
        with console.status("two engines, token by token"):
            pair("decode step, 7 layers, PP1", decode_step(3))
    show(results)
    if options.json:
        machine = {"python": platform.python_version(), "sglang": version("sglang"), "processor": platform.machine()}
        options.json.write_text(json.dumps({"machine": machine, "figures": results}, indent=1))


def show(results: dict[str, dict[str, float]]) -> None:
    table = Table("", "stock, ms", "ours, ms", "difference, ms", "ratio", title=f"SGLang {version('sglang')}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in results.items():
        cells = [
            f"{figures[key]:.3f}" if key in figures else "" for key in ("stock_ms", "ours_ms", "difference_ms", "ratio")
        ]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
