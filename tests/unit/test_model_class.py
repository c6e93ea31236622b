"""Which class serves an architecture and whether it takes part in a pipeline, on the installed SGLang's sources."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_pp_mla.model_class import find_model_class
from tests.unit.small_sglang import write

# As SGLang's own registry and inspect.signature have it, in 0.5.11 and in 0.5.23.
CAPABLE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",  # inherits it, in another module
    "MistralLarge3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
INCAPABLE = (
    "DeepseekVL2ForCausalLM",
    "GemmaForCausalLM",
    "KimiVLForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "MiniCPM3ForCausalLM",
    "Qwen2ForSequenceClassification",  # its file begins with a byte-order mark
    "Qwen3NextForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration",  # a class of transformers with no forward of its own
)


@pytest.fixture(scope="module")
def sglang() -> Path:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@pytest.mark.parametrize("name", CAPABLE)
def test_architectures_that_take_part(sglang: Path, name: str) -> None:
    found = find_model_class(sglang, name)
    assert found is not None
    assert (found.name, found.takes_part) == (name, True)


@pytest.mark.parametrize("name", INCAPABLE)
def test_architectures_that_take_no_part(sglang: Path, name: str) -> None:
    found = find_model_class(sglang, name)
    assert found is not None
    assert (found.name, found.takes_part) == (name, False)


def test_what_sglang_does_not_know_is_served_by_its_fallback(sglang: Path) -> None:
    found = find_model_class(sglang, "NobodysForCausalLM")
    assert found is not None
    assert (found.name, found.takes_part) == ("TransformersForCausalLM", True)


MODELS = {
    "sglang/srt/models/base.py": """
        class Base:
            def forward(self, input_ids, *, pp_proxy_tensors=None): ...
        """,
    "sglang/srt/models/mine.py": """
        try:
            from sglang.srt.models.base import Base as Above
        except ImportError:
            raise
        from .base import Base
        from torch import nn

        class Inherits(Above, nn.Module): ...
        class Relative(Base): ...
        class Overrides(Base):
            def forward(self, input_ids, **kwargs): ...
        class NotAnEntry(Base): ...
        class Module(nn.Module): ...
        Alias = Relative
        Made = type("Made", (Base,), {})
        EntryClass = [
            Inherits, Relative,
            Overrides, Module, Made,
            Alias,
        ]
        """,
}


@pytest.mark.parametrize(
    ("name", "takes_part"),
    [
        ("Inherits", True),
        ("Relative", True),
        ("Alias", True),
        ("Overrides", False),
        ("Module", False),
        ("Made", None),
    ],
)
def test_bases_are_followed_and_what_cannot_be_read_is_unknown(
    tmp_path: Path, name: str, takes_part: bool | None
) -> None:
    write(tmp_path, MODELS)
    found = find_model_class(tmp_path / "sglang", name)
    assert found is not None
    assert (found.file, found.takes_part) == ("srt/models/mine.py", takes_part)


def test_a_class_that_is_no_entry_serves_nothing(tmp_path: Path) -> None:
    write(tmp_path, MODELS)
    assert find_model_class(tmp_path / "sglang", "NotAnEntry") is None
