"""tools/decode_tables: what it counts is what the kernels of the releases do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.release("0.5.23")

COUNT = """
import importlib.machinery, importlib.util, json, math, sys
from pathlib import Path
loader = importlib.machinery.SourceFileLoader("decode_tables", sys.argv[1])
spec = importlib.util.spec_from_loader(loader.name, loader)
tool = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
loader.exec_module(tool)
import torch
from sglang_pp_mla.kernelfit import gpu_named, launchers
root = tool.package(sys.argv[2])
decode = launchers.load(root, gpu_named("H100"), "decode_attention")
kernel = launchers.split_kernel(root)
launched = []
run = decode._fwd_grouped_kernel_stage1
class Watch:
    def __getitem__(self, grid):
        launched.append(grid)
        return run[grid]
decode._fwd_grouped_kernel_stage1 = Watch()
HEADS, CAP, LATENT = 20, 8, 16
counted = []
for lengths in ([1], [33, 7], [200, 64, 1], [500, 30, 30, 30]):
    splits = launchers.chosen_splits(kernel, torch.tensor(lengths), HEADS, CAP, 24)
    batch, tokens = len(lengths), sum(lengths)
    q, kv = torch.randn(batch, HEADS, 2 * LATENT), torch.randn(tokens, 1, 2 * LATENT)
    partial = torch.zeros(batch, HEADS, CAP, LATENT)
    lse = torch.full((batch, HEADS, CAP), float("nan"))
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    decode.decode_attention_fwd(
        q, kv, kv[..., :LATENT], torch.empty(batch, HEADS, LATENT), indptr, torch.arange(tokens), partial, lse,
        splits, CAP, 0.1, 1.0, 1.0,
    )
    # Head 0 is in the first tile, head 16 in the second.
    written = int((~lse[:, [0, 16]].isnan()).sum())
    done = tool.stock_work(lengths, splits.tolist(), HEADS, CAP)
    counted.append([written, done.working, math.prod(launched[-1]), done.launched])
print(json.dumps(counted))
"""


@pytest.mark.parametrize("release", ["0.5.11", "0.5.23"])
def test_programs_are_those_that_the_kernel_is_launched_with_and_those_that_write(release: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(ROOT / "tools/decode_tables"), release],
        env={**os.environ, "SGLANG_PP_MLA_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counted = json.loads(done.stdout.splitlines()[-1])
    for written, working, grid, launched in counted:
        assert written == working
        assert grid == launched
    assert any(working > 2 for _, working, _, _ in counted)


def test_the_page_and_its_data_are_what_the_tool_writes() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/decode_tables", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "docs/data/mla-decode.json").read_text())
    return found


def test_the_flat_decode_is_what_it_claims(rows: list[dict[str, Any]]) -> None:
    """In every row: a workspace of megabytes, no idle launches, a full wave for one request, even programs."""
    flat = [row for row in rows if row["way"] == "flat"]
    assert len(flat) == 180
    for row in flat:
        assert row["workspace"] <= 256 * 2**20
        assert row["launched"] <= 1.5 * row["working"]
        assert row["batch"] > 1 or row["working"] >= row["sms"]
        assert row["batch"] < 4 or row["longest"] <= 1.25 * row["mean"]


def test_a_batch_of_up_to_64_loses_nothing_to_the_smaller_room(rows: list[dict[str, Any]]) -> None:
    def of(way: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        about = ("model", "layout", "sms", "batch", "lengths")
        return {tuple(row[key] for key in about): row for row in rows if row["way"] == way}

    stock, ours = of("stock 0.5.23"), of("triton_pp")
    for place, row in ours.items():
        assert row["workspace"] <= min(stock[place]["workspace"], 1.6 * 2**30)
        if row["batch"] <= 64:
            assert row["longest"] == stock[place]["longest"]
