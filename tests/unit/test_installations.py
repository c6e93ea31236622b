"""How the package may be installed and Python be started: armed once, by a copy that is named, or not at all.

Scratch environments hold the wheel, the two packages it needs while it arms, and a small package called
sglang: these tests are about interpreter start and wiring, none about SGLang's code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.unit.small_sglang import FAULTY, IMPORT_ALL, STATES, write

ROOT = Path(__file__).parents[2]
APPLIED = ["triton-pp applied", "buffer-probe applied"]
LOADED = "import sys; print('sglang_pp_mla' in sys.modules)"
WHERE = "import sglang_pp_mla; print(sglang_pp_mla.__file__)"
ENTRY_POINT = """
from importlib.metadata import entry_points
for point in entry_points(group="sglang.srt.plugins"):
    point.load()()
"""


def build(editable: bool, folder: Path) -> Path:
    """The wheel of this clone, or the one that ``pip install -e`` would make and install."""
    python = subprocess.run([sys.executable, ROOT / "tools/env", "build"], capture_output=True, text=True, check=True)
    hook = "build_editable" if editable else "build_wheel"
    code = f"import sys, hatchling.build; hatchling.build.{hook}(sys.argv[1])"
    subprocess.run([python.stdout.strip(), "-c", code, folder], cwd=ROOT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(False, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with a small sglang and without this package."""
    place = tmp_path_factory.mktemp("host") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    for name in ("wrapt", "pluggy"):
        for file in distribution(name).files or ():
            source = Path(str(file.locate()))
            if source.suffix != ".pyc" and ".." not in file.parts:
                (site(place) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, site(place) / file)
    write(site(place), FAULTY)
    return place


@pytest.fixture
def venv(host: Path, wheel: Path, tmp_path: Path) -> Path:
    """An environment with both, to be changed at will."""
    place = tmp_path / "venv"
    shutil.copytree(host, place, symlinks=True)
    install(wheel, site(place))
    return place


def site(venv: Path) -> Path:
    (found,) = venv.glob("lib/python*/site-packages")
    return found


def install(wheel: Path, folder: Path) -> None:
    """As an installer does; a wheel of ours needs no more than unpacking."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def run(
    venv: Path, *script: str, options: tuple[str, ...] = (), cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    ours = ("PYTHON", "SGLANG_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return subprocess.run(
        [venv / "bin/python", *options, "-c", "\n".join(script)],
        cwd=cwd or venv,
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def quiet(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What it printed; it must have succeeded without a word on standard error."""
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


# How Python is started


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-s",), ("-P",), ("-O",), ("-OO",), ("-B",)])
def test_it_is_armed_however_python_is_started(venv: Path, options: tuple[str, ...]) -> None:
    if options == ("-P",) and sys.version_info < (3, 11):
        options = ()
    assert quiet(run(venv, IMPORT_ALL, STATES, options=options)) == APPLIED


def test_without_site_nothing_happens_until_sglang_loads_its_plugins(venv: Path) -> None:
    path = f"import sys; sys.path.append({str(site(venv))!r})"
    stock = "print(type(vars(sglang.srt.model_executor.model_runner.ModelRunner)['init_attention_backend']).__name__)"
    done = run(venv, path, LOADED, IMPORT_ALL, stock, LOADED, ENTRY_POINT, STATES, options=("-S",))
    assert quiet(done) == ["False", "function", "False", *APPLIED]


def test_an_overlay_of_sglang_is_the_one_that_is_looked_at(venv: Path, tmp_path: Path) -> None:
    """The fault is in the overlay only, then in site-packages only."""
    probing = "srt/layers/attention/triton_backend.py"
    faulty, sound = FAULTY[f"sglang/{probing}"], "class TritonAttnBackend: pass\n"
    for name, theirs, ours in (("faulty", faulty, sound), ("sound", sound, faulty)):
        write(tmp_path / name, FAULTY | {f"sglang/{probing}": theirs})
        (site(venv) / "sglang" / probing).write_text(ours.strip() if ours is sound else "x.get_value_buffer(0)\n")
        states = quiet(run(venv, IMPORT_ALL, STATES, PYTHONPATH=str(tmp_path / name)))
        assert states[1] == ("buffer-probe applied" if name == "faulty" else "buffer-probe not needed")


