"""The checks that run no SGLang, on the installed release's sources; and the command where there is no SGLang."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sglang_pp_mla import planner, preflight
from sglang_pp_mla.backend_probes import backends, probes_of
from sglang_pp_mla.fixes import buffer_probe, mla_geometry
from sglang_pp_mla.geometry import Model
from sglang_pp_mla.kernelfit import gpu_named
from sglang_pp_mla.preflight import BUILT_IN, Check, Deployment, Missing, Verdict, _as_reported, as_json, run
from sglang_pp_mla.rehearsal import EngineAnswer, EngineRun, Installation, find_sglang
from sglang_pp_mla.rehearsal.examination import has_its_code
from sglang_pp_mla.releases import RELEASES
from sglang_pp_mla.weights import weights_of

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
SOURCES_ONLY = [check for check in BUILT_IN if check.order < 30]


@pytest.fixture(scope="module")
def installation() -> Installation:
    return find_sglang()


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    path = DATA / name
    return json.loads((path / "config.json" if path.is_dir() else path).read_text()) | changes


def judged(deployment: Deployment, checks: Iterable[Check] = SOURCES_ONLY) -> dict[str, Verdict]:
    run(deployment, list(checks))
    return {verdict.id: verdict for verdict in deployment.verdicts}


# The configuration and the split


def test_a_good_deployment_passes_what_is_read(kimi: dict[str, Any], installation: Installation) -> None:
    deployment = Deployment(kimi, 8, gpu=gpu_named("RTX PRO 6000"), installation=installation)
    assert run(deployment, SOURCES_ONLY)
    assert [verdict.id for verdict in deployment.verdicts] == [check.id for check in SOURCES_ONLY]
    assert {verdict.status for verdict in deployment.verdicts} == {"pass"}
    assert [len(stage.layers) for stage in deployment.stages] == [7, 7, 7, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("partition", "says", "remedy"),
    [
        ("7,7,7,8,8,8,8,7", "adds up to 60 layers but the model has 61", "rank 7, by +1"),
        ("8,8,8,8,8,8,13", "has 7 stages but the pipeline has 8", "Write 8 layer counts"),
        ("61,0,0,0,0,0,0,0", "gives rank 1 0 layers", "at least one"),
        ("a,b", "is not a list of layer counts", "8 in all"),
    ],
)
def test_a_split_that_cannot_be_is_a_failure_with_its_remedy(
    kimi: dict[str, Any], installation: Installation, partition: str, says: str, remedy: str
) -> None:
    deployment = Deployment(kimi, 8, partition=partition, installation=installation)
    verdicts = judged(deployment)
    assert verdicts["partition"].status == "fail"
    assert says in verdicts["partition"].summary
    assert remedy in verdicts["partition"].remedy
    assert verdicts["boundaries"].status == "skip"
    assert as_json(deployment)["stages"] == []


def test_more_stages_than_layers_and_heads_that_do_not_divide(kimi: dict[str, Any]) -> None:
    verdicts = judged(Deployment(kimi, 62, tp_size=3))
    assert verdicts["partition"].status == "fail"
    assert "at most 61" in verdicts["partition"].remedy
    assert verdicts["heads"].status == "fail"
    assert verdicts["heads"].remedy == "Use a --tp-size of 1, 2, 4, 8, 16, 32 or 64."


def test_a_configuration_without_an_mla_width_names_it(kimi: dict[str, Any]) -> None:
    broken = {key: value for key, value in kimi.items() if key != "qk_nope_head_dim"}
    deployment = Deployment(broken, 8)
    verdicts = judged(deployment)
    assert verdicts["configuration"].status == "fail"
    assert "qk_nope_head_dim" in verdicts["configuration"].summary
    assert {verdict.status for verdict in deployment.verdicts[1:]} == {"skip"}


def test_the_oldest_releases_give_the_last_stage_the_remainder(kimi: dict[str, Any]) -> None:
    old = Deployment(kimi, 8, installation=Installation(sys.executable, "0.5.5.post3", Path("/nowhere")))
    assert [len(stage.layers) for stage in old.stages] == [7, 7, 7, 7, 7, 7, 7, 12]


# What the GPUs hold


def memory_of(deployment: Deployment) -> Verdict:
    return judged(deployment, [check for check in BUILT_IN if check.id == "memory"])["memory"]


def test_the_room_for_tokens_is_what_plan_says_of_the_same_split(kimi: dict[str, Any]) -> None:
    gpu, partition = gpu_named("RTX PRO 6000"), "7,7,8,8,8,8,8,7"
    verdict = memory_of(Deployment(kimi, 8, partition=partition, gpu=gpu))
    budget = planner.budget_of(
        model := Model.from_config(kimi),
        weights_of(model, None, pp_size=8),
        planner.Deployment((96 * planner.GIB,) * 8, Version(RELEASES[-1])),
    )
    tokens = budget.tokens([int(count) for count in partition.split(",")])
    assert tokens > 0
    assert verdict == Verdict(
        "memory", "pass", f"{tokens:,} KV tokens on RTX PRO 6000 of 96 GB, weights by the configuration"
    )
    longer = memory_of(Deployment(kimi, 8, partition=partition, gpu=gpu, sglang_args=f"--context-length {tokens + 1}"))
    assert (longer.status, longer.summary) == ("warn", f"{verdict.summary}: fewer than one request of {tokens + 1:,}")


def test_a_stage_too_heavy_for_its_gpu_is_a_failure_with_its_rank(kimi: dict[str, Any]) -> None:
    verdict = memory_of(Deployment(kimi, 8, partition="12,7,7,7,7,7,7,7", gpu=gpu_named("RTX PRO 6000")))
    assert (verdict.status, verdict.ranks) == ("fail", (0,))
    assert re.fullmatch(r"Rank 0 of 8 lacks \d+\.\d GiB with this partition: layers 0-11 weigh .*", verdict.summary)
    assert verdict.remedy == "Have `sglang-pp-mla plan` find the partition, or use more or larger GPUs."


@pytest.mark.parametrize(
    ("gpu", "flags", "says"),
    [
        (None, "", "no GPU product is named"),
        ("sm_120", "", "no GPU product is named"),
        ("H200", "--mem-fraction-static half", "--mem-fraction-static half is not a number"),
        ("H200", "--page-size=x", "--page-size x is not a number"),
    ],
)
def test_room_that_cannot_be_told_is_not_judged(kimi: dict[str, Any], gpu: str | None, flags: str, says: str) -> None:
    verdict = memory_of(Deployment(kimi, 8, gpu=gpu_named(gpu) if gpu else None, sglang_args=flags))
    assert verdict.status == "skip"
    assert says in verdict.summary


# SGLang's sources


def test_a_model_that_takes_no_part_fails_unless_it_stays_on_one_stage(installation: Installation) -> None:
    config = config_of("minicpm3-4b.json")
    verdict = judged(Deployment(config, 2, tp_size=4, installation=installation))["architecture"]
    assert verdict.status == "fail"
    assert "MiniCPM3ForCausalLM" in verdict.summary
    assert "--pp-size 1 --tp-size 8" in verdict.remedy
    alone = judged(Deployment(config, 1, installation=installation))["architecture"]
    assert alone.status == "pass"
    assert "takes no part" in alone.summary


@pytest.mark.parametrize("freq", [2, 3, 4])
@pytest.mark.parametrize("partition", ["4,4,4", "5,3,4", "1,1,10", "6,5,1"])
def test_stages_within_shared_indices_fail_where_these_do_not_travel(
    installation: Installation, sglang_release: Version, partition: str, freq: int
) -> None:
    """The rule as SGLang has it: layer ``l`` takes the indices before it unless ``max(l - 1, 0)`` divides by freq."""
    counts = [int(count) for count in partition.split(",")]
    starts = [0, *accumulate(counts)][:-1]
    wrong = tuple(rank for rank, start in enumerate(starts) if max(start - 1, 0) % freq)
    config = config_of("models/sparse", num_hidden_layers=12, index_topk_freq=freq)
    verdict = judged(Deployment(config, 3, partition=partition, installation=installation))["boundaries"]
    assert verdict.ranks == wrong
    travels = sglang_release >= Version("0.5.14")
    assert verdict.status == ("fail" if wrong and not travels else "pass")


def test_the_geometry_that_dies_on_the_first_token_is_named(installation: Installation) -> None:
    config = config_of("mla-256x64.json")
    faulty = bool(mla_geometry.evidence(installation.folder))
    for backend, disabled, status in [
        ("triton", "mla-geometry", "fail" if faulty else "pass"),
        ("triton_pp", "", "pass"),
        ("triton", "buffer-probe", "pass"),
    ]:
        deployment = Deployment(config, 2, backend=backend, disabled=disabled, installation=installation)
        verdict = judged(deployment)["mla-geometry"]
        assert verdict.status == status
        assert ("repaired by mla-geometry" in verdict.summary) == (faulty and status == "pass")
    fits = judged(Deployment(config_of("deepseek-v3.json"), 2, disabled="1", installation=installation))
    assert fits["mla-geometry"].status == "pass"


def test_the_probes_read_are_those_that_the_fix_finds(installation: Installation) -> None:
    """Two readings of the same sources, a syntax tree and a pattern: every place, in a backend that has a name."""
    named = backends(installation.folder)
    assert {"triton", "aiter", "wave", "fa3"} <= named.keys()
    read = {probe.place for name in named for probe in probes_of(installation.folder, name) if not probe.own}
    matched = {place for place in buffer_probe.evidence(installation.folder) if "/attention/" in place}
    assert read == matched
    assert read  # AITER and Wave have it in every release


def test_aiter_asks_only_where_the_model_has_no_mla(installation: Installation) -> None:
    (probe,) = [probe for probe in probes_of(installation.folder, "aiter") if not probe.own]
    assert (probe.mla, probe.unless) == (False, "get_v_head_dim")
    (probe,) = probes_of(installation.folder, "wave")
    assert (probe.mla, probe.unless) == (None, None)


def test_what_is_read_imports_neither_torch_nor_sglang_and_takes_under_a_second(kimi: dict[str, Any]) -> None:
    code = """
