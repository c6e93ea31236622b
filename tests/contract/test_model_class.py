"""What is read of SGLang's model classes is what its own registry and ``inspect`` say, for every architecture."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sglang_pp_mla.model_class import find_model_class
from sglang_pp_mla.rehearsal import find_sglang, rehearsal_environment

ASK = """
import inspect, json, os
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from sglang.srt.models.registry import ModelRegistry
forwards = {name: getattr(ModelRegistry.models[name], "forward", None) for name in ModelRegistry.get_supported_archs()}
json.dump({
    name: None if forward is None else "pp_proxy_tensors" in inspect.signature(forward).parameters
    for name, forward in forwards.items()
}, answer)
answer.flush()
os._exit(0)
"""


@pytest.mark.release("0.5.23")  # it imports all models, a minute of CPU time
def test_every_architecture_is_read_as_the_registry_has_it() -> None:
    installation = find_sglang()
    environment = rehearsal_environment(installation, pp_size=1)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        env={**environment, "SGLANG_PP_MLA_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    registered: dict[str, bool | None] = json.loads(done.stdout.splitlines()[-1])
    assert len(registered) > 150, "most of SGLang's models could not be imported"
    assert sum(taken is True for taken in registered.values()) > 50
    wrong = {}
    for name, takes_part in registered.items():
        found = find_model_class(installation.folder, name)
        if found is None or (found.name, found.takes_part) != (name, takes_part):
            wrong[name] = (takes_part, found)
    assert not wrong
