"""The release's own builder on its own pools: what it builds, what it says, and what is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

BUILD = """
import contextlib, json, logging, sys, tempfile, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import repro

repro.run_without_gpu("triton")
said = []
class Collect(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
ours = logging.getLogger("sglang_pp_mla")
ours.setLevel(logging.INFO)
ours.addHandler(Collect())
built = []
with tempfile.TemporaryDirectory() as folder:
    for backend in ("triton", "triton_pp"):
        release = repro.Release(Path(folder), backend, "mla")
        server_args, model_config = release.configure(layers=7)
        for rank, (start, end) in enumerate([(0, 4), (4, 7)]):
            said.clear()
            pool = release.pool(model_config, start, end)
            runner = release.runner(server_args, model_config, pool)
            with contextlib.suppress(AttributeError):
                runner.pp_group = types.SimpleNamespace(rank_in_group=rank, world_size=2)
            before = set(vars(pool))
            release.build_backend(runner)
            built.append({
                "asked_for": backend,
                "rank": rank,
                "class": type(runner.attn_backend).__name__,
                "v_head_dim": runner.attn_backend.v_head_dim,
                "left_on_pool": sorted(set(vars(pool)) - before),
                "own_methods": pool.get_value_buffer.__func__ is type(pool).get_value_buffer,
                "said": list(said),
            })

# The kernels' cap of KV splits as it would be on a GPU of 64 multiprocessors, and the room kept for 256 slots.
from sglang.srt.layers.attention import triton_backend
caps = {}
if hasattr(triton_backend, "_mla_decode_kv_splits_cap"):
    triton_backend._mla_decode_kv_splits_cap = lambda asked, *_: 256
    triton_backend.get_device_core_count = lambda *_: 64
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("triton", "triton_pp"):
            release = repro.Release(Path(folder), backend, "mla")
            server_args, model_config = release.configure(layers=7)
            runner = release.runner(server_args, model_config, release.pool(model_config, 4, 7))
            with contextlib.suppress(AttributeError):
                runner.pp_group = types.SimpleNamespace(rank_in_group=1, world_size=2)
            release.build_backend(runner)
            runner.attn_backend.init_cuda_graph_state(256, 256)
            caps[backend] = runner.attn_backend.cuda_graph_attn_logits.shape[2]

# A decode step in the buffers of four slots, for two requests and for four, whose splits were chosen for fewer.
import torch
def decode(backend, pool, lengths, layer, chosen):
    random = torch.Generator().manual_seed(len(lengths))
    tokens, kv = sum(lengths), torch.randn(sum(lengths), 1, 576, generator=random)
    q = torch.randn(len(lengths), 16, 576, generator=random)
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    keys = pool.get_key_buffer(layer)
    keys[:tokens] = kv.to(keys.dtype)
    kv = keys[:tokens].clone()
    out = torch.full((len(lengths), 16, 512), float("nan"))
    partial, lse = backend.cuda_graph_attn_logits, backend.cuda_graph_attn_lse
    splits = backend.cuda_graph_num_kv_splits[: len(lengths)]
    if layer == 4:
        partial.fill_(float("nan")), lse.fill_(float("nan"))
        backend.get_num_kv_splits(splits, torch.tensor(lengths))
        if chosen:
            splits.fill_(chosen)
    backend.decode_attention_fwd(
        q, keys, keys[..., :512], out, indptr, torch.arange(tokens), partial, lse,
        splits, backend.max_kv_splits, 0.1, 1.0, 1.0, has_mla=True,
    )
    worst = 0.0
    for i, _ in enumerate(lengths):
        own = kv[indptr[i] : indptr[i + 1], 0].double()
        answer = torch.softmax(q[i].double() @ own.T * 0.1, -1) @ own[:, :512]
        worst = max(worst, float((out[i].double() - answer).abs().max()))
    return {"splits": splits.tolist(), "worst": worst}
shared = {}
if caps:
    triton_backend._mla_decode_kv_splits_cap = lambda asked, *_: 32
    triton_backend.get_device_core_count = lambda *_: 8
    with tempfile.TemporaryDirectory() as folder:
        release = repro.Release(Path(folder), "triton_pp", "mla")
        server_args, model_config = release.configure(layers=7)
        pool = release.pool(model_config, 4, 7)
        # The reproduction's pool is small: here it holds a long request, in the kernels' own precision.
        pool.kv_buffer = [torch.zeros(1100, 1, 576) for _ in pool.kv_buffer]
        pool.store_dtype = pool.dtype = torch.float32
        runner = release.runner(server_args, model_config, pool)
        with contextlib.suppress(AttributeError):
            runner.pp_group = types.SimpleNamespace(rank_in_group=1, world_size=2)
        release.build_backend(runner)
        backend = runner.attn_backend
        backend.init_cuda_graph_state(4, 4)
        shared["kept"] = backend.cuda_graph_attn_logits.shape[2]
        for name, lengths, chosen in (("two", [1000, 31], 0), ("four", [1000, 40, 1, 5], 32)):
            shared[name] = [decode(backend, pool, lengths, layer, chosen) for layer in (4, 5)]
print(json.dumps({"built": built, "caps": caps, "shared": shared}))
"""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(ROOT / "upstream_repro" / "buffer-probe")],
        env={key: value for key, value in os.environ.items() if key != "SGLANG_PP_MLA_DISABLE"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def built(result: dict[str, Any]) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = result["built"]
    return given


def test_every_stage_gets_its_backend_with_the_right_head_size(built: list[dict[str, Any]]) -> None:
    assert [(one["asked_for"], one["rank"], one["class"], one["v_head_dim"]) for one in built] == [
        ("triton", 0, "TritonAttnBackend", 512),
        ("triton", 1, "TritonAttnBackend", 512),
        ("triton_pp", 0, "TritonPPAttnBackend", 512),
        ("triton_pp", 1, "TritonPPAttnBackend", 512),
    ]


def test_nothing_is_left_between_sglang_and_its_pool(built: list[dict[str, Any]]) -> None:
    assert all(one["left_on_pool"] == [] and one["own_methods"] for one in built)


def test_triton_pp_says_one_line_a_stage_and_triton_none(built: list[dict[str, Any]]) -> None:
    lines = [[line for line in one["said"] if line.startswith("triton_pp PP")] for one in built]
    assert [len(each) for each in lines] == [0, 0, 1, 1]
    assert lines[3][0].startswith("triton_pp PP1 of 2")
    assert "(layers 4-6): 16 heads, latent 512 + rope 64, value head 512, at most" in lines[3][0]


def test_the_room_for_kv_splits_is_what_a_stage_can_use(result: dict[str, Any]) -> None:
    """16 heads make one head tile: 128 splits of 256 slots are a gibibyte, and more than 64 multiprocessors."""
    if not result["caps"]:
        pytest.skip("this SGLang keeps to the number of KV splits that the user asked for")
    assert result["caps"] == {"triton": 256, "triton_pp": 128}


def test_a_batch_shares_the_room_of_all_slots(result: dict[str, Any]) -> None:
    """24 splits are kept for each of four slots: two requests may use the 32 of stock, four are cut to 24."""
    shared = result["shared"]
    if not shared:
        pytest.skip("this SGLang keeps to the number of KV splits that the user asked for")
    assert shared["kept"] == 24
    assert [layer["splits"] for layer in shared["two"]] == [[32, 1], [32, 1]]
    assert [layer["splits"] for layer in shared["four"]] == [[24] * 4, [24] * 4]
    assert max(layer["worst"] for name in ("two", "four") for layer in shared[name]) < 1e-5