import json, sys, time
from sglang_pp_mla.preflight import BUILT_IN, Deployment, run
from sglang_pp_mla.rehearsal import find_sglang
deployment = Deployment(json.load(sys.stdin), 8, installation=find_sglang())
before = time.process_time()
assert run(deployment, [check for check in BUILT_IN if check.order < 30])
print(time.process_time() - before, *{"sglang", "torch", "triton", "transformers"} & {*sys.modules})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(kimi), capture_output=True, text=True, check=True
    )
    seconds, *imported = done.stdout.splitlines()[-1].split()
    assert imported == []
    assert float(seconds) < 1


# How checks are run


def test_a_check_of_another_package_is_run_in_its_place_and_may_fail(kimi: dict[str, Any]) -> None:
    def early(_: Deployment) -> list[Verdict]:
        return [Verdict("early", "fail", "no", "Do.", (0, 2))]

    def broken(_: Deployment) -> list[Verdict]:
        raise RuntimeError("oops")

    def idle(_: Deployment) -> list[Verdict]:
        raise Missing("Do that first.")

    said: list[Verdict] = []
    deployment = Deployment(kimi, 8)
    checks = [Check("idle", 19, idle), *SOURCES_ONLY, Check("broken", 15, broken), Check("early", 5, early)]
    assert not run(deployment, checks, said.append)
    assert said == deployment.verdicts
    names = [verdict.id for verdict in said]
    assert names[:7] == ["early", "configuration", "partition", "heads", "memory", "broken", "idle"]
    assert (said[5].status, said[6].status, said[6].remedy) == ("warn", "skip", "Do that first.")
    assert "RuntimeError: oops" in said[5].summary
    report = as_json(deployment)
    assert report["ok"] is False
    assert [(check["id"], check["rank"]) for check in report["checks"]][:3] == [
        ("early", 0),
        ("early", 2),
        ("configuration", None),
    ]


