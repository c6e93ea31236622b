"""What goes upstream says what it should, on the installed SGLang: with the package off, and with it on."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "upstream_repro" / "buffer-probe" / "repro.py"
ENGINE = ROOT / "upstream_repro" / "repro_engine.py"
GEOMETRY = ROOT / "upstream_repro" / "mla-geometry" / "repro.py"
RAY = ROOT / "upstream_repro" / "ray-plugins" / "repro.py"
SPLITS = ROOT / "upstream_repro" / "kv-splits" / "repro.py"

SGLANG = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SGLANG is None, reason="sglang is not installed here")


def run(script, *arguments, enabled=False, timeout=900):
    environment = dict(os.environ)
    environment.pop("SGLANG_PP_MLA_DISABLE", None)
    # Without bytecode on disk an import of SGLang takes a minute.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if not enabled:
        environment["SGLANG_PP_MLA_DISABLE"] = "1"
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def stages_by_title(result):
    return {demo["title"]: demo["stages"] for demo in json.loads(result.stdout)["demonstrations"]}


# --- What the installed source says -----------------------------------------------------------------


def srt() -> Path:
    return Path(SGLANG.submodule_search_locations[0]) / "srt"


def asks_for_layer_0(backend: str) -> bool:
    """Whether the code of the backend holds the probe. AITER's stands behind two conditions."""
    source = (srt() / "layers" / "attention" / f"{backend}_backend.py").read_text()
    if "get_value_buffer(0)" not in source:
        return False
    return backend != "aiter" or not mha_pool_knows_its_head_size()


