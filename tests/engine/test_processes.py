"""Every process that the engine starts is armed by itself: data-parallel controller, schedulers, detokenizer.

They are spawned here, as SGLang does it, so none inherits anything from the process that starts the engine.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_pp_mla.rehearsal import EngineAnswer, engine, find_sglang
from sglang_pp_mla.rehearsal.environment import wants_cpu_sets
from tests.e2e.compare import assert_same
from tests.e2e.witness import NEW_TOKENS, PROMPTS, Witness, show
from tests.engine.installation import add_witnesses

pytestmark = [pytest.mark.engine, pytest.mark.longest]  # seven processes that import SGLang

REPLICAS, STAGES = 2, 2


class Run:
    """What two pipelines of two stages answered, logged, and said of their processes."""

    def __init__(self, answers: list[tuple[EngineAnswer, ...]], log: str, processes: dict[str, Any]) -> None:
        self.answers = answers
        self.log = log
        self.processes = processes


@pytest.fixture(scope="module")
def run(known_answers: Witness, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("witnesses")
    env = add_witnesses(folder)
    if wants_cpu_sets(find_sglang().folder):
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * REPLICAS * STAGES)
    with engine(
        known_answers.folder,
        pp_size=STAGES,
        partition="4,3",
        # With its tokenizer the engine starts a detokenizer, too.
        engine_args={"dp_size": REPLICAS, "skip_tokenizer_init": False},
        env=env,
        timeout_s=1800,
        on_progress=show,
    ) as running:
        # One after the other, they go to the replicas in turn.
        answers = [running.generate(PROMPTS[:3], max_new_tokens=NEW_TOKENS) for _ in range(REPLICAS)]
        (folder / "report").touch()
        titles = reported(folder, running.pids())
        return Run(answers, running.log, titles)


def reported(folder: Path, pids: list[int]) -> dict[str, Any]:
    """States of the fixes by SGLang's title for a process, from those processes that have one."""
    deadline = time.monotonic() + 30
    while True:
        reports = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        titled = {report["title"]: report["states"] for report in reports if "sglang::" in report["title"]}
        if len(titled) >= 2 + REPLICAS * STAGES or time.monotonic() > deadline:
            return titled
        time.sleep(0.2)


def test_both_replicas_answer_as_the_reference(run: Run, known_answers: Witness) -> None:
    for answers in run.answers:
        assert_same(answers, known_answers.of(PROMPTS[:3]))


def test_each_scheduler_builds_triton_pp(run: Run) -> None:
    built = re.findall(r" (DP\d) (PP\d)\] triton_pp PP\d of 2", run.log)
    assert sorted(built) == [("DP0", "PP0"), ("DP0", "PP1"), ("DP1", "PP0"), ("DP1", "PP1")]


@pytest.mark.parametrize("title", ["sglang::data_parallel_controller", "sglang::detokenizer", "sglang::scheduler"])
def test_it_is_armed(run: Run, title: str) -> None:
    states = [states for name, states in run.processes.items() if title in name]
    assert len(states) == (REPLICAS * STAGES if title == "sglang::scheduler" else 1)
    for each in states:
        assert each is not None, f"{title} was never armed"
        # The record of arguments is unpickled everywhere; backends are built in schedulers.
        assert each["triton-pp"] == "applied"
        assert each["buffer-probe"] in (("applied",) if title == "sglang::scheduler" else ("armed", "applied"))
