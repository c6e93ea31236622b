"""tools/env: its locks, and whole runs of it on a small lock in a copy of this clone."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "tools" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELEASES = sorted((path.stem.removeprefix("sglang-") for path in LOCKS.glob("sglang-*.txt")), key=Version)


def pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines)}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("tools_env", str(ROOT / "tools" / "env"))
    spec = importlib.util.spec_from_loader("tools_env", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.ENVS.mkdir(parents=True)
    return module


class TestLocks:
    def test_the_releases_of_the_incident_and_of_today_have_one(self) -> None:
        assert {"0.5.11", "0.5.23"} <= set(RELEASES)

    @pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
    def test_every_line_is_one_exact_version(self, lock: Path) -> None:
        header, *lines = lock.read_text().splitlines()
        assert header.startswith("# Made by `tools/env --relock ")
        assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.!+]+", line)] == []
        assert len(pins(lock)) == len(lines)

    @pytest.mark.parametrize("release", RELEASES)
    def test_a_release_is_locked_with_what_this_package_and_its_tests_need(self, release: str) -> None:
        locked = pins(LOCKS / f"sglang-{release}.txt")
        wanted = (LOCKS / f"sglang-{release}.in").read_text().splitlines()
        wanted += PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["test"]
        assert locked["sglang"] == release
        for requirement in (Requirement(line) for line in wanted if not line.startswith("#")):
            pin = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin, prereleases=True), (requirement, pin)

    def test_linters_have_the_same_version_wherever_one_is_named(self) -> None:
        locked = pins(LOCKS / "lint.txt")
        named = list(PROJECT["dependency-groups"]["lint"])
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]:
            for hook in repository["hooks"]:
                named += hook["additional_dependencies"]
        for requirement in map(Requirement, named):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement

    def test_the_build_tools_are_what_pyproject_builds_with(self) -> None:
        locked = pins(LOCKS / "build.txt")
        for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


class TestRefusals:
    def test_an_unknown_release_names_the_known_ones_and_how_to_add_it(self) -> None:
        answer = subprocess.run([ROOT / "tools" / "env", "0.4.9"], capture_output=True, text=True)
        assert answer.returncode == 2
        assert answer.stdout == ""
        (line,) = answer.stderr.splitlines()
        assert all(release in line for release in RELEASES)
        assert "tools/env --relock 0.4.9" in line

    @pytest.mark.parametrize(
        "arguments",
        ["", "--list 0.5.11", "--path", "--remove ../x", "a/b", "*", "--list --path 0.5.11", "0.5.11 0.5.23"],
    )
    def test_a_wrong_call(
        self,
        tool: ModuleType,
        arguments: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["tools/env", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            tool.main()
        assert stop.value.code == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert "usage: tools/env" in errors

    def test_too_little_disk(self, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil._ntuple_diskusage(total=20e9, used=16.8e9, free=3.2e9)
        monkeypatch.setattr(tool.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(
            tool.Refusal, match=r"0\.5\.11 needs 16 GB of free disk and .* has 3\.2 GB: .*XDG_CACHE_HOME"
        ):
            tool.check_machine("0.5.11", None)

    def test_too_little_memory(self, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tool.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(90e9, 10e9, 80e9))
        monkeypatch.setattr(tool, "memory_gb", lambda: 1.5)
        with pytest.raises(tool.Refusal, match=r"needs 6 GB of free memory and this machine has 1\.5 GB: .*--force"):
            tool.check_machine("0.5.11", None)

    def test_no_python_of_the_locks_version(self, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tool, "PYTHON", "3.1")
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
        with pytest.raises(tool.Refusal, match=r"no Python 3\.1 .* is on PATH: install it"):
            tool.find_python()


class Clone:
    """A copy of this clone whose only release is a small one, with a cache of its own."""

    release = "9.9.9"

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.envs = cache / "sglang-pp-mla" / "envs"
        self.envs.mkdir(parents=True)
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        # The small packages come from the user's downloads where they are there.
        self.environment = {"UV_CACHE_DIR": str(user_cache / "uv"), "PIP_CACHE_DIR": str(user_cache / "pip")}
        self.environment = {**self.environment, **os.environ, "XDG_CACHE_HOME": str(cache)}
        for name in ("tools", "sglang_pp_mla"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "sglang-*"))
        for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
            shutil.copy(ROOT / name, folder / name)
        everything = pins(LOCKS / f"sglang-{RELEASES[0]}.txt")
        self.lock = folder / "tools" / "locks" / f"sglang-{self.release}.txt"
        self.lock.write_text("".join(f"{name}=={everything[name]}\n" for name in ("packaging", "pluggy", "wrapt")))
        self.borrow_build_tools(user_cache / "sglang-pp-mla" / "envs")

    def borrow_build_tools(self, envs: Path) -> None:
        """Making these takes half a minute, and they are at hand where tools/env made this environment."""
        for place in envs.glob("build-*"):
            if (place / ".complete").exists():
                (self.envs / place.name).symlink_to(place)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, self.folder / "tools" / "env", *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=300)
        return process.returncode, output, errors

    def make(self, **environment: str) -> tuple[Path, str]:
        code, output, errors = self.call("--force", self.release, **environment)
        assert code == 0, errors
        return Path(output.removesuffix("\n")), errors

    def places(self) -> list[str]:
        return sorted(path.name for path in self.envs.glob(f"{self.release}-*"))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone", tmp_path / "cache")


def run(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout.strip()


@pytest.mark.skipif(version("sglang") != RELEASES[-1], reason="whole runs of tools/env are the same on any release")
class TestWholeRuns:
    def test_from_nothing_then_again_then_with_changed_source(self, clone: Clone) -> None:
        python, errors = clone.make()
        assert f"making {python.parent.parent}: 3 packages" in errors
        assert run(python, "import sglang_pp_mla.stage as stage; print(stage.__file__)").startswith(str(clone.envs))
        assert list(python.parent.parent.glob("lib/python*/site-packages/sglang_pp_mla.pth"))

        began = time.monotonic()
        assert clone.make() == (python, "")
        assert time.monotonic() - began < 5

        with open(clone.folder / "sglang_pp_mla" / "stage.py", "a") as source:
            source.write("\nCHANGED = True\n")
        _, errors = clone.make()
        assert "installing this package" in errors
        assert "making" not in errors
        assert run(python, "import sglang_pp_mla.stage as stage; print(stage.CHANGED)") == "True"
        assert clone.call("--path", clone.release)[:2] == (0, f"{python}\n")

    def test_a_changed_lock_makes_a_new_one_and_removes_only_the_old_one(self, clone: Clone) -> None:
        old, _ = clone.make()
        foreign = clone.envs / f"{clone.release}-notes"
        foreign.mkdir()
        clone.lock.write_text(clone.lock.read_text() + "# changed\n")
        new, _ = clone.make()
        assert new != old
        assert clone.places() == sorted([new.parent.parent.name, foreign.name])

    def test_a_half_built_one_and_one_whose_python_is_gone_are_made_anew(self, clone: Clone) -> None:
        python, _ = clone.make()
        place = python.parent.parent
        (place / ".complete").unlink()
        (place / "left over").touch()
        assert clone.call("--path", clone.release)[0] == 2
        again, errors = clone.make()
        assert again == python
        assert f"making {place}" in errors
        assert not (place / "left over").exists()

        python.unlink()
        python.symlink_to("/nonexistent/python3.11")
        assert "making" in clone.make()[1]
        assert run(python, "print(1)") == "1"

    def test_two_callers_at_once_build_once(self, clone: Clone) -> None:
        callers = [clone.start("--force", clone.release) for _ in range(2)]
        answers = [caller.communicate(timeout=300) for caller in callers]
        assert [caller.returncode for caller in callers] == [0, 0]
        assert answers[0][0] == answers[1][0]
        assert sum(f"making {clone.envs / clone.release}" in errors for _, errors in answers) == 1

    def test_pip_does_it_where_uv_cannot(self, clone: Clone, tmp_path: Path) -> None:
        python, errors = clone.make(UV_OFFLINE="1", UV_CACHE_DIR=str(tmp_path / "empty"))
        assert "trying once more with pip" in errors
        assert run(python, "import pluggy, sglang_pp_mla.stage; print(1)") == "1"

    def test_a_package_that_the_registry_lacks_fails_and_leaves_nothing_that_counts(self, clone: Clone) -> None:
        clone.lock.write_text("pluggy==0.0.0.1\n")
        code, output, errors = clone.call("--force", clone.release)
        assert (code, output) == (1, "")
        assert errors.splitlines()[-1].startswith("tools/env: this failed")
        assert clone.call("--path", clone.release)[0] == 2

    def test_list_and_remove(self, clone: Clone) -> None:
        assert re.search(rf"^{clone.release} +not built ", clone.call("--list")[1], re.M)
        clone.make()
        assert re.search(rf"^{clone.release} +built ", clone.call("--list")[1], re.M)
        assert clone.call("--remove", clone.release)[0] == 0
        assert clone.places() == []
