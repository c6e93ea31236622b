"""The process that compiles: a question as JSON on standard input, a line of JSON a kernel on standard output."""

from __future__ import annotations

import dataclasses
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.kernelfit import launchers
from sglang_pp_mla.kernelfit.gpus import Gpu, gpu_named

_ASKED_SPLITS = 8  # SGLang's default of --triton-attention-num-kv-splits


@dataclass
class Launch:
    """A kernel, with the arguments that a launcher gave it."""

    path: str
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_launches: list[Launch] = []  # inherited by the processes that compile


@contextmanager
def _recorded(path: str) -> Iterator[None]:
    """Kernels are launched into the list instead of onto a GPU."""
    from triton.runtime.jit import JITFunction

    def launch(self: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: _launches.append(Launch(path, self, grid, args, kwargs))

    stock = JITFunction.__getitem__
    JITFunction.__getitem__ = launch
    try:
        yield
    finally:
        JITFunction.__getitem__ = stock


def _tensors(question: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    import torch

    dtype = getattr(torch, question["dtype"])
    kv_dtype = dtype if question["kv_dtype"] == "auto" else getattr(torch, question["kv_dtype"])

    def tensor(*shape: int, of: Any = dtype) -> Any:
        return torch.empty(shape, dtype=of, device="meta")

    slots = 4096
    if question["mla"]:
        keys = tensor(slots, 1, question["key_width"], of=kv_dtype)
        values = keys[..., : question["value_width"]]
    else:
        keys = tensor(slots, question["kv_heads"], question["key_width"], of=kv_dtype)
        values = tensor(slots, question["kv_heads"], question["value_width"], of=kv_dtype)
    return (keys, values), tensor


def record_decode(question: dict[str, Any], module: Any, path: str, gpu: Gpu, splits: int) -> None:
    import torch

    (keys, values), tensor = _tensors(question)
    batch, heads = question["batch"], question["heads"]
    call = launchers.decode_call(
        module,
        tensor(batch, heads, question["key_width"]),
        keys,
        values,
        tensor(batch, heads, question["value_width"]),
        tensor(batch + 1, of=torch.int32),
        tensor(keys.shape[0], of=torch.int64),
        tensor(batch, of=torch.int32),
        splits,
        scale=0.1,
        mla=question["mla"],
        pdl=gpu.capability.number >= 90,
        page_size=question["page_size"],
        logit_cap=question["logit_cap"],
    )
    with _recorded(path):
        call()


def record_flat(question: dict[str, Any], gpu: Gpu) -> None:
    import torch

    from sglang_pp_mla.kernels.flat_decode import flat_decode, workspace
    from sglang_pp_mla.kernels.flat_schedule import number_of_pieces

    (keys, _), tensor = _tensors(question)
    batch, heads, latent = question["batch"], question["heads"], question["value_width"]
    partial, lse = workspace(number_of_pieces(heads, gpu.multiprocessors), heads, latent, "meta")
    with _recorded("flat decode"):
        flat_decode(
            tensor(batch, heads, question["key_width"]),
            keys,
            tensor(batch, heads, latent),
            tensor(batch + 1, of=torch.int32),
            tensor(keys.shape[0], of=torch.int64),
            partial,
            lse,
            latent=latent,
            scale=0.1,
            logit_cap=question["logit_cap"],
        )


def record_extend(question: dict[str, Any], module: Any, path: str, key: int, value: int, kv_heads: int) -> None:
    import torch

    (keys, values), tensor = _tensors(question)
    launch = module.extend_attention_fwd
    batch, heads, tokens = question["batch"], question["heads"], 1024
    # From 0.5.10 on the KV cache's own scales stand behind the longest length.
    scales = (1.0, 1.0) if "k_scale" in inspect.signature(launch).parameters else ()
    with _recorded(path):
        launch(
            tensor(tokens, heads, key),
            tensor(tokens, kv_heads, key),
            tensor(tokens, kv_heads, value),
            tensor(tokens, heads, value),
            keys,
            values,
            tensor(batch + 1, of=torch.int32),
            tensor(batch + 1, of=torch.int32),
            tensor(keys.shape[0], of=torch.int64),
            None,
            True,
            None,
            tokens,
            *scales,
            **launchers.known(launch, sm_scale=0.1, logit_cap=question["logit_cap"], page_size=question["page_size"]),
        )


def record_all(question: dict[str, Any], gpu: Gpu) -> None:
    """Every kernel that the Triton backend of this SGLang, and this package, would launch."""
    from sglang_pp_mla.fixes import mla_geometry
    from sglang_pp_mla.fixes.fix import Changes

    root = Path(question["root"])
    decode = launchers.load(root, gpu, "decode_attention")
    extend = launchers.load(root, gpu, "extend_attention")
    splits = _ASKED_SPLITS
    if question["mla"]:
        splits = launchers.split_cap(root, _ASKED_SPLITS, gpu, question["context"])
    record_decode(question, decode, "decode", gpu, splits)
    if question["mla"]:
        geometry = question["key_width"], question["value_width"]
        if mla_geometry.evidence(root) and not mla_geometry.key_tile_is_value_tile(*geometry):
            with Changes() as changes:
                mla_geometry.change_decode(decode, changes)
                record_decode(question, decode, "decode, mla-geometry", gpu, splits)
        record_flat(question, gpu)
        first = question["prefill_key_width"], question["prefill_value_width"], question["heads"]
        record_extend(question, extend, "extend, first chunk", *first)
        record_extend(question, extend, "extend, absorbed", *geometry, 1)
    else:
        record_extend(question, extend, "extend", question["key_width"], question["value_width"], question["kv_heads"])


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)\b.*?LOCAL:(\d+)")


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of memory a thread for what did not fit into them, from a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = _USAGE.search(done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {done.stdout.strip()}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def compiled(number: int) -> dict[str, Any]:
    """Compile one launch; what it needs, or why the compiler refused it."""
    launch = _launches[number]
    answer: dict[str, Any] = {"number": number, "path": launch.path, "kernel": launch.kernel.fn.__name__}
    answer["grid"] = [*launch.grid, 1, 1][:3]
    try:
        kernel = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.kwargs)
    except Exception as error:  # a compiler refuses in many ways; each is an answer
        lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
        return answer | {"error": lines[-1] if lines else type(error).__name__}
    registers, spilled = resources(kernel.asm["cubin"])
    return answer | {
        "error": None,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "shared": kernel.metadata.shared,
        "registers": registers,
        "spilled": spilled,
    }


def main() -> None:
    question = json.load(sys.stdin)
    gpu = dataclasses.replace(gpu_named(question["gpu"]), multiprocessors=question["sms"])
    launchers.pretend_gpu(gpu)
    record_all(question, gpu)
    print(json.dumps({"kernels": len(_launches)}), flush=True)
    # Forked, so that torch, Triton and the arguments are there; compiling holds the interpreter's lock.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork")) as pool:
        for done in as_completed([pool.submit(compiled, number) for number in range(len(_launches))]):
            print(json.dumps(done.result()), flush=True)


if __name__ == "__main__":
    main()
