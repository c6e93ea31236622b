"""The documents: every command in them is run, or its arguments are parsed, or a list here says why not.

What starts a server is parsed by SGLang itself, in tests/contract/test_arguments.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

from sglang_pp_mla.cli import VERBS, app
from sglang_pp_mla.fixes import BUILT_IN, BY_BACKEND
from sglang_pp_mla.rehearsal.shrink import kimi_k26
from tests.contract import examples
from tests.contract.documents import (
    DOCUMENTS,
    OF_TODAY,
    ROOT,
    Command,
    anchors,
    blocks,
    commands,
    is_sglang,
    links,
    name_of,
    simple_commands,
    spans,
)

LOGS = ROOT / "tests/data/logs"
WIDTH = "118"  # of the terminal on which what the documents show was printed

# Verbs that are run as they stand in the documents. The others import SGLang, compile or start an engine: here
# their arguments are parsed, and those of LONG are run among the longest tests.
RUN = ("diagnose", "doctor", "plan")
LONG = ("kernelfit", "preflight")

NOT_RUN = {
    "cd": "nothing to check",
    "dirname": "nothing to check",
    "docker": "there is no Docker here; diagnose reads such a log in tests/unit/test_diagnose.py, and what it is given "
    "is for tests/contract/test_examples.py",
    "grep": "a filter",
    "install": "changes the machine",
    "journalctl": "there is no systemd here; diagnose reads such a log in tests/unit/test_cli_diagnose.py",
    "kubectl": "there is no cluster here; what it is given is for tests/contract/test_examples.py",
    "mkdir": "nothing to check",
    "pre-commit": "writes into .git; what it calls is `make lint`",
    "systemctl": "there is no systemd here; the unit itself is for tests/contract/test_examples.py",
    "tar": "packs what tests/contract/test_mla_decode_benchmark.py lays out and runs",
    "tee": "a filter",
    "useradd": "changes the machine",
}
"""What is neither run nor parsed, and why; that the files it names are there is looked at. None may be idle."""

SHOWN_ELSEWHERE = {
    "doctor": "shows an installation that is broken on purpose; tests/unit/test_doctor.py makes such ones",
}
"""Verbs whose transcripts are of another machine."""


FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))


# What a command is, and what is wrong with it


def kind(command: Command) -> str:
    """Which of the checks below a command is for; raises ``ValueError`` for one that none is."""
    words = command.words
    first = words[0].rpartition("/")[2]
    if words[0] == "sglang-pp-mla":
        return "verb"
    if is_sglang(words):
        return "server"
    if words[0] == "make":
        return "make"
    if words[:2] == ("git", "apply") or words[0] == "patch":
        return "patch"
    if words[0] == "ssh":
        return "ssh"
    if first in ("pip", "pytest"):
        return first
    if words[0] == "python":
        given = [word for word in words[1:] if word != "-P"]
        if given[:1] == ["-m"] and given[1:2] in (["pip"], ["pytest"]):
            return given[1]
        if given[:1] == ["-c"]:
            return "code"
        if given and given[0].endswith(".py"):
            return "script"
    if words[0].startswith("tools/"):
        return "script"
    if first in NOT_RUN:
        return "not run"
    raise ValueError(f"{command}: nothing here knows how to check {words[0]}; teach {__name__}, or list it in NOT_RUN")


def arguments(command: Command) -> list[str]:
    """What stands behind the program, Python and `-m` left out."""
    words = [word for word in command.words if word != "-P"]
    if words[0] == "python":
        words = words[2:] if words[1] == "-m" else words[1:]
    return words[1:]


def every(*wanted: str) -> list[Command]:
    """The documents' commands of some kinds, each once."""
    found = {}
    for path in OF_TODAY:
        for command in commands(path):
            for each in through_ssh(command):
                with contextlib.suppress(ValueError):  # of no kind: a test says so
                    if kind(each) in wanted:
                        found.setdefault((each.words, each.shown), each)
    return list(found.values())


def through_ssh(command: Command) -> list[Command]:
    if command.words[0] != "ssh":
        return [command]
    return [command, *simple_commands(command.words[2], command.where)]