def mha_pool_knows_its_head_size() -> bool:
    """AITER asks an MHA pool for a buffer only if the pool has no `get_v_head_dim`."""
    tree = ast.parse((srt() / "mem_cache" / "memory_pool.py").read_text())
    (pool,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MHATokenToKVPool")
    return any(isinstance(node, ast.FunctionDef) and node.name == "get_v_head_dim" for node in pool.body)


def package_arms_itself() -> bool:
    try:
        files = importlib.metadata.distribution("sglang-pp-mla").files or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(file.name.endswith(".pth") for file in files)


needs_package = pytest.mark.skipif(not package_arms_itself(), reason="sglang-pp-mla is not installed here")


def expected(stage, asks_0: bool):
    """(outcome, layer) by arithmetic: a pool of n layers from `start` is indexed by `asked - start`."""
    start, count = stage["start_layer"], stage["end_layer"] - stage["start_layer"]
    if not asks_0 or start == 0:
        return "own", start
    if start > count:
        return "IndexError", None
    return "wrap", start + (count - start)


# --- The probe --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untouched():
    return run(PROBE, "--json")


def test_triton_exit_status_is_what_the_source_says(untouched):
    assert untouched.returncode == int(asks_for_layer_0("triton")), untouched.stderr


def test_triton_every_stage_does_what_arithmetic_says(untouched):
    asks_0 = asks_for_layer_0("triton")
    for title, stages in stages_by_title(untouched).items():
        for stage in stages:
            outcome, layer = expected(stage, asks_0)
            assert (stage["outcome"], stage["got_layer"]) == (outcome, layer), (title, stage)
            assert stage["asked"] == (0 if asks_0 else stage["start_layer"])
            # An MLA model's value heads are as wide as its latent vector.
            assert stage["v_head_dim"] == (None if outcome == "IndexError" else 512)


def test_the_demonstrations_cover_the_three_cases(untouched):
    uneven, incident, wrap = stages_by_title(untouched).values()
    assert [(stage["start_layer"], stage["end_layer"]) for stage in uneven] == [(0, 4), (4, 7)]
    assert [(stage["start_layer"], stage["end_layer"]) for stage in wrap] == [(0, 3), (3, 7)]
    assert (len(incident), incident[-1]["end_layer"]) == (8, 61)
    if asks_for_layer_0("triton"):
        assert uneven[1]["outcome"] == "IndexError"
        assert all(stage["outcome"] == "IndexError" for stage in incident[2:])
        assert (wrap[1]["outcome"], wrap[1]["got_layer"]) == ("wrap", 4)


@pytest.mark.parametrize(("backend", "kv"), [("wave", "mla"), ("aiter", "mha")])
def test_other_backends_in_a_table_for_people(backend, kv):
    result = run(PROBE, "--backend", backend, "--kv", kv, "--partition", "4,3")
    faulty = asks_for_layer_0(backend)
    assert result.returncode == int(faulty), result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    if faulty:
        assert "0 0-3 layer 0 its own layer 0" in lines
        assert "1 4-6 layer 0 IndexError: list index out of range" in lines
        assert lines[-1].startswith("FAULT: 1 stage(s)")
    else:
        assert {"1 4-6 layer 4 its own layer 4", "1 4-6 - nothing asked of the pool"} & set(lines)
        assert lines[-1].startswith("Clean")


@needs_package
@pytest.mark.parametrize(("backend", "kv"), [("triton", "mla"), ("wave", "mla"), ("aiter", "mha")])
def test_with_the_package_no_stage_is_told_anything_but_its_own(backend, kv):
    result = run(PROBE, "--backend", backend, "--kv", kv, "--json", enabled=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for title, stages in stages_by_title(result).items():
        for stage in stages:
            assert stage["outcome"] in ("own", "none"), (title, stage)
            assert stage["got_layer"] in (stage["start_layer"], None)
            assert stage["v_head_dim"] is not None


@pytest.mark.parametrize("script", [PROBE, ENGINE])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--partition", "4,x"],
        ["--partition", "4,0"],
        ["--partition", "4,3", "--layers", "8"],
        ["--layers", "7"],
        ["--layers", "2", "--pp-size", "3"],
        ["--layers", "7", "--pp-size", "0"],
    ],
)
def test_wrong_input_is_one_sentence(script, arguments):
    result = run(script, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


# --- MLA decode -------------------------------------------------------------------------------------


def decodes_from_keys() -> bool:
    """Whether the kernel is told to take values from keys, whatever the widths."""
    folders = (srt() / "layers" / "attention" / "triton_ops", srt().parent / "kernels" / "ops" / "attention")
    files = [folder / "decode_attention.py" for folder in folders if (folder / "decode_attention.py").is_file()]
    return any("HAS_MLA=has_mla," in file.read_text() for file in files)


def test_geometry():
    result = run(GEOMETRY, "256+64", "512+64")
    narrow, wide = result.stdout.splitlines()
    assert ", 512+64: right (" in wide
    assert result.returncode == int(decodes_from_keys()), result.stderr
    assert ("incompatible dimensions" if decodes_from_keys() else ", 256+64: right (") in narrow


@needs_package
def test_geometry_with_the_package():
    result = run(GEOMETRY, enabled=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 256+64: right (" in result.stdout


def test_kv_splits():
    result = run(SPLITS)
    lifts = "def _mla_decode_kv_splits_cap" in (srt() / "layers" / "attention" / "triton_backend.py").read_text()
    assert result.returncode == int(lifts), result.stderr
    if lifts:
        tensor_parallel, pipeline = result.stdout.splitlines()
        assert "8 heads, 256 splits, 256 programs" in tensor_parallel
        assert "64 heads, 256 splits, 1024 programs" in pipeline
        assert pipeline.endswith("8.0 GiB for 256 slots")


@pytest.mark.parametrize(("script", "arguments"), [(GEOMETRY, ["256"]), (SPLITS, ["--heads", "9"]), (RAY, ["0.5.23"])])
def test_wrong_input_of_the_others(script, arguments):
    result = run(script, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


# --- Ray's actors -----------------------------------------------------------------------------------


@pytest.mark.longest
def test_ray_actor():
    """Of every release that has one; with its patch test_patches.py has it clean."""
    result = run(RAY)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.endswith("its scheduler imported, and has not loaded the plugin\n")


@pytest.mark.longest
@needs_package
def test_ray_actor_with_the_package():
    result = run(RAY, enabled=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("the Ray actor loads the plugin\n")


def test_ray_actor_without_ray():
    without = "import runpy, sys; sys.modules['ray'] = None; sys.argv = sys.argv[1:]; "
    result = run("-c", f"{without}runpy.run_path(sys.argv[0], run_name='__main__')", RAY)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == "ray is not installed in this Python environment\n"


# --- The whole engine -------------------------------------------------------------------------------


@pytest.mark.engine
def test_engine_dies_or_serves_as_the_source_says():
    result = run(ENGINE, "--partition", "4,3", "--timeout", "1200", timeout=1500)
    if asks_for_layer_0("triton"):
        assert result.returncode == 1, result.stdout + result.stderr
        assert "DIES while it starts, on PP1" in result.stdout
        assert "in get_value_buffer" in result.stdout
        assert result.stdout.rstrip().endswith("IndexError: list index out of range")
    else:
        assert result.returncode == 0, result.stdout + result.stderr
        assert "SERVES: tokens [" in result.stdout


@pytest.mark.engine
@pytest.mark.longest
@needs_package
def test_engine_serves_with_the_package():
    result = run(ENGINE, "--partition", "4,3", "--timeout", "1200", enabled=True, timeout=1500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SERVES: tokens [" in result.stdout
