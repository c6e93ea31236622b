"""Other packages patch what ours stands around, before and after us: both work, on the release's own builder.

The cases, and the patches they stand for, are in ``coexistence.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ORDERS = {"before": ["-S"], "after": []}  # without our .pth, arming is left to the entry point or the test

HOOKS, REPLACE, WRAPT = ["around", "before", "after"], ["replace"], ["wrapt"]
FACTORY, CLASS, POOL = ["factory"], ["class"], ["pool"]
SEEN = {
    "builder-hooks": HOOKS,
    "builder-replace": REPLACE,
    "builder-wrapt": WRAPT,
    "getter-hooks": HOOKS,
    "getter-replace": REPLACE,
    "getter-wrapt": WRAPT,
    "runner-replace": [],
    "arguments-hooks": HOOKS,
    "arguments-replace": REPLACE,
    "arguments-wrapt": WRAPT,
    "draft-hooks": HOOKS,
    "draft-wrapt": WRAPT,
    "factory-wrapped": FACTORY,
    "factory-own": FACTORY,
    "factory-own-class": FACTORY,
    "class-assigned": CLASS,
    "class-replace": CLASS,
    "class-init-hooks": HOOKS,
    "pool-patched": POOL,
    "entry-points-theirs-first": ["around"],
    "entry-points-ours-first": ["around"],
}
THEIR_CLASS = ("factory-own-class", "class-assigned", "class-replace")


@pytest.fixture(scope="module", params=ORDERS)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case came to in one order."""
    order = request.param
    folder = tmp_path_factory.mktemp(order)
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_PP_MLA_DISABLE"}
    done = subprocess.run(
        [
            *(sys.executable, *ORDERS[order], "-W", "ignore"),
            *(str(HERE / "coexistence.py"), order, str(HERE.parents[1] / "upstream_repro/buffer-probe"), str(folder)),
        ],
        env=environment | {"PYTHONPATH": sysconfig.get_path("purelib")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {each["case"]: each | {"stderr": done.stderr} for each in found}


@pytest.mark.parametrize("case", SEEN)
def test_both_packages_work_in_either_order(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    outcome = outcomes[case]
    assert "error" not in outcome, outcome["error"]
    for backend in ("triton", "triton_pp"):
        built = outcome[backend]
        # Newer releases resolve a record more than once.
        times = len(built["seen"]) // max(1, len(SEEN[case]))
        assert built["seen"] == SEEN[case] * max(1, times)
        assert built["runner"] == ("Theirs" if case == "runner-replace" else "ModelRunner")
        assert built["v_head_dim"] == 512
        assert built["left_on_pool"] == (["get_value_buffer"] if case == "pool-patched" else [])
        assert ("Theirs" in built["classes"]) == (case in THEIR_CLASS)
        # Multi-step drafts are SGLang's own Triton backend.
        ours = backend == "triton_pp" and case != "factory-own-class" and not case.startswith("draft")
        assert ("TritonPPAttnBackend" in built["classes"]) == ours


def test_a_factory_of_another_class_is_named_in_the_log(outcomes: dict[str, dict[str, Any]]) -> None:
    (line,) = outcomes["factory-own-class"]["said"]
    assert "another_factory took the place of SGLang's Triton factory and built" in line
    assert all(outcome["said"] == [] for case, outcome in outcomes.items() if case != "factory-own-class")


def test_a_broken_plugin_beside_ours_is_reported_by_sglang(outcomes: dict[str, dict[str, Any]]) -> None:
    assert "Failed to load plugin broken" in outcomes["entry-points-ours-first"]["stderr"]
