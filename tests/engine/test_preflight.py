"""What preflight asks the installed SGLang itself: its argument check, its pools, and its engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.preflight import BUILT_IN, Check, Deployment, Verdict, run
from sglang_pp_mla.rehearsal import Progress, find_sglang

DATA = Path(__file__).parents[1] / "data"
ASKS_SGLANG = [check for check in BUILT_IN if check.id in ("arguments", "buffer-probe")]


def of(deployment: Deployment, checks: list[Check], status: str, name: str) -> list[Verdict]:
    if not deployment.verdicts:
        run(deployment, checks)
    return [verdict for verdict in deployment.verdicts if (verdict.id, verdict.status) == (name, status)]


@pytest.fixture(scope="module")
def stock(kimi: dict[str, Any], sglang_release: Version) -> Deployment:
    """The incident, with this package switched off, on a backend that this release has the fault in."""
    deployment = Deployment(
        kimi,
        8,
        backend="triton" if sglang_release < Version("0.5.18") else "wave",
        sglang_args="--speculative-algorithm NEXTN",
        installation=find_sglang(),
        disabled="1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PP_MLA_DISABLE", "1")
        run(deployment, ASKS_SGLANG)
    return deployment


def test_the_stages_that_crash_and_those_that_wrap_are_told_apart(stock: Deployment) -> None:
    """A list of n buffers indexed by -start, as Python does it."""
    crash, wrap = [], []
    for rank, stage in enumerate(stock.stages):
        buffers = list(range(stage.start_layer, stage.end_layer))
        try:
            got = buffers[0 - stage.start_layer]
        except IndexError:
            crash.append(rank)
        else:
            if got != 0:
                wrap.append((rank, got))
    assert (crash, wrap) == ([2, 3, 4, 5, 6, 7], [(1, 7)])  # 61 layers over 8, in SGLang's own split
    silent, loud = of(stock, ASKS_SGLANG, "fail", "buffer-probe")
    assert (loud.ranks, silent.ranks) == (tuple(crash), tuple(rank for rank, _ in wrap))
    assert "IndexError" in loud.summary
    assert "silently: PP1 layer 7" in silent.summary
    assert "SGLANG_PP_MLA_DISABLE" in loud.remedy
    assert all(outcome.repaired for outcome in stock.examination.probes)  # by the fix, were it on


def test_sglang_says_itself_why_it_refuses(stock: Deployment, sglang_release: Version) -> None:
    """Speculative decoding under pipeline parallelism, in the release's own words."""
    (refused,) = of(stock, ASKS_SGLANG, "fail", "arguments")
    assert refused.summary.startswith("SGLang refuses: ")
    words = {
        "0.5.11": "Pipeline parallelism is not compatible with overlap schedule, speculative decoding",
        "0.5.23": "PP + speculative decoding (MTP) is only supported on prefill nodes",
    }
    assert words.get(str(sglang_release), "speculative decoding") in refused.summary


def test_the_command_finds_the_incident_repaired(kimi: dict[str, Any], sglang_release: Version, tmp_path: Path) -> None:
    """The configuration as the model's makers publish it, alone: a wrapper that names code which is not here."""
    model = tmp_path / "config.json"
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "model_type": "kimi_k25",
        "text_config": kimi | {"model_type": "kimi_k2"},
        "vision_config": {},
    }
    model.write_text(json.dumps(wrapper))
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_PP_MLA_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-m", "sglang_pp_mla.cli", "preflight", tmp_path, "--pp-size", "8", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert Version(report["sglang"]) == sglang_release
    assert {check["status"] for check in report["checks"] if check["id"] == "arguments"} == {"pass"}
    probes = [check for check in report["checks"] if check["id"] == "buffer-probe"]
    assert {check["status"] for check in probes} == {"pass"}
    if sglang_release < Version("0.5.18"):
        assert [check["rank"] for check in probes] == [1, 2, 3, 4, 5, 6, 7]
        assert all("repaired by buffer-probe" in check["summary"] for check in probes)
    else:
        assert [check["rank"] for check in probes] == [None]


@pytest.mark.release("0.5.23")
def test_a_model_without_mla_is_repaired_too(sglang_release: Version) -> None:
    """AITER asks a pool that does not know its own value width, which the pool without MLA does from 0.5.18 on."""
    config = json.loads((DATA / "qwen3-30b-a3b.json").read_text())
    backend = "aiter" if sglang_release < Version("0.5.18") else "wave"
    deployment = Deployment(config, 2, partition="30,18", backend=backend, installation=find_sglang())
    (verdict,) = of(deployment, ASKS_SGLANG, "pass", "buffer-probe")
    assert verdict.ranks == (1,)
    assert "repaired by buffer-probe" in verdict.summary
    assert [outcome.kind for outcome in deployment.examination.probes] == ["own", "crash"]


@pytest.mark.engine
@pytest.mark.release("0.5.23")
def test_the_rehearsal_compares_two_stages_with_one(kimi: dict[str, Any]) -> None:
    heard: list[tuple[int, Progress]] = []
    deployment = Deployment(
        kimi | {"num_hidden_layers": 4},
        2,
        partition="3,1",
        rehearse=True,
        installation=find_sglang(),
        on_progress=lambda pp_size, progress: heard.append((pp_size, progress)),
    )
    assert run(deployment, [check for check in BUILT_IN if check.id == "rehearsal"]), deployment.verdicts
    (verdict,) = deployment.verdicts
    assert verdict.status == "pass"
    rehearsal = deployment.rehearsal
    assert rehearsal is not None
    assert rehearsal.identical
    assert rehearsal.tokens == rehearsal.tokens_pp1
    assert [len(tokens) for tokens in rehearsal.tokens] == [2, 2]
    steps = {(size, each.rank) for size, each in heard if each.kind == "stage"}
    assert {(2, 0), (2, 1), (1, 0)} <= steps
