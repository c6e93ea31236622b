"""The incident: Kimi K2.6's 61 layers over eight stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal import FORK, run_engine, shrink
from tests.e2e.compare import assert_same
from tests.e2e.witness import Witness, make_witness, show

pytestmark = [pytest.mark.engine, pytest.mark.longest]

PROMPTS = [(5, 9, 17, 33), tuple(range(40, 60))]
NEW_TOKENS = 2
FIXED_UPSTREAM = Version("0.5.18")
TIMEOUT_S = 1500


@pytest.fixture(scope="module")
def kimi_k26(kimi: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Witness:
    folder: Path = tmp_path_factory.mktemp("kimi-k2.6")
    return make_witness(shrink(kimi), folder, PROMPTS, NEW_TOKENS)


def test_stock_triton_dies(kimi_k26: Witness, sglang_release: Version) -> None:
    if sglang_release >= FIXED_UPSTREAM:
        pytest.skip(f"SGLang {sglang_release} has upstream's own fix of the probe (0.5.18)")
    run = run_engine(
        kimi_k26.folder,
        PROMPTS,
        pp_size=8,
        attention_backend="triton",
        timeout_s=TIMEOUT_S,
        on_progress=show,
        env={**FORK, "SGLANG_PP_MLA_DISABLE": "1"},
    )
    assert run.failed
    assert not run.timed_out
    assert run.rank in range(1, 8)
    assert "get_value_buffer" in run.traceback
    assert run.traceback.rstrip().endswith("IndexError: list index out of range")


def test_triton_pp_answers(kimi_k26: Witness) -> None:
    run = run_engine(
        kimi_k26.folder,
        PROMPTS,
        pp_size=8,
        attention_backend="triton_pp",
        timeout_s=TIMEOUT_S,
        on_progress=show,
        max_new_tokens=NEW_TOKENS,
        env=FORK,
    )
    assert not run.failed, run.error
    assert_same(run.answers, kimi_k26.of(PROMPTS))
