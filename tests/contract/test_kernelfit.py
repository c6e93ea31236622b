"""kernelfit on the installed SGLang: the real launchers, compiled for GPUs that are not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from sglang_pp_mla.geometry import Model, read_config
from sglang_pp_mla.kernelfit import KernelFit, KernelFitError, Shapes, fit, gpu_named
from sglang_pp_mla.kernelfit.gpus import CAPABILITIES, blocks_at_once
from sglang_pp_mla.kernels.flat_schedule import head_tiles, number_of_pieces
from sglang_pp_mla.preflight import Deployment, check_kernels
from sglang_pp_mla.rehearsal import find_sglang
from sglang_pp_mla.rehearsal.shrink import kimi_k26

KIMI = Model.from_config(kimi_k26())
NARROW_CONFIG = Path(__file__).parents[1] / "data" / "mla-256x64.json"
NARROW = Model.from_config(read_config(NARROW_CONFIG))


def fitted(model: Model, gpu: str, tp_size: int = 1, kv_dtype: str = "auto") -> dict[tuple[str, str], KernelFit]:
    told: list[KernelFit] = []
    found = fit(
        Shapes.of_model(model, tp_size, kv_dtype=kv_dtype),
        gpu_named(gpu),
        sglang=find_sglang().folder,
        on_fit=lambda one, number: told.append(one),
    )
    assert sorted(told, key=str) == sorted(found, key=str)
    return {(one.path, one.kernel): one for one in found}


STAGE_1, STAGE_2 = ("decode", "_fwd_grouped_kernel_stage1"), ("decode", "_fwd_kernel_stage2")


def test_the_decode_of_kimi_on_hopper(sglang_release: Version) -> None:
    """Shared memory as SGLang's users have measured it; the cap of KV splits in the grid."""
    found = fitted(KIMI, "H100")
    decode = found[STAGE_1]
    lifted = sglang_release >= Version("0.5.12")
    assert decode.shared == (63488 if lifted else 89088)
    assert decode.grid == (16, head_tiles(64), 256 if lifted else 8)
    assert decode.fits
    assert decode.blocks == 2
    flat = found["flat decode", "_decode_pieces"]
    assert flat.grid == (head_tiles(64), number_of_pieces(64, 132), 1)
    assert flat.fits
    assert {path for path, _ in found} == {"decode", "flat decode", "extend, first chunk", "extend, absorbed"}
    assert all(one.fits for one in found.values())


def test_a_geometry_that_stock_cannot_compile(sglang_release: Version) -> None:
    found = fitted(NARROW, "RTX PRO 6000")
    if sglang_release < Version("0.5.12"):
        assert found[STAGE_1].fits
        assert not any("mla-geometry" in path for path, _ in found)
        return
    assert "incompatible dimensions at index 1: 256 and 512" in str(found[STAGE_1].error)
    assert found[STAGE_1].shared is None
    assert not found[STAGE_1].fits
    assert found[STAGE_2].fits
    repaired = found["decode, mla-geometry", STAGE_1[1]]
    assert repaired.fits
    assert repaired.shared is not None
    assert repaired.shared <= repaired.shared_limit == 99 * 1024


@pytest.mark.parametrize("disabled", ["", pytest.param("mla-geometry", marks=pytest.mark.longest)])
def test_preflight_says_it_of_the_kernels_that_would_serve(sglang_release: Version, disabled: str) -> None:
    gpu = gpu_named("RTX PRO 6000")
    config = read_config(NARROW_CONFIG)
    deployment = Deployment(config, 2, gpu=gpu, installation=find_sglang(), disabled=disabled)
    (verdict,) = check_kernels(deployment)
    if disabled and sglang_release >= Version("0.5.12"):
        assert verdict.status == "fail"
        assert "incompatible dimensions at index 1: 256 and 512" in verdict.summary
    else:
        assert verdict.status == "pass", verdict
        assert "kernels compile and fit RTX PRO 6000" in verdict.summary


