"""Rehearsals with the real engine: how they fail, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal import FORK, Progress, run_engine, shrink
from sglang_pp_mla.rehearsal.processes import MARKER, marked

pytestmark = pytest.mark.engine

DUMMY = {"load_format": "dummy"}


@pytest.fixture(scope="module")
def seven_layers(kimi: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seven")
    (folder / "config.json").write_text(json.dumps(shrink(kimi, layers=7)))
    return folder


def identities() -> set[str]:
    """Rehearsals that have a living process on this machine."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            # Other tests may hold rehearsals of their own at the same time.
            if any(one.startswith(b"PYTEST_CURRENT_TEST=") and b"test_rehearsal_engine" in one for one in variables):
                found |= {one.decode() for one in variables if one.startswith(f"{MARKER}=".encode())}
    return found


def test_a_stage_that_dies_gives_its_traceback(seven_layers: Path) -> None:
    """No weights in the folder: every release's loader raises in the scheduler."""
    before = identities()
    run = run_engine(seven_layers, [[1, 2]], pp_size=1, attention_backend="triton", timeout_s=500, env=FORK)
    assert run.failed
    assert not run.timed_out
    assert run.ready_s is None
    assert "run_scheduler_process" in run.traceback
    assert "model weights" in run.error
    assert identities() <= before


def test_the_stage_1_crash_with_the_package_off(seven_layers: Path, sglang_release: Version) -> None:
    """Layer 0 asked of the stage that starts at 4 and holds 3; and switching off reaches the stages."""
    steps: list[Progress] = []
    run = run_engine(
        seven_layers,
        [[1, 2, 3]],
        pp_size=2,
        partition="4,3",
        attention_backend="triton",
        timeout_s=500,
        engine_args=DUMMY,
        env={"SGLANG_PP_MLA_DISABLE": "1"},
        max_new_tokens=2,
        on_progress=steps.append,
    )
    assert {step.rank for step in steps if step.kind == "stage"} == {0, 1}
    if sglang_release >= Version("0.5.18"):
        assert not run.failed, run.error
        assert len(run.answers[0].tokens) == 2
        return
    assert run.failed
    assert run.rank == 1
    assert "get_value_buffer" in run.traceback
    assert run.traceback.endswith("IndexError: list index out of range")
    assert "PP1 raised IndexError" in run.error


def test_triton_pp_is_refused_with_the_package_off(seven_layers: Path) -> None:
    run = run_engine(
        seven_layers,
        [[1]],
        attention_backend="triton_pp",
        timeout_s=500,
        engine_args=DUMMY,
        env={**FORK, "SGLANG_PP_MLA_DISABLE": "1"},
    )
    assert run.failed
    assert "triton_pp" in run.traceback + run.log


def test_too_little_time_ends_cleanly(seven_layers: Path) -> None:
    before = identities()
    run = run_engine(seven_layers, [[1]], pp_size=2, attention_backend="triton", timeout_s=12, engine_args=DUMMY)
    assert run.failed
    assert run.timed_out
    assert "12 s" in run.error
    assert identities() <= before


def test_a_caller_killed_outright_leaves_no_stage(seven_layers: Path) -> None:
    script = f"""
from sglang_pp_mla.rehearsal import run_engine
def show(progress):
    if progress.kind == "stage":
        import os
        print("stage", flush=True)
run_engine({str(seven_layers)!r}, [[1]], pp_size=2, attention_backend="triton",
           engine_args={DUMMY!r}, timeout_s=500, on_progress=show)
"""
    before = identities()
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "stage\n"
    ours = identities() - before
    assert len(ours) == 1
    identity = next(iter(ours)).partition("=")[2]
    assert len(marked(identity)) >= 4
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    deadline = time.monotonic() + 30
    while marked(identity) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(identity) == []
