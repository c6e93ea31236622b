"""Other installations than the tests' own, made by a ``sitecustomize`` in a folder on ``PYTHONPATH``."""

from __future__ import annotations

import os
from pathlib import Path

_START = """
import os, sys, threading

FOLDER = os.path.dirname(__file__)


def without_the_pth():
    before = len(sys.meta_path)
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") != "ArmOnSGLang"]
    if len(sys.meta_path) == before:
        os._exit(99)  # nothing was taken away: whatever the test then saw would mean nothing


def report_when_asked():
    import json, time

    while not os.path.exists(f"{FOLDER}/report"):
        time.sleep(0.2)
    arming = sys.modules.get("sglang_pp_mla.wiring.arming")
    with open("/proc/self/cmdline") as file:
        title = file.read().replace("\\0", " ").strip()
    states = {decision.fix.name: decision.state for decision in arming.decisions()} if arming else None
    with open(f"{FOLDER}/{os.getpid()}.new", "w") as file:
        json.dump({"title": title, "states": states}, file)
    os.rename(f"{FOLDER}/{os.getpid()}.new", f"{FOLDER}/{os.getpid()}.json")


if os.environ.get("TEST_WITHOUT_PTH") == "1":
    without_the_pth()
threading.Thread(target=report_when_asked, daemon=True).start()
"""

_PLUGIN = """
import os


def register():
    open(f"{os.path.dirname(__file__)}/{os.getpid()}.plugin", "w").close()
"""

ENTRY_POINTS_ONLY = {"TEST_WITHOUT_PTH": "1"}
"""Added to the environment: our ``.pth`` does nothing, as for a plugin that has none."""


def add_witnesses(folder: Path) -> dict[str, str]:
    """Write into ``folder`` what watches every process, and a plugin of SGLang's beside this package.

    Returns the environment that puts it into effect.
    """
    (folder / "sitecustomize.py").write_text(_START)
    (folder / "bystander.py").write_text(_PLUGIN)
    metadata = folder / "bystander-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bystander\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nbystander = bystander:register\n")
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([path] if path else [])])}


def loaded_the_plugin(folder: Path) -> set[int]:
    """Pids of the processes in which SGLang has loaded the plugin."""
    return {int(file.stem) for file in folder.glob("*.plugin")}