def test_a_plugin_brings_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "house_rules.py").write_text(
        "from sglang_pp_mla.hookspecs import hookimpl\n"
        "from sglang_pp_mla.preflight import Check, Verdict\n"
        "@hookimpl\n"
        "def sglang_pp_mla_checks():\n"
        "    return [Check('house', 15, lambda deployment: [Verdict('house', 'fail', 'too many stages')])]\n"
    )
    info = tmp_path / "house_rules-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-rules\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang_pp_mla]\nhouse = house_rules\n")
    monkeypatch.syspath_prepend(tmp_path)
    from sglang_pp_mla.wiring.plugins import checks_of_plugins

    (check,) = checks_of_plugins()
    deployment = Deployment(config_of("deepseek-v3.json"), 2)
    assert not run(deployment, [*SOURCES_ONLY, check])
    assert [verdict.id for verdict in deployment.verdicts if verdict.status == "fail"] == ["house"]


def engine_run(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> EngineRun:
    return EngineRun(1.0, (EngineAnswer(tokens, logprobs, 0),), 1.0, False, False, "", None, "", "")


@pytest.mark.parametrize(
    ("tokens", "logprobs", "same"),
    [
        ((1, 2), (-1.0, -2.0), True),
        ((1, 2), (-1.0, -2.00001), True),
        ((1, 3), (-1.0, -2.0), False),
        ((1, 2), (-1.0, -2.01), False),
    ],
)
def test_answers_are_the_same_when_tokens_and_log_probabilities_are(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], same: bool
) -> None:
    assert preflight._same(engine_run((1, 2), (-1.0, -2.0)), engine_run(tokens, logprobs)) is same


