"""MLA of any widths through the real engine, in both decodes: what transformers gives on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_pp_mla.rehearsal import FORK, EngineFailure, engine, shrink
from tests.e2e.compare import assert_same
from tests.e2e.witness import PROMPTS, Witness, make_witness, show

pytestmark = [pytest.mark.engine, pytest.mark.release("0.5.23")]
NEW_TOKENS = 3
GEOMETRIES = {
    "512+64": "DeepSeek, Kimi",
    "256+32": "MiniCPM3",
    "256+64": "Mistral Small 4",
    "128+64": "a latent of two rope parts",
    "32+16": "as narrow as a tile",
    "100+28": "widths that are no power of two",
}
# In `make test`: the geometry that dies in stock, over a pipeline, both ways.
SHORT = ("256+64", 2)


@pytest.fixture(scope="module")
def witnesses(kimi: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Witness] = {}

    def witness(geometry: str) -> Witness:
        if geometry not in made:
            config = shrink(kimi, layers=3)
            config["kv_lora_rank"], config["qk_rope_head_dim"] = map(int, geometry.split("+"))
            folder: Path = tmp_path_factory.mktemp(geometry)
            made[geometry] = make_witness(config, folder, PROMPTS, NEW_TOKENS)
        return made[geometry]

    return witness


CASES = [
    pytest.param(
        geometry,
        pp_size,
        decode,
        id=f"{geometry}-PP{pp_size}-{decode}",
        marks=[] if (geometry, pp_size) == SHORT else [pytest.mark.longest],
    )
    for geometry in GEOMETRIES
    for pp_size in (1, 2)
    for decode in ("stock", "flat")
]


@pytest.mark.parametrize(("geometry", "pp_size", "decode"), CASES)
def test_the_tokens_are_the_references(geometry: str, pp_size: int, decode: str, witnesses: Any) -> None:
    witness = witnesses(geometry)
    with engine(
        witness.folder,
        attention_backend="triton_pp",
        pp_size=pp_size,
        on_progress=show,
        env={**FORK, "SGLANG_PP_MLA_DECODE": decode},
    ) as running:
        answers = running.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        lines = [line for line in running.log.splitlines() if "triton_pp PP" in line]
    assert_same(answers, witness.of(PROMPTS))
    assert len(lines) == pp_size
    assert all(("flat decode in" in line) == (decode == "flat") for line in lines)


@pytest.mark.longest
def test_a_cache_in_bf16_gives_the_same_tokens(witnesses: Any) -> None:
    """In the flat decode: Triton's interpreter multiplies the bit patterns of bf16, and stock hands it those.

    SGLang refuses an fp8 cache for MLA on a CPU; the kernels' own tests have it.
    """
    witness = witnesses("512+64")
    with engine(
        witness.folder,
        attention_backend="triton_pp",
        pp_size=2,
        engine_args={"kv_cache_dtype": "bf16"},
        on_progress=show,
        env={**FORK, "SGLANG_PP_MLA_DECODE": "flat"},
    ) as running:
        answers = running.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    # A bf16 number has eight bits; in float32 the largest difference is below 1e-4.
    assert assert_same(answers, witness.of(PROMPTS), tolerance=0.05) > 1e-3


@pytest.mark.longest
def test_stock_dies_on_the_first_token(witnesses: Any, sglang_release: Version) -> None:
    if sglang_release < Version("0.5.12"):
        pytest.skip(f"SGLang {sglang_release} loads the values by themselves")
    with (
        pytest.raises(EngineFailure, match="make_shape_compatible"),
        engine(
            witnesses("256+64").folder,
            attention_backend="triton",
            pp_size=1,
            on_progress=show,
            env={**FORK, "SGLANG_PP_MLA_DISABLE": "1"},
        ) as running,
    ):
        running.generate(PROMPTS[:1], max_new_tokens=NEW_TOKENS)
