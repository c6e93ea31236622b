"""Any MLA geometry on every published release: its own decode kernels, by Triton's interpreter, and the flat decode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_pp_mla.fixes import Changes, mla_geometry
from sglang_pp_mla.kernelfit import gpu_named, launchers
from sglang_pp_mla.kernels.flat_decode import flat_decode, workspace
from sglang_pp_mla.releases import RELEASES

pytestmark = pytest.mark.release("0.5.23")
ROOT = Path(__file__).resolve().parents[2]
# kv_lora_rank and qk_rope_head_dim: DeepSeek and Kimi, MiniCPM3, Mistral Small 4, and others.
GEOMETRIES = [(512, 64), (256, 32), (256, 64), (128, 64), (32, 16), (100, 28)]
# In `make test`: the ends, and where the kernels changed or moved.
SHORT = ("0.5.3", "0.5.11", "0.5.12", "0.5.16", "0.5.18", "0.5.20", "0.5.23")
LENGTHS, HEADS, CAP, SCALE = (5, 40, 1), 2, 4, 0.2


@pytest.fixture(scope="module")
def packages() -> dict[str, Path]:
    command = [sys.executable, ROOT / "tools" / "wheels", *RELEASES]
    folders = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return {name: Path(folder) / "sglang" for name, folder in zip(RELEASES, folders, strict=True)}


class Step:
    """A decode step of three requests, and attention over them in float64."""

    def __init__(self, latent: int, rope: int) -> None:
        random = torch.Generator().manual_seed(latent + rope)
        self.latent, tokens = latent, sum(LENGTHS)
        self.q = torch.randn(len(LENGTHS), HEADS, latent + rope, generator=random)
        self.kv = torch.randn(tokens, 1, latent + rope, generator=random)
        self.indptr = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
        self.indices = torch.arange(tokens)
        self.out = torch.full((len(LENGTHS), HEADS, latent), float("nan"))

    def worst(self) -> float:
        worst = 0.0
        for request in range(len(LENGTHS)):
            own = self.kv[self.indptr[request] : self.indptr[request + 1], 0].double()
            weights = torch.softmax(self.q[request].double() @ own.T * SCALE, -1)
            answer = weights @ own[:, : self.latent]
            worst = max(worst, float((self.out[request].double() - answer).abs().nan_to_num(torch.inf).max()))
        return worst

    def decode(self, module: object) -> float:
        launchers.decode_call(
            module,  # type: ignore[arg-type]
            self.q,
            self.kv,
            self.kv[..., : self.latent],
            self.out,
            self.indptr,
            self.indices,
            torch.full((len(LENGTHS),), 2, dtype=torch.int32),
            CAP,
            scale=SCALE,
            mla=True,
            pdl=False,
        )()
        return self.worst()


@pytest.mark.parametrize(
    "release", [pytest.param(each, marks=[] if each in SHORT else [pytest.mark.longest]) for each in RELEASES]
)
def test_the_releases_kernels_with_the_fix(release: str, packages: dict[str, Path]) -> None:
    root = packages[release]
    module = launchers.load(root, gpu_named("H100"), "decode_attention")
    faulty = bool(mla_geometry.evidence(root))
    assert faulty == (RELEASES.index(release) >= RELEASES.index("0.5.12"))
    for latent, rope in GEOMETRIES:
        if faulty and not mla_geometry.key_tile_is_value_tile(latent + rope, latent):
            with pytest.raises(Exception, match=r"could not be broadcast|incompatible|shape"):
                Step(latent, rope).decode(module)
    with Changes() as changes:
        if faulty:
            mla_geometry.change_decode(module, changes)
        for geometry in GEOMETRIES:
            assert Step(*geometry).decode(module) <= 1e-5, geometry


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_flat_decode(geometry: tuple[int, int]) -> None:
    step = Step(*geometry)
    flat_decode(
        step.q,
        step.kv,
        step.out,
        step.indptr,
        step.indices,
        *workspace(2, HEADS, step.latent, "cpu"),
        latent=step.latent,
        scale=SCALE,
    )
    assert step.worst() <= 1e-5