# Where there is no SGLang


def closure(names: Iterable[str]) -> set[str]:
    """Installed distributions that these need, themselves among them."""
    wanted, found = list(names), set()
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        needs = [Requirement(line) for line in required]
        wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in an environment with what this package requires, and nothing else."""
    place = tmp_path_factory.mktemp("laptop")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    for name in closure(("packaging", "pluggy", "rich", "typer", "wrapt")):
        for file in distribution(name).files or ():
            if file.parts[0] not in ("..", "/") and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), site / file)
    shutil.copytree(ROOT / "sglang_pp_mla", site / "sglang_pp_mla", ignore=shutil.ignore_patterns("__pycache__"))

    def command(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [place / "bin/python", "-m", "sglang_pp_mla.cli", "preflight", *map(str, arguments)],
            cwd=place,
            env={"PATH": "/usr/bin:/bin", "HOME": str(place), "COLUMNS": "200", **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return command


Command = Callable[..., "subprocess.CompletedProcess[str]"]


def test_without_sglang_what_needs_none_is_checked_and_the_rest_skipped(laptop: Command) -> None:
    done = laptop(DATA / "deepseek-v3.json", "--pp-size", 8, "--json", "--gpu", "H200", "--rehearse")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == {"ok", "sglang", "backend", "stages", "checks", "rehearsal"}
    assert (report["ok"], report["sglang"], report["backend"], report["rehearsal"]) == (True, None, "triton_pp", None)
    assert report["stages"][1] == {"rank": 1, "start_layer": 7, "end_layer": 14}
    assert all(check.keys() == {"id", "status", "rank", "summary", "remedy"} for check in report["checks"])
    status = {check["id"]: check["status"] for check in report["checks"]}
    needs_none = ["configuration", "partition", "heads", "memory", "boundaries", "mla-geometry"]
    assert [name for name in status if status[name] == "pass"] == needs_none
    skipped = [check for check in report["checks"] if check["status"] == "skip"]
    assert {check["id"] for check in skipped} == status.keys() - {*needs_none}
    assert all("pip install sglang" in check["remedy"] for check in skipped)


def test_the_end_is_a_launch_command_or_what_failed(laptop: Command, tmp_path: Path) -> None:
    model = DATA / "deepseek-v3.json"
    flags = ["--kv-cache-dtype fp8_e4m3", "--tp-size", "2"]
    good = laptop(model, "--pp-size", 2, "--partition", "31, 30", "--sglang-args", *flags)
    assert good.returncode == 0
    assert good.stdout.splitlines()[-1] == (
        "SGLANG_PP_LAYER_PARTITION=31,30 python -m sglang.launch_server --model-path MODEL --pp-size 2 "
        "--tp-size 2 --attention-backend triton_pp --kv-cache-dtype fp8_e4m3"
    )
    bad = laptop(model, "--pp-size", 2, "--save", tmp_path / "report.svg", SGLANG_PP_LAYER_PARTITION="31,31")
    assert bad.returncode == 1
    assert "Do not start it yet: partition failed." in bad.stdout
    picture = re.sub(r"<[^>]+>|&#160;", " ", (tmp_path / "report.svg").read_text())
    assert "adds up to 62 layers" in picture


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;x\x07", "[red]"])
def test_names_from_a_file_cannot_command_the_terminal(laptop: Command, tmp_path: Path, name: str) -> None:
    config = config_of("deepseek-v3.json", architectures=[name])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "broken.json").write_text(json.dumps(config | {"num_hidden_layers": name}))
    for file in ("config.json", "broken.json"):
        done = laptop(tmp_path / file, "--pp-size", 2)
        assert done.returncode == (file == "broken.json")
        assert name.replace("\x1b", "?").replace("\x07", "?") in done.stdout
        assert all(one.isprintable() or one == "\n" for one in done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.json", "--pp-size", "2"], "nowhere.json does not exist"),
        ([str(DATA / "deepseek-v3.json"), "--pp-size", "2", "--gpu", "Voodoo2"], "'Voodoo2' is not known"),
        ([str(DATA / "deepseek-v3.json"), "--pp-size", "2", "--sglang-args", "'"], "close its quotes"),
        ([str(DATA / "deepseek-v3.json"), "--pp-size", "2", "--save", "report.png"], "report.png"),
        ([str(DATA / "deepseek-v3.json"), "--pp-size", "2", "--sglang-args", "--pp-size 4"], "sets --pp-size"),
        (
            [str(DATA / "deepseek-v3.json"), "--pp-size", "2", "--sglang-args", "--attention-backend=fa3"],
            "sets --attention-backend; give preflight's own --backend instead",
        ),
        (["moonshotai/Kimi-K2.6", "--pp-size", "8"], "allow the network"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_2(laptop: Command, arguments: list[str], says: str) -> None:
    done = laptop(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_flags_given_to_sglang_are_read_as_its_parser_reads_them(kimi: dict[str, Any]) -> None:
    def value(given: str) -> str:
        return Deployment(kimi, 2, sglang_args=given).flag("--kv-cache-dtype", "auto")

    assert [value(given) for given in ("", "--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype=bf16 --x")] == [
        "auto",
        "fp8_e4m3",
        "bf16",
    ]
    assert value("--kv-cache-dtype bf16 --kv-cache-dtype fp8_e5m2") == "fp8_e5m2"
    assert value("--kv-cache-dtype") == "auto"  # which SGLang refuses


def test_an_sglang_that_cannot_be_imported_is_one_failure_found_once(kimi: dict[str, Any], tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho >> {asked}\necho 'ImportError: libsomething.so' >&2\nexit 1\n")
    python.chmod(0o755)
    attention = tmp_path / "srt/layers/attention"
    attention.mkdir(parents=True)
    (attention / "attention_registry.py").write_text("@register_attention_backend('triton')\ndef create(runner): ...\n")
    deployment = Deployment(kimi, 2, installation=Installation(str(python), "0.5.11", tmp_path))
    verdicts = judged(deployment, [check for check in BUILT_IN if check.id in ("arguments", "buffer-probe")])
    assert (verdicts["arguments"].status, verdicts["buffer-probe"].status) == ("fail", "skip")
    assert "ImportError: libsomething.so" in verdicts["arguments"].summary
    assert "doctor --deep" in verdicts["arguments"].remedy
    assert len(asked.read_text().splitlines()) == 1


# A model's own code


def test_a_folder_without_the_code_it_names_is_read_without_it(tmp_path: Path) -> None:
    config = {
        "model_type": "kimi_k2",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoTokenizer": ["moonshotai/Kimi-K2--tokenization_kimi.TikTokenTokenizer", None],
        },
    }
    assert has_its_code({}, None)
    assert not has_its_code(config, None)
    (tmp_path / "configuration_deepseek.py").touch()
    assert not has_its_code(config, tmp_path)
    (tmp_path / "tokenization_kimi.py").touch()
    assert has_its_code(config, tmp_path)


def test_another_backend_for_one_phase_is_not_judged_by_tritons_kernels(
    kimi: dict[str, Any], installation: Installation
) -> None:
    gpu = gpu_named("RTX PRO 6000")
    for phase, geometry in (("--decode-attention-backend", False), ("--prefill-attention-backend", True)):
        deployment = Deployment(kimi, 8, gpu=gpu, sglang_args=f"{phase} fa3", installation=installation)
        checks = [check for check in BUILT_IN if check.id in ("mla-geometry", "kernels")]
        found = judged(deployment, checks)
        assert ("mla-geometry" in found) == geometry
        assert (found["kernels"].status, found["kernels"].summary) == ("skip", "fa3 has no Triton kernels to compile")


def test_sglang_is_told_of_the_gpu_that_is_named() -> None:
    assert _as_reported(gpu_named("RTX PRO 6000")) == (12, 0, "NVIDIA RTX PRO 6000", 96 << 30)
