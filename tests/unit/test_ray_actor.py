"""The initialiser that travels to Ray's actors, pickled as Ray does it; a real Ray is in tests/engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from sglang_pp_mla.rehearsal import KERNEL_LIBRARY

SCRIPT = """
import dataclasses, inspect, json, sys, types
from ray import cloudpickle
from sglang.srt import plugins
from sglang.srt.ray.scheduler_actor import SchedulerActor
from sglang.srt.server_args import ServerArgs
from sglang_pp_mla.fixes.triton_pp import asked_for, copies_keep_the_note

def noted(record):
    return asked_for(types.SimpleNamespace(server_args=record))

stock = ServerArgs(model_path="dummy")
ours = ServerArgs(model_path="dummy", attention_backend="triton_pp")
if hasattr(ServerArgs, "resolve_once"):
    ours.resolve_once()
told = {"noted": noted(ours)}
if dataclasses.is_dataclass(ServerArgs):
    told["copy"] = noted(dataclasses.replace(ours, dist_init_addr="here"))
    with copies_keep_the_note(ours):
        told["copy_kept"] = noted(dataclasses.replace(ours, dist_init_addr="here"))

# The class as another process has it. The release's own initialiser is replaced: it wants a GPU and a Ray.
started = SchedulerActor.__ray_metadata__.modified_class
pickled = cloudpickle.dumps(started)
cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()  # else loads gives back the class of this process
actor = cloudpickle.loads(pickled)
told["by_value"] = actor is not started
calls = []
plugins.load_plugins = lambda: calls.append("plugins")
own = inspect.unwrap(actor.__init__)
own.__code__ = (lambda self, *args, **kwargs: note_it(*args, **kwargs)).__code__
own.__globals__["note_it"] = lambda *args, **kwargs: calls.append(
    ["scheduler", noted(ServerArgs(model_path="dummy")) if dataclasses.is_dataclass(ServerArgs) else None])

def start(record):
    calls.clear()
    try:
        actor(server_args=record, pp_rank=1)
    except RuntimeError as error:
        return str(error)
    return list(calls)

told["stock"], told["ours"] = start(stock), start(ours)
for name in [name for name in sys.modules if name.split(".")[0] == "sglang_pp_mla"]:
    del sys.modules[name]
sys.modules["sglang_pp_mla"] = None
told["stock_without_us"], told["ours_without_us"] = start(stock), start(ours)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(KERNEL_LIBRARY), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_copy_loses_the_note_unless_it_is_kept(told: dict[str, Any]) -> None:
    assert told["noted"]
    if "copy" not in told:
        pytest.skip("this release's record is no dataclass, and nothing copies it")
    assert not told["copy"]
    assert told["copy_kept"]


def test_the_actor_loads_plugins_first_and_keeps_the_note_through_copies(told: dict[str, Any]) -> None:
    copied = "copy" in told
    assert told["by_value"]
    assert told["stock"] == ["plugins", ["scheduler", False if copied else None]]
    assert told["ours"] == ["plugins", ["scheduler", True if copied else None]]


def test_a_node_without_the_package_says_so_only_where_triton_pp_was_asked_for(told: dict[str, Any]) -> None:
    assert told["stock_without_us"][0] == "plugins"
    assert told["stock_without_us"][1][0] == "scheduler"
    assert f"stage PP1 is on {socket.gethostname()}" in told["ours_without_us"]
    assert "install it there" in told["ours_without_us"]
