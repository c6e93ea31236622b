"""A model whose answers are known, for the tests here that start engines."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pp_mla.rehearsal import shrink
from tests.e2e.witness import PROMPTS, Witness, make_witness


@pytest.fixture(scope="session")
def known_answers(kimi: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Witness:
    return make_witness(shrink(kimi, layers=7), tmp_path_factory.mktemp("known"), PROMPTS[:3])
