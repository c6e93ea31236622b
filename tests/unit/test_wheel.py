"""What the wheel brings into an environment, and that uninstalling takes all of it out again."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from email.parser import BytesParser
from importlib.machinery import SourceFileLoader
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import tomllib
from packaging.requirements import Requirement

from sglang_pp_mla import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: object, cwd: Path = ROOT) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tree."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


def build_wheel(source: Path, out: Path) -> Path:
    builder = run(sys.executable, ROOT / "tools/env", "build")
    run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_the_installed_package_carries_its_pth_and_entry_points():
    installed = distribution("sglang-pp-mla")
    assert "sglang_pp_mla.pth" in [str(file) for file in installed.files or ()]
    points = {(point.group, point.name): point.value for point in installed.entry_points}
    assert points[("sglang.srt.plugins", "sglang_pp_mla")] == "sglang_pp_mla.wiring:arm"
    assert ("console_scripts", "sglang-pp-mla") in points
    for file in ("sglang_pp_mla/py.typed", "sglang_pp_mla/rehearsal/models/kimi-k2.6-text.json"):
        assert file in [str(each) for each in installed.files or ()]


def test_sglang_torch_and_triton_are_not_pulled_in():
    required = [line for line in distribution("sglang-pp-mla").requires or () if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in required) == ["packaging", "pluggy", "rich", "typer", "wrapt"]


def test_uninstalling_leaves_nothing_behind(tmp_path, wheel):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))

    def everything() -> set[str]:
        return {str(path.relative_to(tmp_path / "venv")) for path in (tmp_path / "venv").rglob("*")}

    before = everything()
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    assert (site / "sglang_pp_mla.pth").is_file()
    assert "sglang_pp_mla.wiring.autoload" in run(python, "-c", "import sys; print(*sys.modules)")
    run(python, "-m", "pip", "uninstall", "-q", "-y", "sglang-pp-mla")
    assert {path for path in everything() - before if "__pycache__" not in path} == set()
    assert run(python, "-c", "import sys; print('sglang_pp_mla' in sys.modules)") == "False"


# A release; the whole of it is `make release-check`


def test_the_wheel_is_the_same_bytes_from_another_folder_at_another_time(tmp_path: Path, wheel: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, other / name)  # of today, and with the mode of a new file
    shutil.copytree(ROOT / "sglang_pp_mla", other / "sglang_pp_mla", copy_function=shutil.copyfile)
    again = build_wheel(other, tmp_path / "dist")
    assert again.name == wheel.name
    assert hashlib.sha256(again.read_bytes()).hexdigest() == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_page_on_an_index_has_no_dead_link_and_all_of_the_text(wheel: Path) -> None:
    with ZipFile(wheel) as held:
        (name,) = [each for each in held.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = BytesParser().parsebytes(held.read(name))
    page = metadata.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    assert "![" not in page
    assert re.findall("^#.*", page, re.M) == re.findall("^#.*", readme, re.M)
    for text in re.findall(r"(?<!!)\[([^\]]+)\]\((?!https)", readme):
        assert text in page, text


def test_the_version_is_in_one_place() -> None:
    assert distribution("sglang-pp-mla").version == __version__
    assert PROJECT["project"]["dynamic"] == ["readme", "version"]
    holders = [path for path in (ROOT / "sglang_pp_mla").rglob("*.py") if f'"{__version__}"' in path.read_text()]
    assert holders == [ROOT / "sglang_pp_mla" / "__init__.py"]


def release_tool() -> ModuleType:
    loader = SourceFileLoader("release", str(ROOT / "tools" / "release"))
    spec = spec_from_loader("release", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "first", "good"),
    [
        ("0.1.0", "0.1.0 (2026-12-31)", True),
        ("0.1.0", "Unreleased", False),
        ("0.1.0", "0.1.0", False),
        ("0.1.0", "0.1.1 (2026-12-31)", False),
        ("0.1.0.dev0", "Unreleased", True),
        ("0.1.0.dev0", "0.1.0 (2026-12-31)", False),
    ],
)
def test_a_version_has_its_section_in_the_changelog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, first: str, good: bool
) -> None:
    tool = release_tool()
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {first}\n\n- A change.\n\n## 0.0.9 (2026-01-01)\n")
    if good:
        assert tool.changelog_section(version) == first
    else:
        with pytest.raises(tool.Failure, match=re.escape(f"begins with `## {first}`")):
            tool.changelog_section(version)


def test_the_changelog_has_the_section_of_this_version() -> None:
    assert release_tool().changelog_section(__version__)


def test_what_is_installed_here_is_what_pyproject_allows() -> None:
    """The newest end is in the locks; the oldest is for `make release-check`."""
    for requirement in map(Requirement, PROJECT["project"]["dependencies"]):
        assert len(requirement.specifier) == 1, "a lower bound and no other: the host's versions stand"
        assert requirement.specifier.contains(distribution(requirement.name).version)


# SECURITY.md


def test_what_runs_in_every_process_is_what_the_page_says() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    assert "`python -X importtime -c pass`" in page
    code = [sys.executable, "-P", "-X", "importtime", "-c", "pass"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    imported = re.findall(r"\| +(sglang_pp_mla[\w.]*)$", done.stderr, re.M)
    bullet = page.split("importtime", 1)[1].split("\n- ", 1)[0]
    assert sorted(imported) == sorted(re.findall(r"`(sglang_pp_mla[\w.]*)`", bullet))
    (pth,) = [each.locate() for each in distribution("sglang-pp-mla").files or () if each.suffix == ".pth"]
    assert Path(pth) == Path(sysconfig.get_path("purelib")) / "sglang_pp_mla.pth"
    assert len(Path(pth).read_text().splitlines()) == 1


def test_the_entry_point_that_remains_without_the_pth_is_the_one_the_page_names() -> None:
    (point,) = distribution("sglang-pp-mla").entry_points.select(group="sglang.srt.plugins")
    page = " ".join((ROOT / "SECURITY.md").read_text().split())
    assert f"entry point `{point.name}` in the group `{point.group}`" in page
