"""Whether SGLang's Triton attention kernels, and ours, compile and fit on a GPU that is not here.

The launchers of an SGLang installation are called with tensors that have shapes and no memory; what they
would launch is compiled for the GPU by the Triton beside it, and read off the result. No GPU, no driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.geometry import Model
from sglang_pp_mla.kernelfit.gpus import Capability, Gpu, blocks_at_once, gpu_named

__all__ = ["Capability", "Gpu", "KernelFit", "KernelFitError", "Shapes", "fit", "gpu_named", "serving"]

KV_DTYPES = {
    "auto": "auto",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Values of SGLang's ``--kv-cache-dtype`` that the Triton backend takes, and torch's names for them."""


class KernelFitError(Exception):
    """The kernels could not be asked, in one sentence; not that one of them does not fit."""


@dataclass(frozen=True)
class Shapes:
    """What decides about a rank's attention kernels.

    ``heads`` are those of one rank: a tensor-parallel rank has a part of them, a pipeline stage all. Widths
    are in elements: ``key_width`` and ``value_width`` of the KV cache (latent and rope part, and latent,
    under MLA); the ``prefill_`` widths those of a first chunk, which MLA attends to unabsorbed.
    """

    mla: bool
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    prefill_key_width: int
    prefill_value_width: int
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    page_size: int = 1
    batch: int = 16
    logit_cap: float = 0.0
    context: int = 131072

    @classmethod
    def of_model(cls, model: Model, tp_size: int = 1, *, kv_dtype: str = "auto", page_size: int = 1) -> Shapes:
        """``kv_dtype`` as SGLang's ``--kv-cache-dtype`` has it. Raises ``ValueError`` for what cannot be."""
        attention = model.attention
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"The KV cache type {kv_dtype!r} is none of {', '.join(KV_DTYPES)}.")
        if tp_size < 1 or attention.num_heads % tp_size:
            raise ValueError(
                f"{attention.num_heads} heads do not divide by --tp-size {tp_size}; use one that divides them."
            )
        heads, kv = attention.num_heads // tp_size, KV_DTYPES[kv_dtype]
        context = model.max_position_embeddings or cls.context
        if not attention.is_mla:
            width, kv_heads = attention.value_width, max(1, attention.num_kv_heads // tp_size)
            return cls(False, heads, kv_heads, width, width, width, width, "bfloat16", kv, page_size, context=context)
        prefill_key = (attention.qk_nope_head_dim or 0) + (attention.qk_rope_head_dim or 0)
        return cls(
            True,
            heads,
            1,
            attention.latent_width,
            attention.value_width,
            prefill_key,
            attention.v_head_dim or 0,
            kv_dtype=kv,
            page_size=page_size,
            context=context,
        )


@dataclass(frozen=True)
class KernelFit:
    """One kernel on one GPU.

    ``path`` says what launches it. Sizes are in bytes: ``shared`` a block, against ``shared_limit``;
    ``spilled`` a thread, what the registers did not hold. ``blocks`` is how many fit on a multiprocessor
    at once. Where the compiler refused, ``error`` says why and the figures are None.
    """

    path: str
    kernel: str
    grid: tuple[int, int, int]
    shared_limit: int
    error: str | None = None
    warps: int | None = None
    stages: int | None = None
    shared: int | None = None
    registers: int | None = None
    spilled: int | None = None
    blocks: int | None = None

    @property
    def fits(self) -> bool:
        """Whether it compiles and a multiprocessor can run it."""
        return self.error is None and bool(self.blocks)

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.path}: {self.kernel} does not compile: {self.error}"
        if not self.blocks:
            return f"{self.path}: {self.kernel} needs {self.shared} bytes of shared memory of {self.shared_limit}"
        return f"{self.path}: {self.kernel} takes {self.shared} bytes of shared memory of {self.shared_limit}"


def serving(kernels: Iterable[KernelFit], *, fixed: bool = True) -> list[KernelFit]:
    """Those that are launched: where the fix ``mla-geometry`` acts, the kernel it changes is not, and without it is."""
    kernels = list(kernels)
    repaired = {one.path.partition(",")[0]: one.path for one in kernels if one.path.endswith(", mla-geometry")}
    away = set(repaired) if fixed else set(repaired.values())
    return [one for one in kernels if one.path not in away]


def fit(
    shapes: Shapes,
    gpu: Gpu,
    *,
    sglang: Path,
    python: str = sys.executable,
    on_fit: Callable[[KernelFit, int], None] | None = None,
    timeout_s: float = 600.0,
) -> list[KernelFit]:
    """Compile the kernels that the SGLang in the folder ``sglang`` would launch for ``shapes`` on ``gpu``.

    ``python`` needs torch and Triton; results of earlier runs come from Triton's own cache. ``on_fit`` gets
    each kernel as it is done, and how many there are. Returns them in the order of their launches. Raises
    :class:`KernelFitError` where they could not be asked, or not within ``timeout_s`` seconds in all.
    """
    # Not the interpreter, and nothing of ours armed: the fix is applied, and left away, on purpose.
    env = {**os.environ, "SGLANG_PP_MLA_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)
    question = {"gpu": gpu.capability.name, "sms": gpu.multiprocessors, "root": str(sglang), **asdict(shapes)}
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(
            [python, "-m", "sglang_pp_mla.kernelfit.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            text=True,
            start_new_session=True,  # a group, to end with the processes that it forks
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        found: dict[int, KernelFit] = {}
        number = 0
        began = time.monotonic()
        timer = threading.Timer(timeout_s, _end, [worker])  # which ends the reading below, too
        timer.daemon = True
        timer.start()
        try:
            worker.stdin.write(json.dumps(question))
            worker.stdin.close()
            for line in worker.stdout:
                answer = json.loads(line)
                if "kernels" in answer:
                    number = answer["kernels"]
                    continue
                place = answer.pop("number")
                found[place] = one = _with_limits(answer, gpu.capability)
                if on_fit is not None:
                    on_fit(one, number)
            worker.wait()
        finally:
            timer.cancel()
            _end(worker)
            worker.wait()
        if worker.returncode or not number or len(found) != number:
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
            reason = lines[-1] if lines else f"it ended with status {worker.returncode}"
            if time.monotonic() - began >= timeout_s:
                reason = f"it took longer than {timeout_s:g} s, after {len(found)} of {number or 'all'} kernels"
            raise KernelFitError(f"The kernels of {sglang} could not be compiled with {python}: {reason}.")
    return [found[each] for each in sorted(found)]


def _end(worker: subprocess.Popen[str]) -> None:
    """Kill a worker and what it has forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _with_limits(answer: dict[str, Any], capability: Capability) -> KernelFit:
    answer["grid"] = tuple(answer["grid"])
    if answer["error"] is None:
        needs = {name: answer[name] for name in ("warps", "registers", "shared")}
        answer["blocks"] = blocks_at_once(capability, **needs)
    return KernelFit(shared_limit=capability.shared_a_block, **answer)
