"""The verb ``plan``, as a command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_pp_mla.cli import app
from sglang_pp_mla.rehearsal.shrink import kimi_k26
from sglang_pp_mla.releases import RELEASES

DATA = Path(__file__).parents[1] / "data"
KEYS = ["partition", "kv_tokens", "default_partition", "default_kv_tokens", "gain", "stages", "env"]


@pytest.fixture(scope="module")
def k26(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kimi")
    (folder / "config.json").write_text(json.dumps(kimi_k26()))
    return str(folder)


def run(*arguments: str, release: str = "0.5.23") -> Any:
    return CliRunner().invoke(app, ["plan", *arguments, "--release", release], env={"COLUMNS": "120"})


def said_by(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_is_what_others_rely_on(k26: str) -> None:
    answer = said_by(k26, "--pp-size", "8", "--gpu-memory", "96")
    assert list(answer) == KEYS
    assert answer["partition"] == [7, 7, 8, 8, 8, 8, 8, 7]
    assert answer["default_partition"] == [7, 7, 7, 8, 8, 8, 8, 8]
    assert answer["gain"] == answer["kv_tokens"] / answer["default_kv_tokens"] - 1 > 0.4
    assert answer["env"] == {"SGLANG_PP_LAYER_PARTITION": "7,7,8,8,8,8,8,7"}
    assert [stage["rank"] for stage in answer["stages"]] == list(range(8))
    assert [stage["layers"] for stage in answer["stages"]] == answer["partition"]
    for stage in answer["stages"]:
        assert list(stage) == ["rank", "layers", "weight_bytes", "workspace_bytes", "kv_bytes_per_token"]
        assert stage["kv_bytes_per_token"] == stage["layers"] * 576 * 2


def test_people_get_bars_the_default_and_the_line_to_type(k26: str) -> None:
    result = run(k26, "--pp-size", "8", "--gpu-memory", "96")
    assert result.exit_code == 0, result.stderr
    assert len(re.findall(r"^ PP\d .*█", result.stdout, re.MULTILINE)) == 8
    answer = said_by(k26, "--pp-size", "8", "--gpu-memory", "96")
    assert f"{answer['kv_tokens']:,}" in result.stdout
    assert f"{answer['default_kv_tokens']:,}" in result.stdout
    assert f"{answer['gain']:+.1%}" in result.stdout
    line = shlex.split(result.stdout.split("Start it with\n")[1])
    assert line[0] == "SGLANG_PP_LAYER_PARTITION=7,7,8,8,8,8,8,7"
    assert line[1:6] == ["python", "-m", "sglang.launch_server", "--model-path", k26]
    assert line[6:] == ["--pp-size", "8", "--attention-backend", "triton_pp"]


def test_nothing_of_the_table_is_cut_off_on_a_narrow_terminal(k26: str) -> None:
    arguments = ["plan", k26, "--pp-size", "8", "--gpu-memory", "96", "--release", "0.5.23"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).stdout
    assert "\u2026" not in shown
    assert len(re.findall(r"^ PP\d .*█", shown, re.MULTILINE)) == 8
    assert max(len(line) for line in shown.splitlines() if "PP" in line and "█" in line) <= 80


def test_a_release_that_is_older_than_all_that_were_read_is_refused(k26: str) -> None:
    result = run(k26, "--pp-size", "8", "--gpu-memory", "96", release="0.4.9")
    assert result.exit_code == 2
    assert "--release 0.4.9 is older than 0.5.3" in result.stderr


def test_the_line_carries_what_the_plan_assumed(k26: str) -> None:
    flags = ["--kv-cache-dtype", "fp8_e4m3", "--mem-fraction-static", "0.85"]
    result = run(k26, "--pp-size", "4", "--tp-size", "2", "--gpu-memory", "96", "--context", "65536", *flags)
    assert result.exit_code == 0, result.stderr
    line = " ".join(result.stdout.split("Start it with\n")[1].split())
    for flag in ("--tp-size 2", "--pp-size 4", "--context-length 65536", " ".join(flags[:2]), " ".join(flags[2:])):
        assert flag in line


def test_a_cache_of_half_the_size_holds_twice_as_much(k26: str) -> None:
    common = (k26, "--pp-size", "8", "--gpu-memory", "96")
    whole, half = said_by(*common), said_by(*common, "--kv-cache-dtype", "fp8_e4m3")
    assert half["kv_tokens"] == pytest.approx(2 * whole["kv_tokens"], rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "code", "sentence"),
    [
        (("--context", "32768", "--max-running", "16"), 0, "hold 16 requests of 32,768 tokens at once (524,288)"),
        (("--context", "262144", "--max-running", "64"), 1, "do not hold 64 requests of 262,144 tokens at once"),
        (
            (
                "--context",
                "262144",
            ),
            0,
            "hold 3 requests of 262,144 tokens at once",
        ),
    ],
)
def test_whether_the_tokens_suffice(k26: str, asked: tuple[str, ...], code: int, sentence: str) -> None:
    result = run(k26, "--pp-size", "8", "--gpu-memory", "96", *asked)
    assert result.exit_code == code
    assert sentence in " ".join(result.stdout.split())


def test_ways_to_use_eight_gpus_side_by_side(k26: str) -> None:
    common = (k26, "--pp-size", "8", "--gpu-memory", "96")
    rows = said_by(*common, "--compare", "TP8,PP8,TP2xPP4,TP16")["compare"]
    tensor, pipeline, both, uneven = rows
    assert pipeline["kv_tokens"] == said_by(*common)["kv_tokens"]
    assert tensor["kv_tokens"] < both["kv_tokens"] < pipeline["kv_tokens"]
    assert (tensor["all_reduces"], tensor["hops"]) == (123, 0)
    assert (pipeline["all_reduces"], pipeline["hops"]) == (0, 7)
    assert pipeline["bytes_sent"] < both["bytes_sent"] < tensor["bytes_sent"]
    assert uneven["kv_tokens"] > 0
    shown = run(*common, "--compare", "TP8,PP8,TP3")
    assert "123 all-reduces" in shown.stdout
    assert "7 hops" in shown.stdout
    assert "64 heads cannot be divided over 3 GPUs" in shown.stdout


def test_what_does_not_fit_ends_with_1_and_one_sentence(k26: str) -> None:
    result = run(k26, "--pp-size", "8", "--gpu-memory", "80", "--json")
    assert result.exit_code == 1
    assert re.fullmatch(r"Rank \d of 8 lacks \d+\.\d GiB .*; use --pp-size 9, .*\.\n", result.stderr)
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert (answer["partition"], answer["kv_tokens"], answer["stages"]) == (None, 0, [])


def test_what_does_not_fit_is_saved_too(k26: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = run(k26, "--pp-size", "8", "--gpu-memory", "80", "--compare", "TP8", "--save", str(report))
    assert result.exit_code == 1
    assert result.stderr.count("lacks") == 1
    saved = " ".join(report.read_text().split())
    assert "in the best partition" in saved
    assert "weights a GPU" in saved


def test_a_release_of_unread_arithmetic_is_said(k26: str) -> None:
    common = (k26, "--pp-size", "8", "--gpu-memory", "96")
    assert "was read" in run(*common, release="99").stdout
    assert "was read" not in run(*common, release=RELEASES[-1]).stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpu-memory", "many"), "is not a size in GB"),
        (("--gpu-memory", "96,96"), "has 2 sizes but the pipeline has 4 stages"),
        (("--gpu-memory", "-1"), "has a size that no GPU has"),
        (("--gpu-memory", "nan"), "has a size that no GPU has"),
        (("--gpu-memory", "96", "--compare", "TP8,EP8"), "--compare has 'EP8'"),
        (("--gpu-memory", "96", "--compare", "PP0"), "--compare has 'PP0'"),
        (("--gpu-memory", "96,96,96,80", "--compare", "TP4"), "needs GPUs of one size"),
        (("--gpu-memory", "96", "--kv-cache-dtype", "fp3"), "is not one of auto"),
        (("--gpu-memory", "96", "--save", "report.pdf"), "has no known format"),
        (("--gpu-memory", "96", "--tp-size", "3"), "64 heads cannot be divided over 3 GPUs"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_sentence(k26: str, arguments: tuple[str, ...], sentence: str) -> None:
    result = run(k26, "--pp-size", "4", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_wrong_release_and_a_wrong_model() -> None:
    model = str(DATA / "deepseek-v3.json")
    result = run(model, "--pp-size", "8", "--gpu-memory", "96", release="newest")
    assert (result.exit_code, "is not a version" in result.stderr) == (2, True)
    result = run(str(DATA / "nothing.json"), "--pp-size", "8", "--gpu-memory", "96")
    assert (result.exit_code, "does not exist" in result.stderr) == (2, True)


def test_the_documented_example_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    example = (root / "docs" / "plan.md").read_text().split("```")[1].strip()
    command, shown = example.split("\n", 1)
    words = shlex.split(command)
    assert words[:3] == ["$", "sglang-pp-mla", "plan"]
    result = CliRunner().invoke(app, words[2:], env={"COLUMNS": "118"})
    assert result.exit_code == 0, result.stderr
    assert [line.rstrip() for line in result.stdout.strip().splitlines()] == shown.splitlines()


@pytest.mark.parametrize("changes", [{}, {"vocab_size": None}], ids=["planned", "refused"])
def test_names_from_a_file_cannot_command_the_terminal(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**kimi_k26(), "architectures": ["[/bold]\x1b[2Jnone"], "model_type": "\x1b]0;x\x07[red]", **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(str(tmp_path), "--pp-size", "8", "--gpu-memory", "96", "--compare", "TP3,PP62")
    assert result.exit_code == (2 if changes else 0), result.output
    assert "[/bold]?[2Jnone" in result.output
    assert all(one.isprintable() or one == "\n" for one in result.output)


@pytest.mark.parametrize("suffix", [".svg", ".html"])
@pytest.mark.parametrize("json_too", [(), ("--json",)])
def test_the_report_is_saved(k26: str, tmp_path: Path, suffix: str, json_too: tuple[str, ...]) -> None:
    report = tmp_path / f"report{suffix}"
    result = run(k26, "--pp-size", "8", "--gpu-memory", "96", "--save", str(report), *json_too)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("{") is bool(json_too)
    text = report.read_text().replace("&#160;", " ")
    assert "7,7,8,8,8,8,8,7" in text
    assert "PP7" in text
    assert ("<svg" if suffix == ".svg" else "<html") in text


def test_the_verb_runs_without_torch_or_sglang(k26: str) -> None:
    script = (
        "import sys; from sglang_pp_mla.cli import app\n"
        "try: app(sys.argv[1:], prog_name='sglang-pp-mla')\n"
        "finally: print(sorted({'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", k26, "--pp-size", "8", "--gpu-memory", "96", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert json.loads(done.stdout)["partition"] == [7, 7, 8, 8, 8, 8, 8, 7]
