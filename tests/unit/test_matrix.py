"""tools/matrix and tools/overlay: what they know of each release, and what they make of an engine's run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sglang_pp_mla.rehearsal import EngineAnswer, EngineRun
from sglang_pp_mla.rehearsal.reference import Answer
from sglang_pp_mla.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]
LOCKED = {path.stem.removeprefix("sglang-") for path in (ROOT / "tools" / "locks").glob("sglang-*.txt")}
WANTED = [Answer((3, 4), (-1.0, -2.0))]
RIGHT = (EngineAnswer((3, 4), (-1.0, -2.000004), 0),)
BUILT = "\n".join(f"[2026-01-01 00:00:00 PP{rank}] triton_pp PP{rank} of 4 (layers …)" for rank in range(4))
DEATH = """Traceback (most recent call last):
  File ".../model_runner.py", line 2080, in init_attention_backend
    self.attn_backend = self._get_attention_backend()
  File ".../memory_pool.py", line 1611, in get_value_buffer
    return self.kv_buffer[layer_id - self.start_layer][..., : self.kv_lora_rank]
IndexError: list index out of range
"""


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader(f"tools_{name}", str(ROOT / "tools" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with an empty file of results."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    module = loaded("matrix", monkeypatch)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "data" / "matrix.json")
    return module


def run(answers: tuple[EngineAnswer, ...] = (), log: str = BUILT, **failure: Any) -> EngineRun:
    how = {"failed": False, "timed_out": False, "error": "", "rank": None, "traceback": ""} | failure
    return EngineRun(1.0, answers, 1.0, log=log, **how)


class TestReleases:
    def test_each_has_a_lock_of_its_own_or_lies_over_one_that_has(self, matrix: ModuleType) -> None:
        for release in matrix.RELEASES:
            assert (release in LOCKED) != (release in matrix.OVERLAYS), release
        for release, (base, _) in matrix.OVERLAYS.items():
            assert base in LOCKED, release

    def test_they_are_in_order_and_span_what_is_supported(self, matrix: ModuleType) -> None:
        assert [release for release in RELEASES if release in matrix.RELEASES] == list(matrix.RELEASES)
        assert {"0.5.6.post2", "0.5.10.post1", RELEASES[-1]} <= set(matrix.RELEASES)

    def test_pins_are_exact_and_are_what_the_base_has_otherwise(self, matrix: ModuleType) -> None:
        for release, (base, pins) in matrix.OVERLAYS.items():
            lock = (ROOT / "tools" / "locks" / f"sglang-{base}.txt").read_text().splitlines()
            for requirement in map(Requirement, pins):
                (specifier,) = requirement.specifier
                assert specifier.operator == "==", (release, str(requirement))
                (has,) = (line for line in lock if line.startswith(f"{requirement.name}=="))
                assert Version(has.partition("==")[2]) != Version(specifier.version), (release, has)

    def test_the_reader_is_told_how_each_was_had(self, matrix: ModuleType) -> None:
        assert matrix.how("0.5.11") == "an environment of its own"
        assert matrix.how("0.5.20") == "its wheel over the 0.5.23 environment"
        assert matrix.how("0.5.16") == (
            "its wheel over the 0.5.23 environment with transformers==5.12.1, tokenizers==0.22.2"
        )


class TestJudgement:
    def test_right_answers(self, matrix: ModuleType) -> None:
        outcome, detail = matrix.judge(run(RIGHT), WANTED, "triton_pp")
        assert (outcome, detail) == ("answers", "1 prompts equal, largest log-probability difference 4e-06")

    @pytest.mark.parametrize(
        "answer", [EngineAnswer((3, 5), (-1.0, -2.0), 0), EngineAnswer((3, 4), (-1.0, -2.1), 0)], ids=["token", "score"]
    )
    def test_other_answers(self, matrix: ModuleType, answer: EngineAnswer) -> None:
        assert matrix.judge(run((answer,)), WANTED, "triton")[0] == "wrong"

    def test_stock_triton_in_the_place_of_triton_pp_is_no_success(self, matrix: ModuleType) -> None:
        log = BUILT.replace("triton_pp PP2", "something else")
        assert matrix.judge(run(RIGHT, log), WANTED, "triton_pp") == (
            "wrong",
            "answers, but triton_pp was not built on PP2",
        )
        assert matrix.judge(run(RIGHT, log), WANTED, "triton")[0] == "answers"

    def test_a_death_is_told_by_exception_place_and_rank(self, matrix: ModuleType) -> None:
        dead = run(failed=True, rank=2, traceback=DEATH, error="The engine died.")
        assert matrix.judge(dead, WANTED, "triton") == ("died", "IndexError in get_value_buffer on PP2")
        assert matrix.judge(run(failed=True, error="No traceback."), WANTED, "triton") == ("died", "No traceback.")

    def test_a_missing_library_of_the_cpu_path_is_not_a_death(self, matrix: ModuleType) -> None:
        traceback = DEATH.replace("IndexError: list index out of range", "ModuleNotFoundError: No module named 'vllm'")
        assert matrix.judge(run(failed=True, traceback=traceback), WANTED, "triton") == (
            "no engine",
            "ModuleNotFoundError: No module named 'vllm'",
        )

    def test_too_slow(self, matrix: ModuleType) -> None:
        slow = run(failed=True, timed_out=True, traceback=DEATH, error="It took longer.")
        assert matrix.judge(slow, WANTED, "triton") == ("timed out", "It took longer.")


class TestResults:
    def test_a_part_is_missing_until_it_has_been_run(self, matrix: ModuleType) -> None:
        done = {"outcome": "answers", "detail": "", "seconds": 1}
        failed = {"outcome": "not run", "detail": "no disk", "seconds": 0}
        assert matrix.missing_parts("0.5.11", {}) == ["repro", "stock", "triton_pp"]
        results = {"0.5.11": {"repro": {"triton": 1}, "stock": failed, "triton_pp": done}}
        assert matrix.missing_parts("0.5.11", results) == ["stock"]
        assert matrix.missing_parts("0.5.3", {}) == ["repro"]

    @pytest.mark.parametrize(
        ("outcome", "status", "good"),
        [("answers", 0, True), ("builds", 0, True), ("wrong", 0, False), ("answers", 1, False)],
    )
    def test_only_what_this_package_does_decides(
        self, matrix: ModuleType, outcome: str, status: int, good: bool
    ) -> None:
        repro = {"triton": 1, "triton_pp_active": status}
        results = {"0.5.11": {"repro": repro, "stock": {"outcome": "died"}, "triton_pp": {"outcome": outcome}}}
        assert matrix.is_good("0.5.11", results) is good
        assert matrix.is_good("0.5.3", {"0.5.3": {"repro": repro}}) is (status == 0)
        assert not matrix.is_good("0.5.23", results)
        assert not matrix.is_good("0.5.11", {"0.5.11": {"repro": repro, "triton_pp": {"outcome": outcome}}})

    def test_they_are_kept_in_the_order_of_releases_and_read_back(self, matrix: ModuleType) -> None:
        results = {release: {"how": release} for release in reversed(matrix.RELEASES)}
        matrix.save(results)
        assert list(json.loads(matrix.RESULTS.read_text())) == list(matrix.RELEASES)
        assert matrix.load() == results

    def test_what_cannot_be_had_is_recorded_and_tried_again(
        self, matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(release: str) -> Any:
            raise subprocess.CalledProcessError(2, ["tools/env", release])

        monkeypatch.setattr(matrix, "find", refuse)
        monkeypatch.setattr(sys, "argv", ["tools/matrix", "0.5.11"])
        assert matrix.main() == 1
        (kept,) = matrix.load().values()
        assert {kept[part]["outcome"] for part in matrix.PARTS} == {"not run"}
        assert "tools/env" in kept["stock"]["detail"]
        assert matrix.missing_parts("0.5.11", matrix.load()) == list(matrix.PARTS)

    def test_what_is_measured_is_not_run_again(self, matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        answered = {"outcome": "answers", "detail": "", "seconds": 1}
        matrix.save({"0.5.11": {"repro": {"triton": 1}, "stock": answered, "triton_pp": answered}})
        asked: list[str] = []

        def refuse(release: str) -> Any:
            asked.append(release)
            raise RuntimeError("not now")

        monkeypatch.setattr(matrix, "find", refuse)
        monkeypatch.setattr(sys, "argv", ["tools/matrix", "0.5.11", "0.5.23"])
        matrix.main()
        assert asked == ["0.5.23"]
        monkeypatch.setattr(sys, "argv", ["tools/matrix", "--again", "0.5.11"])
        matrix.main()
        assert asked == ["0.5.23", "0.5.11"]

    def test_an_unknown_release_is_refused(
        self, matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["tools/matrix", "0.4.9"])
        with pytest.raises(SystemExit) as stop:
            matrix.main()
        assert stop.value.code == 2
        assert "'0.4.9' is not one of 0.5.3" in capsys.readouterr().err
