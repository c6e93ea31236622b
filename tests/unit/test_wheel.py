"""What the wheel brings into an environment, and that uninstalling takes all of it out again."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


def test_uninstalling_leaves_nothing_behind(tmp_path):
    builder = run(sys.executable, ROOT / "tools/env", "build")
    run(builder, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
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