def verb_of(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.get_command(click.Context(group), name)


def script_of(command: Command) -> Path | None:
    """The file that a command runs; the document's folder is looked in as well."""
    words = [word for word in command.words if word not in ("python", "-P")]
    return next((folder / words[0] for folder in (ROOT, command.folder) if (folder / words[0]).is_file()), None)


def made_by_make(command: Command) -> list[Command]:
    """What is wrong with a call of make raises; what the values of its variables call is returned."""
    text = (ROOT / "Makefile").read_text()
    called = []
    for word in command.words[1:]:
        variable, equals, value = word.partition("=")
        if equals:
            if not re.search(rf"^{variable} \?=", text, re.M):
                raise ValueError(f"{command}: the Makefile asks for no {variable}")
            tool = {"MATRIX_ARGS": "tools/matrix", "PYTEST_ARGS": "pytest"}.get(variable)
            if tool and value:
                called += list(simple_commands(f"{tool} {value}", command.where))
        elif not re.search(rf"^{re.escape(word)}:", text, re.M):
            raise ValueError(f"{command}: the Makefile has no target {word}")
    return called


def check_pytest(command: Command) -> None:
    markers = set(re.findall(r'^ +"(\w+)(?:\(\w+\))?: ', (ROOT / "pyproject.toml").read_text(), re.M))
    words = iter(arguments(command))
    for word in words:
        if word == "-m":
            unknown = set(re.findall(r"\w+", next(words))) - markers - {"and", "or", "not"}
            assert not unknown, f"{command}: pytest has no marker {', '.join(unknown)}"
        elif word == "-k":
            next(words)
        elif not word.startswith("-"):
            assert any((folder / word).exists() for folder in (ROOT, command.folder)), f"{command}: there is no {word}"


def check_pip(command: Command) -> None:
    words = arguments(command)
    assert words[0] in ("install", "uninstall", "show", "check"), command
    for word in words[1:]:
        if word != "." and not word.startswith("-"):
            assert Requirement(word).name in ("sglang", "sglang-pp-mla"), f"{command}: what is {word}?"


def check_patch(command: Command) -> None:
    """That each file applies to its releases is for tests/contract/test_patches.py."""
    named = [*command.reads, *(word for word in command.words[1:] if word.endswith(".patch"))]
    assert len(named) == 1, f"{command}: no patch, or more than one"
    path = named[0].removeprefix("../sglang-pp-mla/")
    assert any((folder / path).is_file() for folder in (ROOT, command.folder)), f"{command}: there is no {path}"


def check_files(command: Command) -> None:
    """The files of this repository that a command is given."""
    for word in command.words[1:]:
        if word.partition("/")[0] in FOLDERS:
            assert (ROOT / word).exists(), f"{command}: there is no {word}"


# Commands


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the documents have it: a model's configuration, the log of a server that died, a journal."""
    (tmp_path / "config.json").write_text(json.dumps(kimi_k26()))
    (tmp_path / "server.log").write_bytes((LOGS / "pp8-index-error-0.5.11.log").read_bytes())
    journal = tmp_path / "bin" / "journalctl"  # a stand-in for what this machine lacks
    journal.parent.mkdir()
    journal.write_text(f"#!/bin/sh\ncat {LOGS / 'healthy-pp4.log'}\n")
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", f"{journal.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ids(command: Command) -> str:
    return str(command)


def call(command: Command, here: Path) -> Any:
    stands_for = {"MODEL": ".", "/models/Kimi-K2.6": "."}
    words = [stands_for.get(word, str(ROOT / word) if (ROOT / word).is_file() else word) for word in command.words]
    piped = (here / "server.log").read_bytes()
    return CliRunner().invoke(app, words[1:], input=piped, env={"COLUMNS": WIDTH})


def check_shown(command: Command, printed: str) -> None:
    """What a transcript shows is what is printed; `…` stands for anything, on a line of its own for lines."""
    if not command.shown.strip():
        return
    lines = [line.rstrip() for line in command.shown.strip("\n").split("\n")]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else r".*?".join(map(re.escape, line.split("…"))) + r" *\n" for line in lines
    )
    assert re.search(rf"^{pattern}", printed + "\n", re.M), f"{command} prints\n{printed}"


@pytest.mark.parametrize("path", OF_TODAY, ids=name_of)
def test_every_command_is_one_that_is_checked(path: Path) -> None:
    for command in commands(path):
        for each in through_ssh(command):
            kind(each)


def test_no_reason_is_idle() -> None:
    assert {command.words[0].rpartition("/")[2] for command in every("not run")} == NOT_RUN.keys()


@pytest.mark.parametrize("command", [each for each in every("verb") if each.words[1] not in RUN], ids=ids)
def test_the_arguments_of_a_verb_that_takes_minutes(command: Command) -> None:
    verb, *given = command.words[1:]
    assert verb in VERBS, f"{command}: there is no verb {verb}"
    verb_of(verb).make_context(verb, given).close()  # as far as the call of the verb; a wrong flag raises


@pytest.mark.parametrize("command", [each for each in every("verb") if each.words[1] in RUN], ids=ids)
def test_a_verb_does_what_the_document_says(command: Command, here: Path) -> None:
    verb = command.words[1]
    result = call(command, here)
    died = verb == "diagnose" and "unit:sglang" not in command.words  # the log is of a server that did, the journal not
    assert result.exit_code == died, result.output
    if verb not in SHOWN_ELSEWHERE:
        check_shown(command, result.stdout)


@pytest.mark.longest
@pytest.mark.parametrize("command", [each for each in every("verb") if each.words[1] in LONG], ids=ids)
def test_a_verb_that_takes_minutes_does_what_the_document_says(command: Command, here: Path) -> None:
    result = call(command, here)
    assert result.exit_code == 0, result.output
    check_shown(command, result.stdout)


@pytest.mark.parametrize("command", every("make"), ids=ids)
def test_make_has_the_target(command: Command) -> None:
    for each in made_by_make(command):
        if kind(each) == "pytest":
            check_pytest(each)


def test_scripts_take_their_arguments(tmp_path: Path) -> None:
    """Tools, benchmarks and reproductions, each run as far as its own parser, in one process for all of them."""
    by_make = [each for command in every("make") for each in made_by_make(command) if kind(each) == "script"]
    named = [command for _where, command in named_commands() if kind(command) == "script"]
    wrong: dict[str, str] = {}
    parsing: dict[Command, Path] = {}
    for command in (*every("script"), *by_make, *named):
        path = script_of(command)
        if path is None:
            wrong[str(command)] = "there is no such file"
        elif "ArgumentParser" in path.read_text():
            parsing[command] = path
        elif any(word.startswith("-") for word in command.words[1:]):
            wrong[str(command)] = "it takes no flags"
    for release in ("0.5.11", "0.5.23"):  # folders that a benchmark is given
        (tmp_path / release).mkdir()
    # What the text names need not be whole: its flags alone are looked at.
    work = [[str(path), ["--help"] if each in named else arguments(each)] for each, path in parsing.items()]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("take_arguments.py")],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    for command, answer in zip(parsing, json.loads(done.stdout), strict=True):
        flags = {word.partition("=")[0] for word in arguments(command) if word.startswith("-")}
        if answer["said"]:
            wrong[str(command)] = answer["said"]
        elif command in named and not flags <= set(answer["options"]):
            wrong[str(command)] = "it has no such flag"
    assert not wrong, "\n".join(f"{command}: {what}" for command, what in wrong.items())


