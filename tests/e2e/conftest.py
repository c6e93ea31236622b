"""The model most of these tests serve."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pp_mla.rehearsal import shrink
from tests.e2e.witness import PROMPTS, RELATED, Witness, make_witness


@pytest.fixture(scope="session")
def seven_layers(kimi: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Witness:
    folder = tmp_path_factory.mktemp("seven-layers")
    return make_witness(shrink(kimi, layers=7), folder, [*PROMPTS, RELATED])
