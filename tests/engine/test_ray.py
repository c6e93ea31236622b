"""Under ``--use-ray`` the stages are Ray actors, which SGLang's plugins do not reach by themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal import engine, run_engine
from tests.e2e.compare import assert_same
from tests.e2e.witness import NEW_TOKENS, PROMPTS, Witness, show
from tests.engine.installation import ENTRY_POINTS_ONLY, add_witnesses, loaded_the_plugin

pytestmark = [pytest.mark.engine, pytest.mark.longest]  # a Ray of its own may miss its own deadlines on two cores

FIXED_UPSTREAM = Version("0.5.18")
RAY = {"use_ray": True}


def actors(log: str) -> set[int]:
    """Pids of the scheduler actors that wrote something."""
    return {int(pid) for pid in re.findall(r"\(SchedulerActor\(?[^)]* ?pid=(\d+)", log)}


def test_a_plugin_without_a_pth_is_absent_in_the_actors(
    known_answers: Witness, sglang_release: Version, tmp_path: Path
) -> None:
    """The crash comes back there: the entry point arms the engine's process only."""
    if sglang_release >= FIXED_UPSTREAM:
        pytest.skip(f"SGLang {sglang_release} has upstream's own fix of the probe (0.5.18)")
    run = run_engine(
        known_answers.folder,
        PROMPTS[:1],
        pp_size=2,
        partition="4,3",
        attention_backend="triton",
        engine_args=RAY,
        env={**add_witnesses(tmp_path), **ENTRY_POINTS_ONLY, "SGLANG_PP_MLA_DISABLE": "ray-plugins"},
        on_progress=show,
    )
    assert run.failed
    assert "SchedulerActor.__init__()" in run.log
    assert "get_value_buffer" in run.log
    assert "IndexError: list index out of range" in run.log
    assert loaded_the_plugin(tmp_path)
    assert actors(run.log)
    assert not actors(run.log) & loaded_the_plugin(tmp_path)


def test_triton_pp_is_what_the_actors_build(known_answers: Witness, tmp_path: Path) -> None:
    with engine(
        known_answers.folder,
        pp_size=2,
        partition="4,3",
        engine_args=RAY,
        env=add_witnesses(tmp_path),
        on_progress=show,
    ) as running:
        answers = running.generate(PROMPTS[:3], max_new_tokens=NEW_TOKENS)
        assert_same(answers, known_answers.of(PROMPTS[:3]))
        built = re.findall(r"pid=(\d+)\).*triton_pp (PP\d of 2 \(layers \d-\d\))", running.log)
        assert {stage for _, stage in built} == {"PP0 of 2 (layers 0-3)", "PP1 of 2 (layers 4-6)"}
        assert len(actors(running.log)) == 2
        # ray-plugins: other packages' plugins are there as well.
        assert {int(pid) for pid, _ in built} <= loaded_the_plugin(tmp_path)