@pytest.mark.parametrize("command", every("pip", "pytest", "patch", "code", "not run"), ids=ids)
def test_what_others_run(command: Command) -> None:
    """pip's is for tests/unit/test_wheel.py, a patch for test_patches.py; here that what they name is there."""
    checks: dict[str, Callable[[Command], None]] = {
        "code": lambda command: compile(command.words[-1], str(command), "exec"),
        "not run": check_files,
        "patch": check_patch,
        "pip": check_pip,
        "pytest": check_pytest,
    }
    checks[kind(command)](command)


# Text


def named_commands() -> list[tuple[str, Command]]:
    """Commands of ours that the text names, and where."""
    found = []
    for path in OF_TODAY:
        for where, code in spans(path):
            words = code.split()
            if words[0] in VERBS and any(word.startswith("--") for word in words[1:]):
                code = f"sglang-pp-mla {code}"
            is_file = re.fullmatch(r"(?:python )?(?:tools|benchmarks|upstream_repro)/[\w/.]*\w(?: .*)?", code)
            if (code.startswith(("sglang-pp-mla ", "make ")) or is_file) and "…" not in code:
                if words[0].endswith(".py"):
                    code = f"python {code}"
                with contextlib.suppress(ValueError):  # quotes that do not close: a part of a command
                    found += [(where, each) for each in simple_commands(code, where)]
    return [(where, command) for where, command in found if kind(command) in ("verb", "make", "script")]


