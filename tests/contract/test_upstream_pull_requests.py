"""upstream_repro/: each fault's folder is whole, its commands work, and run.py sees the fault come and go."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ROOT / "upstream_repro"


def load(path: Path) -> ModuleType:
    """A module from its file alone."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    del sys.modules[path.stem]
    return module


RUN = load(UPSTREAM / "run.py")
pytestmark = [
    pytest.mark.release(RUN.RELEASE),
    pytest.mark.skipif(version("sglang") != RUN.RELEASE, reason=f"the pull requests are for SGLang {RUN.RELEASE}"),
]
PACKAGE = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)))  # type: ignore[union-attr]
HEADINGS = ["Motivation", "Modifications", "Accuracy Tests", "Speed Tests and Profiling", "Checklist"]


# The folders


def test_every_folder_is_a_fault_that_is_run() -> None:
    folders = {path.name for path in UPSTREAM.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert folders == RUN.FAULTS.keys()


@pytest.mark.parametrize("fault", RUN.FAULTS)
def test_a_folder_is_whole(fault: str) -> None:
    assert {path.name for path in (UPSTREAM / fault).iterdir()} >= {"PULL_REQUEST.md", "repro.py", "test"}
    text = (UPSTREAM / fault / "PULL_REQUEST.md").read_text()
    assert re.match(r"# \[\w+\] \S.{10,80}\n\n## Motivation\n", text)
    assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS
    test = RUN.unit_test_of(fault).relative_to(UPSTREAM / fault).as_posix()
    assert f"\npython {test}\n" in text
    for path in re.findall(r"^\+\+\+ b/.*/(.*)$", RUN.patch_of(fault).read_text(), re.M):
        assert f"{path}`" in text, f"the text does not name {path}"


@pytest.mark.parametrize("fault", RUN.FAULTS)
def test_sglangs_ci_takes_the_unit_test(fault: str) -> None:
    ci = load(PACKAGE / "test/ci/ci_register.py")
    registries, runs_by_itself = ci.ut_parse_one_file(str(RUN.unit_test_of(fault)))
    assert [(each.backend, each.effective_suite) for each in registries] == [(ci.HWBackend.CPU, "base-a-test-cpu")]
    assert runs_by_itself
    assert "(CustomTestCase):" in RUN.unit_test_of(fault).read_text()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
@pytest.mark.parametrize("fault", RUN.FAULTS)
def test_the_commands_make_the_commit(fault: str, tmp_path: Path) -> None:
    """README's, but the last, in a repository that has the tag and the files that change."""
    (block,) = re.findall(r"^```text\n(git switch.*?)^```$", (UPSTREAM / "README.md").read_text(), re.M | re.S)
    *commands, last = block.splitlines()
    assert last.startswith("gh pr create ")
    patch = RUN.patch_of(fault).relative_to(ROOT / "patches").as_posix()
    given = RUN.patch_of("buffer-probe").relative_to(ROOT / "patches").as_posix()
    commands = [line.replace(given, patch).replace("buffer-probe", fault) for line in commands]

    changed = re.findall(r"^\+\+\+ b/(.*)$", RUN.patch_of(fault).read_text(), re.M)
    checkout = tmp_path / "sglang"
    for path in changed:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / path.removeprefix("python/sglang/"), checkout / path)
    (tmp_path / "sglang-pp-mla").symlink_to(ROOT)
    identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull}
    start = "git init -q && git add . && git commit -qm start && git tag v0.5.23"
    script = "\n".join(["set -e", start, *commands, "git log -1 --format=%s", "git show --name-only --format="])
    done = subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    test = RUN.unit_test_of(fault).relative_to(UPSTREAM / fault).as_posix()
    title = (UPSTREAM / fault / "PULL_REQUEST.md").read_text().splitlines()[0]
    assert f"# {done.stdout.splitlines()[-len(changed) - 2]}" == title
    assert sorted(done.stdout.splitlines()[-len(changed) - 1 :]) == sorted([*changed, test])


# run.py


def outcome(status: int, tests: int | None = None) -> object:
    return RUN.Outcome(status, "" if tests is None else f"Ran {tests} tests in 0.1s\n")


BEFORE, AFTER = [outcome(1), outcome(1, 3)], [outcome(0), outcome(0, 3)]


@pytest.mark.parametrize(
    ("untouched", "patched"),
    [
        (BEFORE, BEFORE),  # a patch that does nothing
        (AFTER, AFTER),  # a fault that is not there
        ([outcome(3), BEFORE[1]], AFTER),  # could not tell
        (BEFORE, [outcome(2), AFTER[1]]),
        ([BEFORE[0], outcome(1)], AFTER),  # no test was run
        ([BEFORE[0], outcome(99, 3)], AFTER),
        (BEFORE, [AFTER[0], outcome(0, 2)]),  # other tests
        ([BEFORE[0], outcome(1, 0)], [AFTER[0], outcome(0, 0)]),
    ],
)
def test_only_red_then_green_is_good(
    untouched: list[object], patched: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert RUN.report(["a"], {"a": BEFORE}, {"a": AFTER}) == 0
    assert "NOT AS IT SHOULD BE" not in capsys.readouterr().out
    assert RUN.report(["a", "b"], {"a": untouched, "b": BEFORE}, {"a": patched, "b": AFTER}) == 1
    assert capsys.readouterr().out.count("NOT AS IT SHOULD BE") == 1


def test_the_patched_tree_has_copies_of_what_changes_and_links_to_the_rest(tmp_path: Path) -> None:
    patches = [RUN.patch_of(fault) for fault in RUN.FAULTS]
    place = RUN.make_patched_tree(PACKAGE, tmp_path / "tree", patches) / "sglang"
    changed = set(re.findall(r"^\+\+\+ b/python/sglang/(.*)$", "".join(path.read_text() for path in patches), re.M))
    copies = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file() and not linked(path)}
    assert copies == changed
    assert all((place / path).read_bytes() != (PACKAGE / path).read_bytes() for path in changed)
    assert {path.name for path in place.iterdir()} == {path.name for path in PACKAGE.iterdir()}


def linked(path: Path) -> bool:
    return path.resolve().is_relative_to(PACKAGE.resolve())


def test_a_wrong_call() -> None:
    done = subprocess.run([sys.executable, UPSTREAM / "run.py", "--fault", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def run(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, UPSTREAM / "run.py", *arguments], capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_one_fault_before_and_after() -> None:
    row = run("--fault", "ray-plugins")[-1]
    assert " ".join(row.split()) == "ray-plugins 1 0 red (1 run) green (1 run)"


@pytest.mark.longest
def test_every_fault_before_and_after() -> None:
    head, *rows = run()
    assert " ".join(head.split()) == "fault repro untouched repro patched unit test untouched unit test patched"
    assert [row.split()[0] for row in rows] == list(RUN.FAULTS)