def test_an_sglang_that_is_a_namespace_package_is_mended(venv: Path) -> None:
    (site(venv) / "sglang/__init__.py").unlink()
    assert quiet(run(venv, IMPORT_ALL, STATES)) == APPLIED


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_site_packages_that_cannot_be_written_to_will_do(venv: Path, tmp_path: Path) -> None:
    def everything() -> set[Path]:
        return set(tmp_path.rglob("*"))

    folders = [path for path in (venv, *venv.rglob("*")) if path.is_dir() and not path.is_symlink()]
    for folder in folders:
        folder.chmod(0o555)
    before = everything()
    try:
        may_not_write = "\n".join(
            (
                "import ctypes, os, sys",
                # Root may write anywhere by this capability: out of the bounding set, the next program lacks it.
                "ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)",
                "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])",
            )
        )
        tried = f"try:\n open({str(site(venv) / 'new')!r}, 'w')\nexcept OSError as error:\n print(type(error).__name__)"
        done = subprocess.run(
            [venv / "bin/python", "-S", "-c", may_not_write, "\n".join((tried, IMPORT_ALL, STATES))],
            cwd=tmp_path,
            env={"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert quiet(done) == ["PermissionError", *APPLIED]
        assert everything() == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


# How it is installed


def test_of_two_copies_the_first_is_armed_once_and_both_are_named(venv: Path, wheel: Path, tmp_path: Path) -> None:
    """A wheel in site-packages and another copy, with its metadata, before it."""
    other = tmp_path / "other"
    install(wheel, other)
    (site(venv) / "sglang_pp_mla/__init__.py").write_text("__version__ = '0.0.1'\n")
    wrapped = "print(sglang.srt.server_args.ServerArgs.__post_init__.__wrapped__.__class__.__name__)"
    done = run(venv, IMPORT_ALL, ENTRY_POINT, STATES, WHERE, wrapped, PYTHONPATH=str(other))
    assert done.returncode == 0, done.stderr
    used, unused = other / "sglang_pp_mla", site(venv) / "sglang_pp_mla"
    assert done.stdout.splitlines() == [*APPLIED, str(used / "__init__.py"), "function"]
    assert done.stderr.count("\n") == 1
    assert f"is on the path twice: {used} is used, {unused} is not; uninstall one" in done.stderr


def test_isolated_python_takes_the_installed_copy_without_a_word(venv: Path, wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path / "other")
    for option in ("-I", "-E"):
        done = run(venv, IMPORT_ALL, STATES, WHERE, options=(option,), PYTHONPATH=str(tmp_path / "other"))
        assert quiet(done) == [*APPLIED, str(site(venv) / "sglang_pp_mla/__init__.py")]


def test_a_clone_one_stands_in_is_no_second_copy(venv: Path, wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path / "clone")
    done = run(venv, IMPORT_ALL, STATES, WHERE, cwd=tmp_path / "clone")
    assert quiet(done) == [*APPLIED, str(site(venv) / "sglang_pp_mla/__init__.py")]


def test_two_copies_are_nobodys_business_where_all_is_switched_off(venv: Path, wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path / "other")
    environment = {"PYTHONPATH": str(tmp_path / "other"), "SGLANG_PP_MLA_DISABLE": "1"}
    assert quiet(run(venv, IMPORT_ALL, "print('ok')", **environment)) == ["ok"]


def test_a_current_folder_that_is_gone_does_not_matter(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r})"
    done = run(venv, gone, "import sys; sys.path.remove('')", IMPORT_ALL, STATES)
    assert quiet(done) == APPLIED


def test_an_editable_install_is_armed_in_every_process(host: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    shutil.copytree(host, place, symlinks=True)
    install(build(True, tmp_path), site(place))
    assert not (site(place) / "sglang_pp_mla").exists()
    done = run(place, IMPORT_ALL, STATES, WHERE)
    assert quiet(done) == [*APPLIED, str(ROOT / "sglang_pp_mla/__init__.py")]
    assert quiet(run(place, LOADED)) == ["True"]


# What is left of it


def test_a_pth_that_outlives_its_package_is_silent(venv: Path) -> None:
    shutil.rmtree(site(venv) / "sglang_pp_mla")
    assert quiet(run(venv, LOADED, IMPORT_ALL, LOADED)) == ["False", "False"]


def test_a_package_that_is_broken_is_reported_and_python_starts(venv: Path) -> None:
    (site(venv) / "sglang_pp_mla/wiring/autoload.py").unlink()
    done = run(venv, IMPORT_ALL, "print('ok')")
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "No module named 'sglang_pp_mla.wiring.autoload'" in done.stderr


def test_without_the_pth_the_entry_point_still_arms(venv: Path) -> None:
    (site(venv) / "sglang_pp_mla.pth").unlink()
    assert quiet(run(venv, LOADED, IMPORT_ALL, ENTRY_POINT, STATES)) == ["False", *APPLIED]


@pytest.mark.parametrize("missing", ["wrapt", "pluggy"])
def test_what_it_needs_may_be_gone(venv: Path, missing: str) -> None:
    shutil.rmtree(site(venv) / missing)
    done = run(venv, IMPORT_ALL, "print('ok')")
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert f"No module named '{missing}'" in done.stderr
