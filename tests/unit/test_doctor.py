"""The doctor: on the real installation, and on small ones in which one thing is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_pp_mla import doctor, releases
from sglang_pp_mla.doctor import Finding, Start
from sglang_pp_mla.fixes import BUILT_IN
from tests.unit.small_sglang import FAULTY, write

ROOT = Path(__file__).parents[2]
KERNELS = """
class LayerRepository:
    def __init__(self, repo_id, *, layer_name, revision=None, version=None):
        if revision is None and version is None:
            raise ValueError("Either a revision or a version must be specified.")
"""
HUB_KERNELS = """
from kernels import LayerRepository
MAPPING = {"RMSNorm": {"cuda": LayerRepository(repo_id="kernels-community/norms", layer_name="RMSNorm"%s)}}
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    return place


@pytest.fixture
def site(venv: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty site-packages of an environment of its own; what a test puts there goes afterwards."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (found,) = venv.glob("lib/python*/site-packages")
    shutil.rmtree(found)
    found.mkdir()
    return found


def start_of(venv: Path) -> Start:
    return doctor.ask_start(str(venv / "bin/python"))


def starting(*path: Path, sglang: Path | None = None, **other: object) -> Start:
    given = {"armed": True, "ours": None, **other}
    return Start(path=tuple(map(str, path)), sglang=sglang, **given)  # type: ignore[arg-type]


def metadata(site: Path, name: str, number: str, *requires: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    write(site, {f"{name}-{number}.dist-info/METADATA": "\n".join(lines) + "\n"})


def cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_pp_mla.cli", "doctor", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_PP_MLA_DISABLE"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment | env)


# The real installation


def test_the_installed_release_and_the_states_that_its_faults_call_for() -> None:
    done = cli("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.keys() == {"sglang", "fixes", "installation"}
    assert report["sglang"] == version("sglang")
    faulty = {
        name for name, files in releases.FAULTS.items() if any(report["sglang"] in span for span in files.values())
    }
    assert {fix["name"]: fix["state"] for fix in report["fixes"] if fix["name"] in releases.FAULTS} == {
        fix.name: "armed" if fix.name in faulty else "not needed" for fix in BUILT_IN
    }
    assert all(fix.keys() == {"name", "state", "why", "upstream"} and fix["why"] for fix in report["fixes"])
    status = {each["id"]: each["status"] for each in report["installation"]}
    assert all(each.keys() == {"id", "status", "remedy"} for each in report["installation"])
    assert status["triton_pp"] == status["import-kernels"] == status["requirements"] == "pass"
    assert "fail" not in status.values()


def test_it_imports_no_sglang_and_no_torch() -> None:
    code = (
        "import sys; from sglang_pp_mla.doctor import examine; examine(); print({'sglang', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_report_names_no_home_folder() -> None:
    home = str(Path(sys.executable).parents[2])  # SGLang is below it
    for option in ([], ["--json"]):
        done = cli(*option, HOME=home)
        assert done.returncode == 0
        assert home + "/" not in done.stdout
    assert f"in ~{os.sep}" in cli(HOME=home).stdout


def test_what_is_switched_off_is_said_to_be() -> None:
    report = json.loads(cli("--json", SGLANG_PP_MLA_DISABLE="buffer-probe").stdout)
    (fix,) = [fix for fix in report["fixes"] if fix["name"] == "buffer-probe"]
    assert (fix["state"], fix["why"]) == ("disabled", "by SGLANG_PP_MLA_DISABLE=buffer-probe")
    assert "triton_pp is off" in cli(SGLANG_PP_MLA_DISABLE="1").stdout


def test_a_wrong_call_is_one_sentence_and_2(tmp_path: Path) -> None:
    for name in ("report.pdf", "nowhere/report.svg"):
        done = cli("--save", str(tmp_path / name))
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert name in done.stderr


@pytest.mark.parametrize(("name", "holds"), [("report.svg", "<svg"), ("report.html", "<!DOCTYPE html>")])
def test_the_report_can_be_saved(tmp_path: Path, name: str, holds: str) -> None:
    done = cli("--json", "--save", str(tmp_path / name))
    assert json.loads(done.stdout)["fixes"]
    text = (tmp_path / name).read_text()
    assert text.startswith(holds)
    assert "buffer-probe" in text


# Installations with one thing wrong


def test_no_sglang_is_a_failure_and_no_crash(venv: Path, site: Path) -> None:
    report = doctor.examine(python=str(venv / "bin/python"))
    assert (report.sglang, report.serves) == (None, False)
    assert "pip install sglang" in report.installation[0].remedy


def test_an_interpreter_that_does_not_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(doctor.DoctorError, match=r"^The interpreter \S+ could not be started .*\.$"):
        doctor.examine(python=str(tmp_path / "python"))


def test_a_wheel_an_editable_install_sources_and_an_overlay_are_told_apart(
    venv: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(site, FAULTY | {"sglang/_version.py": "__version__ = version = '0.5.11'"})
    metadata(site, "sglang", "0.5.11")

    def origin() -> tuple[str | None, Finding]:
        start = start_of(venv)
        assert start.sglang is not None
        release = doctor.release_of(start.sglang, start.path)
        return release, doctor.sglang_origin(start, release)

    release, finding = origin()
    assert (release, finding.status) == ("0.5.11", "pass")
    assert "0.5.11, a wheel, in" in finding.found
    direct = site / "sglang-0.5.11.dist-info/direct_url.json"
    direct.write_text(json.dumps({"url": "https://host/sglang", "vcs_info": {"vcs": "git", "commit_id": "c0ffee" * 7}}))
    assert "built from source at c0ffeec0ffee" in origin()[1].found

    write(tmp_path / "over", FAULTY | {"sglang/version.py": '__version__ = "0.5.16"'})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "over"))
    release, finding = origin()
    assert (release, finding.status) == ("0.5.16", "warn")
    assert "an overlay on PYTHONPATH" in finding.found
    assert str(site / "sglang") in finding.found

    monkeypatch.delenv("PYTHONPATH")
    shutil.rmtree(site / "sglang")
    (site / "sglang.pth").write_text(f"{tmp_path / 'over'}\n")
    direct.write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    assert "0.5.16, an editable install, in" in origin()[1].found


def test_states_are_read_from_the_source_that_is_there(tmp_path: Path) -> None:
    write(tmp_path, FAULTY)
    states = {fix.name: fix for fix in doctor.states(tmp_path / "sglang", BUILT_IN, "triton-pp")}
    assert states["triton-pp"].state == "disabled"
    assert states["buffer-probe"].state == "armed"
    assert states["buffer-probe"].why == "found in srt/layers/attention/triton_backend.py:4"
    assert states["mla-geometry"].state == "not needed"


def test_a_pth_file_that_raises_is_named_and_ours_is_a_failure(venv: Path, site: Path) -> None:
    assert doctor.pth_files(start_of(venv)).status == "pass"
    (site / "other.pth").write_text("import no_such_module_anywhere\n")
    finding = doctor.pth_files(start_of(venv))
    assert (finding.status, finding.found) == ("warn", f"does not run: {site / 'other.pth'}")
    (site / "sglang_pp_mla.pth").write_text("import sglang_pp_mla.wiring.autoload\n")  # and the package is gone
    assert doctor.pth_files(start_of(venv)).status == "fail"


def test_what_arms_the_package_is_seen_from_a_process_that_starts(venv: Path, site: Path) -> None:
    assert doctor.arming(start_of(venv), "0.5.11", "").status == "fail"
    shutil.copytree(ROOT / "sglang_pp_mla", site / "sglang_pp_mla", ignore=shutil.ignore_patterns("__pycache__"))
    write(
        site, {"sglang_pp_mla-1.dist-info/entry_points.txt": "[sglang.srt.plugins]\nsglang_pp_mla = sglang_pp_mla:arm"}
    )
    metadata(site, "sglang_pp_mla", "1")
    by_plugin = start_of(venv)
    assert doctor.arming(by_plugin, "0.5.11", "").status == "warn"
    assert doctor.arming(by_plugin, "0.5.10", "").status == "fail"  # it loads no plugins
    shutil.copy(ROOT / "sglang_pp_mla/wiring/sglang_pp_mla.pth", site)
    assert doctor.arming(start_of(venv), "0.5.10", "").status == "pass"


def test_a_second_copy_of_this_package_is_named(
    venv: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(venv)  # the clone holds a copy
    for folder in (site, tmp_path):
        write(folder, {"sglang_pp_mla/__init__.py": ""})
    assert doctor.copies(start_of(venv)).status == "pass"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.copies(start_of(venv))
    assert finding.status == "warn"
    assert finding.found == f"used is {tmp_path / 'sglang_pp_mla'}, not used {site / 'sglang_pp_mla'}"


def test_the_plugin_that_changes_what_we_change_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[sglang.srt.plugins]\nsglang_pp_mla = sglang_pp_mla.wiring:arm\nrouter = router.plugin:register\n"
    write(tmp_path, {"them-1.dist-info/entry_points.txt": points + "attention = attention:register\n"})
    metadata(tmp_path, "them", "1")
    write(
        tmp_path,
        {
            "router/plugin.py": "def register(): ...",
            "attention.py": "def register():\n    from sglang.srt.layers.attention import attention_registry\n",
        },
    )
    finding = doctor.plugins(starting(tmp_path), "0.5.11")
    assert (finding.status, finding.found) == (
        "warn",
        "router (router.plugin:register), attention (attention:register)",
    )
    assert finding.remedy.startswith("attention may change")
    assert doctor.plugins(starting(tmp_path), "0.5.10").status == "skip"
    monkeypatch.setenv("SGLANG_PLUGINS", "router")
    assert doctor.plugins(starting(tmp_path, armed=False), "0.5.11").status == "fail"
    monkeypatch.delenv("SGLANG_PLUGINS")
    write(tmp_path, {"attention.py": "def register(): ..."})
    assert doctor.plugins(starting(tmp_path), "0.5.11").status == "pass"
    monkeypatch.setenv("SGLANG_PLUGINS", "router")
    assert doctor.plugins(starting(tmp_path), "0.5.11").status == "pass"  # the .pth does without
    assert doctor.plugins(starting(tmp_path, armed=False), "0.5.11").status == "fail"


def test_kernels_that_transformers_names_without_a_version_fail(tmp_path: Path) -> None:
    hub = "transformers/integrations/hub_kernels.py"
    write(tmp_path, {"kernels/__init__.py": "", "kernels/layer/layer.py": KERNELS, "transformers/__init__.py": ""})
    write(tmp_path, {hub: HUB_KERNELS % ""})
    metadata(tmp_path, "kernels", "0.17.0")
    metadata(tmp_path, "transformers", "5.6.0")
    finding = doctor.kernels_pin([str(tmp_path)])
    assert (finding.status, finding.found) == ("fail", "kernels 0.17.0, transformers 5.6.0")
    assert "'kernels>=0.12,<0.15'" in finding.remedy
    write(tmp_path, {hub: HUB_KERNELS % ", version=1"})
    assert doctor.kernels_pin([str(tmp_path)]).status == "pass"
    write(tmp_path, {hub: HUB_KERNELS % "", "kernels/layer/layer.py": "class LayerRepository: ..."})
    assert doctor.kernels_pin([str(tmp_path)]).status == "pass"
    assert doctor.kernels_pin([]).status == "skip"


def test_requirements_that_are_absent_or_of_another_version_are_named(tmp_path: Path) -> None:
    write(tmp_path, FAULTY)
    wanted = ("here>=2", "old>=2", "older>=1.7", "gone")
    wanted += ("elsewhere; platform_system == 'Windows'", "extra-one; extra == 'test'")
    metadata(tmp_path, "sglang", "0.5.11", *wanted)
    metadata(tmp_path, "here", "2.1.dev3")
    metadata(tmp_path, "old", "1.9")
    write(tmp_path, {"older.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: older\nVersion: 1.8\n"})
    finding = doctor.requirements(starting(tmp_path, sglang=tmp_path / "sglang"))
    assert (finding.status, finding.found) == ("warn", "old 1.9 (wants >=2), gone (absent)")


def test_the_interpreter_of_triton_and_numpy(tmp_path: Path) -> None:
    interpreter = "triton/runtime/interpreter.py"
    write(tmp_path, {"triton/__init__.py": "", interpreter: "lambda self: int(self.handle.data)"})
    metadata(tmp_path, "numpy", "2.4.6")
    assert doctor.interpreter_numpy([str(tmp_path)]).status == "warn"
    write(tmp_path, {interpreter: "lambda self: int(self.handle.data.squeeze())"})
    assert doctor.interpreter_numpy([str(tmp_path)]).status == "pass"


def test_gpus_of_a_kind_are_counted() -> None:
    lines = ["NVIDIA L40S, 575.57.08, 46068 MiB"] * 2 + ["NVIDIA RTX A6000, 575.57.08, 49140 MiB"]
    assert doctor.describe_gpus("\n".join(lines)) == (
        "2 x NVIDIA L40S, 46068 MiB, driver 575.57.08; 1 x NVIDIA RTX A6000, 49140 MiB, driver 575.57.08"
    )


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("echo 'NVIDIA L40S, 575.57.08, 46068 MiB'", "pass"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "fail"),
        ("exec sleep 60", "fail"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_failure(
    answer: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi is what this machine lacks."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "_GPU_S", 0.5 if status == "fail" else 20)
    began = time.monotonic()
    finding = doctor.gpu(doctor._ask_for_gpus())
    assert time.monotonic() - began < 30
    assert finding.status == status
    assert ("nvidia-smi" in finding.remedy) == (status == "fail")


def test_a_gpu_without_its_library_is_a_failure_and_a_laptop_is_not() -> None:
    assert doctor.driver_library(starting(libcuda=False), there=True).status == "fail"
    assert doctor.driver_library(starting(libcuda=True), there=True).status == "pass"
    if not Path("/dev/nvidiactl").exists():
        assert doctor.driver_library(starting(libcuda=False), there=False).status == "skip"


# With SGLang imported


def test_what_an_import_of_sglang_shows() -> None:
    registered = {"triton": "sglang.srt.layers.attention.attention_registry.create_triton_backend"}
    good = {"failed": {}, "choices": ["triton", "triton_pp"], "registered": registered, "decisions": {}}
    assert [finding.status for finding in doctor.imported_findings(good, "")] == ["pass", "pass"]
    stock = good | {"choices": ["triton"]}
    assert [finding.status for finding in doctor.imported_findings(stock, "")] == ["pass", "fail"]
    assert [finding.status for finding in doctor.imported_findings(stock, "1")] == ["pass", "pass"]
    no_ray = {"sglang.srt.ray.engine": "ModuleNotFoundError: No module named 'ray'"}
    assert doctor.imported_findings(good | {"failed": no_ray}, "")[0].status == "pass"
    refused = {"sglang.srt.server_args": "ValueError: Either a revision or a version must be specified."}
    (finding,) = doctor.imported_findings({"failed": refused}, "")
    assert (finding.id, finding.status) == ("import", "fail")
    assert "Either a revision" in finding.remedy
