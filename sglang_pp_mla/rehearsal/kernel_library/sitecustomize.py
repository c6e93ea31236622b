"""Answer ``sgl_kernel`` in the processes of a rehearsal, which have no GPU to load the real one on.

Older releases need more: ``vllm``, which their CPU path imports without requiring it, and streams that
are not CUDA's.

The folder of this file goes on ``PYTHONPATH`` of those processes and of no others. It imports nothing
outside the standard library, and nothing of SGLang.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types

_LIBRARY = "sgl_kernel"
# SGLang to 0.5.7 ends these modules, on a CPU, with an import of vllm's classes over its own.
_INSTEAD = {
    "vllm.model_executor.layers.activation": "sglang.srt.layers.activation",
    "vllm.model_executor.layers.layernorm": "sglang.srt.layers.layernorm",
}
_VLLM = ()
if os.environ.get("SGLANG_PP_MLA_REHEARSAL_VLLM") == "1":
    _VLLM = ("vllm", "vllm._custom_ops", "vllm.model_executor", "vllm.model_executor.layers", *_INSTEAD)
_EVENT_LOOP = "sglang.srt.managers.scheduler_pp_mixin"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _Absent:
    """Something of the kernel library. It can be imported, named in a type and looked into; not called."""

    def __init__(self, path):
        self.__dict__["_path"] = path

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{self._path} was called, but a rehearsal has no CUDA kernel library; run this model or option "
            "on a GPU, or rehearse it with options whose CPU path does without."
        )

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._path}.{name}")

    def __or__(self, other):
        return object

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (object,)

    def __repr__(self):
        return f"<{self._path}, absent in a rehearsal>"


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Unchanged(types.ModuleType):
    """In place of vllm's layers, SGLang's own of the same name, which have a plain torch path."""

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(sys.modules[_INSTEAD[self.__name__]], name)


class _Finder:
    """Meta-path finder and loader of the replacement, for the library and all its submodules."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == _LIBRARY or name.startswith(_LIBRARY + ".") or name in _VLLM:
            # Every one is a package, so that any submodule a release asks for is found as well.
            return importlib.machinery.ModuleSpec(name, cls, origin="rehearsal", is_package=True)
        if name == _EVENT_LOOP and os.environ.get("SGLANG_PP_MLA_REHEARSAL_STREAMS") == "1":
            _streams_of_the_cpu()
        return None

    @staticmethod
    def create_module(spec):
        return _Unchanged(spec.name) if spec.name in _INSTEAD else _AbsentModule(spec.name)

    @staticmethod
    def exec_module(module):
        return None


def _streams_of_the_cpu():
    """What later releases do here: take streams and events of the device at hand, which on a CPU do nothing."""
    import torch

    torch.cuda.current_stream = torch.cpu.current_stream
    torch.cuda.Event = torch.cpu.Event


def _run_the_shadowed_one():
    """Run the ``sitecustomize`` that Python would have found had this folder not been put first."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _fork_instead_of_spawn():
    """Let SGLang's processes fork from one that has imported all of it, where they would each import it anew."""
    import multiprocessing

    set_start_method = multiprocessing.set_start_method

    def set_forking_start_method(method, force=False):
        if method == "spawn" and "sglang.srt" in sys.modules:
            # Every model's module, eight seconds of CPU time: else each stage imports them for itself.
            importlib.import_module("sglang.srt.models.registry")
        set_start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_forking_start_method


sys.meta_path.insert(0, _Finder)
if os.environ.get("SGLANG_PP_MLA_REHEARSAL_FORK") == "1":
    _fork_instead_of_spawn()
_run_the_shadowed_one()
