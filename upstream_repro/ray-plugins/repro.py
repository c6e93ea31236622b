#!/usr/bin/env python3
"""SGLang under --use-ray: the scheduler actors do not load SGLang's plugins.

    python repro.py        the actor's own constructor, and a plugin made for it; no GPU, no Ray cluster

`run_scheduler_process` begins with `load_plugins()`, before it imports the scheduler. Under --use-ray
`SchedulerActor` takes its place and does not, and a Ray worker inherits nothing from the process that asked
for it. So an installed plugin acts everywhere but where the model runs.

A plugin is installed in a temporary folder, through the entry point that SGLang documents, and the class
that Ray would start is constructed in this process until it asks Ray for its GPU. Ray must be installed; no
cluster is started. GPU libraries that cannot be imported here are replaced by placeholders.

Exit status: 0 the actor loads the plugin; 1 it does not; 2 wrong input; 3 nothing could be told.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import tempfile
import types
from pathlib import Path

CLEAN, FAULT, WRONG_INPUT, INCONCLUSIVE = 0, 1, 2, 3
PLUGIN = "sglang_plugin_of_repro"


class Placeholder(types.ModuleType):
    __path__: list = []
    __all__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} is a placeholder: its library is not available here")


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


class AskedForGpu(Exception):
    """The actor has imported the scheduler and asks Ray which GPU it was given."""


def install_plugin(folder: Path) -> None:
    """What pip leaves of a plugin: a module, and metadata with the entry point."""
    (folder / f"{PLUGIN}.py").write_text("loaded = False\n\n\ndef activate():\n    global loaded\n    loaded = True\n")
    metadata = folder / f"{PLUGIN}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = {PLUGIN}:activate\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def plugin_is_loaded() -> bool:
    return getattr(sys.modules.get(PLUGIN), "loaded", False)


def construct(module: types.ModuleType) -> None:
    """The actor as Ray makes it in its worker, without one."""

    def no_gpu():
        raise AskedForGpu

    module.ray.get_runtime_context = no_gpu
    actor = module.SchedulerActor.__ray_metadata__.modified_class
    # Ray adds parameters of its own, by keyword only.
    parameters = inspect.signature(actor.__init__).parameters.values()
    arguments = [each for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD][1:]
    actor(*[None] * len(arguments))


def examine(folder: Path) -> int:
    from sglang.srt import plugins

    module = importlib.import_module("sglang.srt.ray.scheduler_actor")
    install_plugin(folder)
    try:
        construct(module)
    except AskedForGpu:
        pass
    by_actor = plugin_is_loaded()
    plugins.load_plugins()
    if not plugin_is_loaded():
        print("SGLang did not load the plugin when asked to: this process had loaded its plugins", file=sys.stderr)
        return INCONCLUSIVE
    said = "loads the plugin" if by_actor else "asks for its GPU, its scheduler imported, and has not loaded the plugin"
    print(f"SGLang {importlib.metadata.version('sglang')}: the Ray actor {said}")
    return CLEAN if by_actor else FAULT


def main(words: list[str]) -> int:
    if words:
        print("repro.py takes no arguments", file=sys.stderr)
        return WRONG_INPUT
    for name in ("sglang", "ray"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed in this Python environment", file=sys.stderr)
            return INCONCLUSIVE
    os.environ.update(CUDA_VISIBLE_DEVICES="", SGLANG_USE_CPU_ENGINE="1")
    os.environ.pop("SGLANG_PLUGINS", None)  # the user's choice of plugins
    sys.meta_path.insert(0, PlaceholderFinder())
    with tempfile.TemporaryDirectory() as folder:
        try:
            return examine(Path(folder))
        except Exception as error:
            print(f"the actor could not be constructed here: {type(error).__name__}: {error}", file=sys.stderr)
            return INCONCLUSIVE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
