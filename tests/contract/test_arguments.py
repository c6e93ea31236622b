"""``triton_pp`` is ``triton`` to every part of SGLang that reads the server arguments.

The real arguments of the installed SGLang are resolved under both names, in a process of their own
(``resolve_arguments.py``), and compared with all that a resolution leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_pp_mla.rehearsal.environment import KERNEL_LIBRARY
from tests.contract.documents import ROOT, mentioned_flags, server_lines
from tests.contract.examples import launches
from tests.contract.resolve_arguments import COMMANDS, FLAGS, TELLING, table

NAME = "triton_pp"
TYPO = "triton_pq"

Started = dict[str, tuple[subprocess.Popen[str], Path]]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The two processes that import SGLang, begun together: the import is what takes the time."""
    commands = {
        "resolve": ([str(Path(__file__).with_name("resolve_arguments.py")), "result.json", "lines.json"], ""),
        "disabled": (["-m", "sglang.launch_server", "--model-path", "dummy", "--attention-backend", NAME], "1"),
    }
    with contextlib.ExitStack() as stack:
        processes = {}
        for title, (arguments, disable) in commands.items():
            folder = tmp_path_factory.mktemp(title)
            (folder / "lines.json").write_text(json.dumps({**server_lines(), **launches()}))
            environment = {
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "COLUMNS": "100",
                "PYTHONPATH": str(KERNEL_LIBRARY),
                "SGLANG_PP_MLA_DISABLE": disable,
            }
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(open(folder / "stdout", "w")),
                stderr=stack.enter_context(open(folder / "stderr", "w")),
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes[title] = (process, folder)
        yield processes


def finished(started: Started, title: str) -> tuple[int, Path, str]:
    """Exit status, folder and standard error of a process."""
    process, folder = started[title]
    status = process.wait(timeout=900)
    return status, folder, (folder / "stderr").read_text()


@pytest.fixture(scope="module")
def result(started: Started) -> dict[str, Any]:
    status, folder, said = finished(started, "resolve")
    assert status == 0, said[-4000:]
    return json.loads((folder / "result.json").read_text())


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Every place where two outcomes disagree, as ``path: left != right``."""
    if isinstance(left, dict) and isinstance(right, dict):
        names = [*left, *(name for name in right if name not in left)]
        pairs = [(f"{where}.{name}", left.get(name, "missing"), right.get(name, "missing")) for name in names]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(left, right, strict=True))]
    else:
        return [] if left == right else [f"{where.lstrip('.')}: {left!r} != {right!r}"]
    return [each for place, *pair in pairs for each in differences(*pair, place)]


def apart_from_the_note(outcome: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in outcome.items() if key not in ("note", "note_in_child")}


@pytest.mark.parametrize("title", table())
def test_resolves_as_triton_does(result: dict[str, Any], title: str) -> None:
    if title not in result["cases"]:
        pytest.skip("this release has no such argument")
    stock, ours = result["cases"][title]["triton"], result["cases"][title][NAME]
    assert differences(apart_from_the_note(stock), apart_from_the_note(ours)) == []
    if "refused" not in ours:
        assert stock["note"] is None
        assert sorted(ours["note"]) == sorted(table()[title].fields())
        assert ours["note_in_child"] == ours["note"]


def test_enough_configurations_were_compared(result: dict[str, Any]) -> None:
    outcomes = [each[NAME] for each in result["cases"].values()]
    assert len(outcomes) >= 40
    assert sum("refused" not in each for each in outcomes) >= 30


@pytest.mark.parametrize("title", TELLING)
def test_the_comparison_notices_a_name_that_is_only_accepted(result: dict[str, Any], title: str) -> None:
    """With the choice added but the translation taken out, SGLang treats the two names differently."""
    case = result["cases"][title]
    untranslated = json.loads(json.dumps(case["untranslated"]).replace(NAME, "triton"))
    assert differences(apart_from_the_note(case["triton"]), apart_from_the_note(untranslated))


@pytest.mark.parametrize("flag", FLAGS.values())
def test_every_flag_takes_the_name(result: dict[str, Any], flag: str) -> None:
    field = flag.removeprefix("--").replace("-", "_")
    taken = result["ways"][f"{flag} {NAME}"]
    assert taken["note"] == [field]
    assert taken["backends"][field] == "triton"


def test_keyword_arguments_take_the_name(result: dict[str, Any]) -> None:
    assert result["ways"]["keyword"]["note"] == ["attention_backend"]


def test_a_configuration_file_takes_the_name(result: dict[str, Any]) -> None:
    assert result["ways"][f"--config {NAME}"]["note"] == ["attention_backend"]


@pytest.mark.parametrize("way", [f"{flag} {TYPO}" for flag in list(FLAGS.values())[:3]] + [f"--config {TYPO}"])
def test_a_typo_is_refused_as_before(result: dict[str, Any], way: str) -> None:
    refused = result["ways"][way]
    assert refused["exit"] == 2
    assert f"invalid choice: '{TYPO}'" in refused["said"]
    assert "'triton'" in refused["said"]
    assert f"'{NAME}'" in refused["said"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_name(result: dict[str, Any], command: str) -> None:
    shown = result["help"][command]
    for flag in list(FLAGS.values())[:3]:
        choices = shown.split(f"\n  {flag} ", 1)[1].split("}", 1)[0]
        assert NAME in choices.replace("\n", "").replace(" ", "").lstrip("{").split(",")


def test_disabled_the_name_is_refused_by_sglang(started: Started) -> None:
    status, _folder, said = finished(started, "disabled")
    assert status == 2, said[-4000:]
    refusal = said[said.index("argument --attention-backend") :]
    assert f"invalid choice: '{NAME}'" in refusal
    choices = refusal.split("(choose from", 1)[1]
    assert "'triton'" in choices
    assert f"'{NAME}'" not in choices


# The documents


def test_sglang_takes_every_line_that_the_documents_and_examples_start_a_server_with(result: dict[str, Any]) -> None:
    assert len(server_lines()) > 3
    assert len(launches()) == 3
    assert result["lines"]["refused"] == {}


def test_every_flag_that_the_text_names_alone_is_somebodys(result: dict[str, Any]) -> None:
    """SGLang's, a verb's, a tool's or a reproduction's."""
    folders = ("sglang_pp_mla/cli", "tools", "benchmarks", "upstream_repro")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in ("", ".py")]
    sources = [file.read_text(errors="replace") for file in files if file.is_file()]
    ours = {flag for source in sources for flag in re.findall(r"[\"'](--[a-z][\w-]*)[\"']", source)}
    known = ours | set(result["lines"]["flags"]) | {"--ipc"}  # Docker's
    assert {flag: places for flag, places in mentioned_flags().items() if flag not in known} == {}
