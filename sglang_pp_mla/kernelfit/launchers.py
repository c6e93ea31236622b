"""SGLang's Triton launchers, loaded from its files alone, for a GPU that need not be here.

Importing SGLang takes half a minute and asks for the devices of this machine. Its kernel files need next to
nothing of it: here every package of ``sglang`` is empty, modules are read from the files as they are, and
``sglang.srt.utils`` answers what they ask of the GPU. Needs torch and Triton, and nothing else.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pp_mla.kernelfit.gpus import Gpu

_FOLDERS = ("kernels/ops/attention", "srt/layers/attention/triton_ops")
_UTILS = "sglang.srt.utils"
_LIFT = "_mla_decode_kv_splits_cap"


class _Answers(ModuleType):
    """``sglang.srt.utils`` of a machine with one GPU."""

    gpu: Gpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_, **__: name == "is_cuda"
        if name == "get_device_core_count":
            return lambda *_: self.gpu.multiprocessors
        raise AttributeError(f"{_UTILS} stands in for a GPU's answers and has no {name}")


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``sglang``'s modules under ``root``; a package is an empty module with a path."""

    def __init__(self, root: Path, gpu: Gpu) -> None:
        self.root, self.gpu = root, gpu

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        first, *rest = fullname.split(".")
        if first != "sglang":
            return None
        place = self.root.joinpath(*rest)
        if fullname == _UTILS or place.is_dir():
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return importlib.util.spec_from_file_location(fullname, f"{place}.py")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name != _UTILS:
            return ModuleType(spec.name)
        answers = _Answers(spec.name)
        answers.gpu = self.gpu
        return answers

    def exec_module(self, module: ModuleType) -> None:
        pass


def pretend_gpu(gpu: Gpu) -> None:
    """Make Triton compile, and torch answer, for ``gpu``."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    number = gpu.capability.number

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", number, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Driver())
    torch.cuda.get_device_capability = lambda *_: divmod(number, 10)


def load(root: Path, gpu: Gpu, name: str) -> ModuleType:
    """SGLang's ``decode_attention`` or ``extend_attention`` from the package folder ``root``.

    ``sys.modules`` and the finders are left as they were, so that one process can have several releases.
    Raises ``FileNotFoundError``, in one sentence, where neither of its places has it.
    """
    for folder in _FOLDERS:
        if (root / folder / f"{name}.py").is_file():
            break
    else:
        raise FileNotFoundError(
            f"{root} has no Triton {name}.py in {' or '.join(_FOLDERS)}; is it an SGLang from 0.5.3 on?"
        )
    finder, others = _Packages(root, gpu), _taken_out()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(f"sglang.{folder.replace('/', '.')}.{name}")
    finally:
        sys.meta_path.remove(finder)
        _taken_out()
        sys.modules.update(others)


def _taken_out() -> dict[str, ModuleType]:
    """SGLang's modules, which are no longer in ``sys.modules``."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "sglang"}


def decode_call(
    module: ModuleType,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    kv_indptr: Any,
    kv_indices: Any,
    num_kv_splits: Any,
    cap: int,
    *,
    scale: float,
    mla: bool,
    pdl: bool,
    page_size: int = 1,
    logit_cap: float = 0.0,
) -> Callable[[], None]:
    """A call of the release's ``decode_attention_fwd`` with the arguments that its backend gives it.

    ``q`` is ``(batch, heads, width)``, ``keys`` and ``values`` ``(slots, kv heads, width)``, ``num_kv_splits``
    the splits of each request, ``cap`` the most there may be. The partial results are allocated here, once.
    """
    import torch

    launch = module.decode_attention_fwd
    batch, heads, _ = q.shape
    partials = torch.empty((batch, heads, cap, values.shape[-1]), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, heads, cap), dtype=torch.float32, device=q.device)
    # From 0.5.10 on the KV cache's own scales follow.
    scales = known(launch, k_scale=1.0, v_scale=1.0).values()
    options = known(launch, logit_cap=logit_cap, has_mla=mla, use_pdl=pdl, page_size=page_size)
    where = q, keys, values, out, kv_indptr, kv_indices
    return partial(launch, *where, partials, lse, num_kv_splits, cap, scale, *scales, **options)


def known(function: Callable[..., Any], **wanted: Any) -> dict[str, Any]:
    """Those of the arguments that the release's function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in wanted.items() if name in parameters}


def split_kernel(root: Path) -> Any:
    """The release's ``get_num_kv_splits_triton``. Raises ``LookupError``, in one sentence, where there is none."""
    import triton
    import triton.language as tl

    name = "get_num_kv_splits_triton"
    for path in ("kernels/ops/attention/metadata.py", "srt/layers/attention/triton_backend.py"):
        if (root / path).is_file():
            kernel = functions(root / path, name, {"triton": triton, "tl": tl}).get(name)
            if kernel is not None:
                return kernel
    raise LookupError(f"{root} has no {name}; is it an SGLang from 0.5.3 on?")


def chosen_splits(kernel: Any, lengths: Any, heads: int, cap: int, multiprocessors: int) -> Any:
    """KV splits for each request of an MLA batch, int32, as the backend asks :func:`split_kernel` for them.

    It gives the configuration's key heads, of which an MLA model has as many as query heads, although the
    decode then finds one. So the kernel counts a program a head and not a tile of 16 heads. ``lengths`` is an
    int64 tensor on the device that decodes.
    """
    import torch
    import triton

    batch = len(lengths)
    splits = torch.empty(batch, dtype=torch.int32, device=lengths.device)
    most = max(256, triton.next_power_of_2(batch))
    kernel[(1,)](splits, lengths, batch, 1, heads, heads, cap, multiprocessors, MAX_NUM_SEQ=most)
    return splits


def split_cap(root: Path, asked: int, gpu: Gpu, context: int) -> int:
    """KV splits that the release's backend keeps room for with an MLA model, where the user asked for ``asked``.

    From 0.5.12 a function of its file says; it is run as it stands there.
    """
    import triton

    source = root / "srt/layers/attention/triton_backend.py"
    found = functions(source, _LIFT, {"triton": triton, "next_power_of_2": triton.next_power_of_2})
    lift = found.get(_LIFT)
    return int(lift(asked, gpu.multiprocessors, context)) if lift else asked


def functions(source: Path, name: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """A function of a file that cannot be imported here, and the file's constants, run with ``names`` about it."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    kept: list[ast.stmt] = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    namespace = dict(names)
    exec(compile(ast.Module(kept, []), str(source), "exec"), namespace)
    return namespace