@pytest.mark.release("0.5.23")
def test_what_a_gpu_cannot_do_is_said() -> None:
    """Ampere has no fp8 as OCP defines it; Triton refuses to compile what converts it."""
    found = fitted(KIMI, "sm_80", tp_size=8, kv_dtype="fp8_e4m3")
    error = found[STAGE_1].error
    assert error is not None
    assert "fp8e4nv" in error
    assert found[STAGE_2].fits


def test_nothing_is_left_running_when_the_caller_gives_up() -> None:
    workers: list[psutil.Process] = []

    def give_up(one: KernelFit, number: int) -> None:
        workers.extend(psutil.Process().children(recursive=True))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(Shapes.of_model(KIMI), gpu_named("H100"), sglang=find_sglang().folder, on_fit=give_up)
    assert len(workers) > 1
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


def test_no_sglang_there(tmp_path: Path) -> None:
    with pytest.raises(KernelFitError, match=r"has no Triton decode_attention\.py in kernels/ops/attention or"):
        fit(Shapes.of_model(KIMI), gpu_named("sm_90"), sglang=tmp_path)


def test_the_verb() -> None:
    """Of what the tests above have compiled, so from Triton's cache."""
    command = [sys.executable, "-m", "sglang_pp_mla.cli", "kernelfit"]
    model = str(Path(__file__).parents[1] / "data" / "mla-256x64.json")
    done = subprocess.run([*command, model, "--gpu", "rtx pro 6000", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert {"path", "kernel", "grid", "shared", "shared_limit", "registers", "spilled", "blocks", "fits"} <= set(
        answers[0]
    )
    for wrong in (["--gpu", "H999"], ["--gpu", "H100", "--tp-size", "3"], ["--gpu", "H100", "--save", "x.pdf"]):
        done = subprocess.run([*command, model, *wrong], capture_output=True, text=True)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors"),
    [
        ("NVIDIA H100 80GB HBM3", "sm_90", 132),
        ("H100 PCIe", "sm_90", 114),
        ("NVIDIA GeForce RTX 4090", "sm_89", 128),
        ("NVIDIA L40S", "sm_89", 142),
        ("NVIDIA A100-SXM4-80GB", "sm_80", 108),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120", 188),
        ("H200", "sm_90", 132),
        ("B200", "sm_100", 148),
        ("sm_90", "sm_90", 132),
        ("9.0", "sm_90", 132),
        ("120", "sm_120", 188),
    ],
)
def test_names_of_gpus(name: str, capability: str, multiprocessors: int) -> None:
    gpu = gpu_named(name)
    assert (gpu.capability.name, gpu.multiprocessors) == (capability, multiprocessors)


@pytest.mark.parametrize(
    ("name", "memory"), [("A100", 80), ("NVIDIA A100-SXM4-40GB", 40), ("NVIDIA H100 80GB HBM3", 80), ("H200", 141)]
)
def test_the_size_that_a_name_has_is_the_gpus(name: str, memory: int) -> None:
    assert gpu_named(name).memory == memory


@pytest.mark.parametrize("name", ["", "H1000", "A1", "A1000", "sm_70", "a toaster"])
def test_an_unknown_gpu_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not known; name one of A100"):
        gpu_named(name)


@pytest.mark.parametrize(
    ("capability", "warps", "registers", "shared", "blocks"),
    [
        # As NVIDIA's occupancy calculator says.
        ("sm_80", 8, 32, 0, 8),
        ("sm_80", 4, 64, 0, 8),
        ("sm_80", 4, 128, 0, 4),
        ("sm_90", 4, 168, 48 * 1024, 3),
        ("sm_90", 8, 255, 100 * 1024, 1),
        ("sm_90", 1, 16, 0, 32),
        ("sm_120", 4, 64, 99 * 1024, 1),
        ("sm_120", 4, 64, 99 * 1024 + 1, 0),
        ("sm_86", 1, 16, 0, 16),
    ],
)
def test_blocks_at_once(capability: str, warps: int, registers: int, shared: int, blocks: int) -> None:
    assert blocks_at_once(CAPABILITIES[capability], warps=warps, registers=registers, shared=shared) == blocks
