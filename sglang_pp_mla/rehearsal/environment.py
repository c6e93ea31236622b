"""The environment in which the real engine runs on a CPU.

What is set, and why, as found on SGLang 0.5.11 and 0.5.23:

===================================  ==========================================================================
``TRITON_INTERPRET``                 Triton's own interpreter runs the attention kernels
``SGLANG_USE_CPU_ENGINE``            SGLang takes its CPU path
``SGLANG_NCCL_SO_PATH``              a file that does not exist, so the pipeline group uses Gloo
``SGLANG_CPU_OMP_THREADS_BIND``      one CPU set a rank, on releases that count every rank (0.5.19 and later)
``TORCH_COMPILE_DISABLE``            functions SGLang marks for torch.compile run as they are: compiling them in
                                     every process takes longer than all that a rehearsal asks of them
``PYTHONPATH``                       the replacement for the CUDA kernel library comes first
``SGLANG_PP_MLA_REHEARSAL_VLLM``     it answers ``vllm`` too, where the CPU path imports that (to 0.5.7)
``SGLANG_PP_MLA_REHEARSAL_STREAMS``  it gives stages the CPU's streams, where they use CUDA's on any device
                                     (0.5.7 to 0.5.10.post1)
===================================  ==========================================================================
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KERNEL_LIBRARY = Path(__file__).with_name("kernel_library")
"""Folder with the ``sitecustomize`` that answers ``sgl_kernel``."""

FORK: Mapping[str, str] = {"SGLANG_PP_MLA_REHEARSAL_FORK": "1"}
"""Passed as ``env``: SGLang's processes fork from the one that has imported it.

SGLang spawns them, and each takes half a minute of CPU time to import SGLang anew: most of the time that
stages on a few cores need to start. What they then run is the same.
"""

_FIND = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
version = None
if spec is not None:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pass
folders = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"version": version, "folder": folders[0] if folders else None}))
"""


class RehearsalError(RuntimeError):
    """A rehearsal cannot be held. The message is one sentence and says what to do."""


@dataclass(frozen=True)
class Installation:
    """An SGLang as ``python`` sees it: its release (None if unknown) and the package's folder."""

    python: str
    version: str | None
    folder: Path


def find_sglang(python: str = sys.executable, env: Mapping[str, str] | None = None) -> Installation:
    """Find SGLang from the interpreter ``python`` without importing it.

    ``env`` is added to this process's environment. Raises :class:`RehearsalError` if the interpreter
    does not run or has no SGLang.
    """
    command = [python, "-c", _FIND]
    try:
        done = subprocess.run(
            command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=True
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RehearsalError(
            f"The interpreter {python} could not be asked for SGLang ({type(error).__name__}); "
            "pass the path of a working Python 3.10 to 3.13."
        ) from error
    if answer["folder"] is None:
        raise RehearsalError(
            f"SGLang is not installed for {python}; install it there with "
            f"`{python} -m pip install sglang`, or pass the interpreter that has it."
        )
    return Installation(python, answer["version"], Path(answer["folder"]))


def wants_cpu_sets(folder: Path) -> bool:
    """Whether the SGLang in ``folder`` wants one CPU set for every rank, pipeline stages included.

    Those releases bind threads before the groups are made and compare the number of ranks with the
    number of NUMA nodes; the earlier ones count tensor-parallel ranks only. Read from the source.
    """
    try:
        source = (folder / "srt" / "utils" / "numa_utils.py").read_text(encoding="utf-8")
    except OSError:
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "init_threads_binding":
            return "world_size" in {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return False


def _mentions(module: Path, text: str) -> bool:
    try:
        return text in module.read_text(encoding="utf-8")
    except OSError:
        return False


def wants_vllm(folder: Path) -> bool:
    """Whether the CPU path of the SGLang in ``folder`` takes layers from vllm, which it does not require."""
    return _mentions(folder / "srt/layers/activation.py", "from vllm.model_executor.layers.activation import")


def wants_cuda_streams(folder: Path) -> bool:
    """Whether the pipeline's event loop of the SGLang in ``folder`` uses CUDA's streams on any device."""
    return _mentions(folder / "srt/managers/scheduler_pp_mixin.py", "torch.cuda.current_stream()")


def cpu_sets(cpus: Sequence[int], ranks: int) -> str:
    """Share ``cpus`` out over ``ranks``: sets joined by ``|``, for example ``0|0|1|1``.

    With fewer ranks than CPUs a set is a range of neighbours (``0,1|2,3``); with more, neighbouring
    ranks share a CPU. Raises ``ValueError`` for no CPU or no rank.
    """
    if not cpus or ranks < 1:
        raise ValueError(f"{ranks} ranks cannot be shared out over {len(cpus)} CPUs; give at least one of each.")
    sets = []
    for rank in range(ranks):
        first = rank * len(cpus) // ranks
        last = max(first + 1, (rank + 1) * len(cpus) // ranks)
        sets.append(",".join(str(cpu) for cpu in cpus[first:last]))
    return "|".join(sets)


def rehearsal_environment(
    installation: Installation,
    *,
    pp_size: int,
    tp_size: int = 1,
    partition: str | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of a rehearsal's processes: this process's, with the above set.

    ``partition`` is ``SGLANG_PP_LAYER_PARTITION``, layer counts joined by commas; without it one that is
    set for this process is taken out, so that a rehearsal is what its arguments say. ``extra`` wins over
    everything but the path of the replacement.
    """
    environment = dict(os.environ)
    environment.pop("SGLANG_PP_LAYER_PARTITION", None)
    environment.pop("SGLANG_CPU_OMP_THREADS_BIND", None)
    # Without bytecode on disk each stage compiles all of SGLang and torch anew, a minute of CPU time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    cpus = sorted(os.sched_getaffinity(0))
    ranks = pp_size * tp_size
    environment.update(
        TRITON_INTERPRET="1",
        SGLANG_USE_CPU_ENGINE="1",
        SGLANG_NCCL_SO_PATH="/nonexistent.so",
        # The stages share the machine; threads of their own would only take turns on the same cores.
        OMP_NUM_THREADS=str(max(1, len(cpus) // ranks)),
        TORCH_COMPILE_DISABLE="1",
        # Else the titles SGLang gives its processes overwrite the environment by which they are found.
        SPT_NOENV="1",
        HF_HUB_OFFLINE="1",
        PYTHONUNBUFFERED="1",
    )
    if wants_cpu_sets(installation.folder):
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = cpu_sets(cpus, ranks)
    elif tp_size > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = cpu_sets(cpus, tp_size)
    if wants_vllm(installation.folder):
        environment["SGLANG_PP_MLA_REHEARSAL_VLLM"] = "1"
    if wants_cuda_streams(installation.folder):
        environment["SGLANG_PP_MLA_REHEARSAL_STREAMS"] = "1"
    if partition is not None:
        environment["SGLANG_PP_LAYER_PARTITION"] = partition
    environment.update(extra or {})
    path = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(KERNEL_LIBRARY), *([path] if path else [])])
    return environment