def test_verbs_in_the_text_exist_and_have_the_flags() -> None:
    verbs = [(where, command) for where, command in named_commands() if kind(command) == "verb"]
    assert len(verbs) > 10
    options = {verb: {"--help", *(name for each in verb_of(verb).params for name in each.opts)} for verb in VERBS}
    for where, command in verbs:
        verb, given = command.words[1], command.words[2:]
        assert verb in VERBS, f"{where}: there is no verb {verb}"
        for word in given:
            flag = word.partition("=")[0]
            assert not flag.startswith("--") or flag in options[verb], f"{where}: {verb} has no {flag}"


def test_targets_of_make_in_the_text_exist() -> None:
    for _where, command in named_commands():
        if kind(command) == "make":
            made_by_make(command)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for where, target in links(path):
        if re.match(r"(https?|mailto):", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{where}: there is no {target}"
        assert there.is_relative_to(ROOT), f"{where}: {target} leads out of the repository"
        if anchor:
            assert there.suffix == ".md", f"{where}: {target} is no document, so it has no anchors"
            assert anchor in anchors(there), f"{where}: {file or name_of(path)} has no heading for #{anchor}"


@pytest.mark.parametrize("path", OF_TODAY, ids=name_of)
def test_files_in_the_text_exist(path: Path) -> None:
    for where, code in spans(path):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*", code):
            assert (ROOT / code).exists(), f"{where}: there is no {code}"


@pytest.mark.parametrize("path", OF_TODAY, ids=name_of)
def test_examples_of_python_run(path: Path) -> None:
    for name, number, text in blocks(path):
        if name == "python":
            exec(compile("\n" * (number - 1) + text, name_of(path), "exec"), {"__name__": "example"})


# docs/how-it-works.md


def picture() -> str:
    (drawn,) = (text for name, _number, text in blocks(ROOT / "docs/how-it-works.md") if name == "mermaid")
    return drawn


def test_the_picture_shows_every_fix_and_no_other() -> None:
    (marked,) = re.findall(r"^ *class ([\w,]+) fix$", picture(), re.M)
    shown = set()
    for node in marked.split(","):
        (label,) = re.findall(rf'^ *{node}\["(.*?)<br/>', picture(), re.M)
        shown.update(label.split(", "))
        assert re.search(rf"^ *{node}\[.*\] ==> \w", picture(), re.M), f"{node} acts nowhere"
    assert shown == {fix.name for fix in (*BUILT_IN, *BY_BACKEND)}


def test_the_table_names_the_modules_that_each_fix_waits_for() -> None:
    text = (ROOT / "docs/how-it-works.md").read_text()
    named = {}
    for name, row in re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.M):
        modules = re.findall(r"`(.+?)`", row)
        named[name] = {each if each.startswith("sglang.") else f"sglang.srt.{each}" for each in modules}
    assert named == {fix.name: set(fix.changes) for fix in (*BUILT_IN, *BY_BACKEND)}


# docs/serve-kimi-k2.md


def test_the_page_starts_what_the_examples_start() -> None:
    (command,) = (each for each in commands(ROOT / "docs/serve-kimi-k2.md") if is_sglang(each.words))
    given = dict(re.findall(r"--([a-z-]+) ?([^- ]\S*)?", " ".join(command.words)))
    flags = {name: "" if value is True else str(value) for name, value in examples.flags().items()}
    assert given.items() <= flags.items()
    assert given.keys() >= flags.keys() - {"served-model-name", "host", "port"}
    (partition,) = examples.environment().values()
    text = (ROOT / "docs/serve-kimi-k2.md").read_text()
    assert f"\nSGLANG_PP_LAYER_PARTITION={partition} python -m sglang.launch_server" in text
