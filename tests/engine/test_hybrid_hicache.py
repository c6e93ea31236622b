"""HiCache on a model that mixes MLA and linear attention: a later stage gets back all of its layers, and its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_pp_mla.fixes.hybrid_hicache import FIX
from sglang_pp_mla.rehearsal.environment import find_sglang, rehearsal_environment

HERE = Path(__file__).parent
pytestmark = pytest.mark.release("0.5.11")
INSTALLATION = find_sglang()

needs_fault = pytest.mark.skipif(
    not FIX.evidence(INSTALLATION.folder), reason="this SGLang brings the layer maps over to the stage by itself"
)


@pytest.fixture(scope="module")
def stages() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(HERE / "load_back.py")],
        env=rehearsal_environment(INSTALLATION, pp_size=1),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["stage"]: each for each in json.loads(done.stdout.splitlines()[-1])}


@needs_fault
@pytest.mark.parametrize("stage", ["first", "later"])
def test_every_layer_is_loaded_back(stages, stage):
    assert stages[stage]["fixed"]
    assert stages[stage]["wrong"] == []


@needs_fault
def test_without_the_fix_a_later_stage_keeps_what_was_there_before(stages):
    """Layers 4 to 8, of which 5 and 7 have full attention: of all of them only layer 4 comes back."""
    assert stages["first"]["stock"] == []
    assert stages["later"]["stock"] == [5, 6, 7, 8]
