"""What ``plan`` takes for SGLang's own choice of memory is what the installed SGLang chooses.

The real arguments are resolved for pretended GPUs of many sizes, in a process of their own
(``default_memory.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.geometry import Model, read_config
from sglang_pp_mla.planner import GIB, Deployment, chunked_prefill_size, default_mem_fraction, graph_slots, token_bytes
from sglang_pp_mla.rehearsal.environment import KERNEL_LIBRARY

DATA = Path(__file__).parents[1] / "data"
VISION = {"vt_num_hidden_layers": 27, "vt_hidden_size": 1152}  # the tower of Kimi K2.5 and K2.6

# Gigabytes, tensor-parallel size, stages, and requests at once where they are limited.
CASES = [
    *((size, 1, stages, None) for size in (16, 24, 32, 48, 80, 96, 141, 180) for stages in (1, 2, 8)),
    *((size, tensor, 2, None) for size in (32, 48, 96) for tensor in (2, 4)),
    *((96, 8, 1, None), (96, 1, 8, 16), (24, 4, 2, 16), (180, 1, 4, 64)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A text model, and the same within Kimi's multimodal wrapper."""
    plain = DATA / "models" / "mla"
    wrapped = tmp_path_factory.mktemp("wrapped")
    text = read_config(plain)
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    (wrapped / "config.json").write_text(json.dumps({**config, "text_config": text, "vision_config": VISION}))
    return [plain, wrapped]


@pytest.fixture(scope="module")
def chosen(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """SGLang's answers: the cases with the text model, then with the wrapper."""
    folder = tmp_path_factory.mktemp("memory")
    asked = [
        {"gigabytes": size, "model": str(model), "tp_size": tensor, "pp_size": stages, "max_running_requests": running}
        for model in models
        for size, tensor, stages, running in CASES
    ]
    (folder / "cases.json").write_text(json.dumps(asked))
    with open(folder / "log", "w") as log:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("default_memory.py")), "cases.json", "result.json"],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(KERNEL_LIBRARY), "SGLANG_PP_MLA_DISABLE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "wrapper"])
def test_memory_is_chosen_as_sglang_does(
    wrapped: bool, models: list[Path], chosen: list[dict[str, Any]], sglang_release: Version
) -> None:
    model = Model.from_config(read_config(models[wrapped]))
    answers = chosen[len(CASES) :] if wrapped else chosen[: len(CASES)]
    compared = 0
    for case, answer in zip(CASES, answers, strict=True):
        size, tensor, stages, running = case
        deployment = Deployment((size * GIB,) * stages, sglang_release, tensor, max_running=running)
        assert "refused" not in answer, (case, answer)
        limit = running or 2**31
        assert answer == {
            "mem_fraction_static": pytest.approx(default_mem_fraction(model, deployment), abs=1e-9),
            "chunked_prefill_size": chunked_prefill_size(deployment),
            "slots": min(graph_slots(deployment), limit) if sglang_release >= Version("0.5.22") else answer["slots"],
        }, case
        if running is None:
            assert answer["slots"] == graph_slots(deployment), case
        compared += 1
    assert compared == len(CASES)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["mla", "mha"])
def test_bytes_a_token_are_those_of_the_real_pool(name: str, dtype: str, sglang_release: Version) -> None:
    """A row of each layer's buffers, as the release's own pool makes them on a CPU."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from tests.unit.pools import call

    model = Model.from_config(read_config(DATA / "models" / name))
    attention = model.attention
    kinds = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    common = {"size": 8, "page_size": 1, "dtype": kinds[dtype], "device": "cpu", "enable_memory_saver": False}
    common |= {"layer_num": 3, "start_layer": 1, "end_layer": 4}
    if attention.is_mla:
        widths = {"kv_lora_rank": attention.kv_lora_rank, "qk_rope_head_dim": attention.qk_rope_head_dim}
        buffers = call(MLATokenToKVPool, **common, **widths).kv_buffer
    else:
        pool = call(MHATokenToKVPool, **common, head_num=attention.num_kv_heads, head_dim=attention.head_dim)
        buffers = [*pool.k_buffer, *pool.v_buffer]
    a_token = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)
    assert a_token == sum(token_bytes(model, layer, dtype, 1, sglang_release) for layer in (1, 2, 3))
