"""The fix stands around what builds backends, in the release at hand, and nowhere else."""

from __future__ import annotations

import types

import pytest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative import draft_utils

from sglang_pp_mla.fixes import Changes
from sglang_pp_mla.fixes.buffer_probe import change_draft_factory
from sglang_pp_mla.stage import stages_of
from sglang_pp_mla.wiring.arming import decisions
from tests.unit.pools import LATENT, make_pool

STAGE = stages_of((4, 3))[1]
BUILDERS = ("init_attention_backend", "init_attention_backends", "_get_attention_backend")


def test_the_fixes_of_what_is_imported_here_are_applied():
    states = {decision.fix.name: decision.state for decision in decisions()}
    assert states["triton-pp"] == states["buffer-probe"] == "applied"


def test_every_builder_of_the_runner_is_wrapped_and_nothing_else_of_it():
    wrapped = {name for name, value in vars(ModelRunner).items() if type(value).__name__ == "FunctionWrapper"}
    assert wrapped == {name for name in BUILDERS if name in vars(ModelRunner)}
    assert wrapped & {"init_attention_backend", "init_attention_backends"}


def test_the_draft_factories_are_wrapped():
    for create in ("create_decode_backend", "create_draft_extend_backend"):
        assert type(vars(draft_utils.DraftBackendFactory)[create]).__name__ == "FunctionWrapper"


def test_a_wrapped_draft_factory_builds_with_probes_answered_locally():
    """What a factory needs before it builds differs by release; here it goes straight to the probe."""

    class DraftBackendFactory:
        draft_model_runner = types.SimpleNamespace(token_to_kv_pool=make_pool("mla", STAGE))

        def create_decode_backend(self):
            return self.draft_model_runner.token_to_kv_pool.get_value_buffer(0)

    factory = DraftBackendFactory()
    with pytest.raises(IndexError):
        factory.create_decode_backend()
    with Changes() as changes:
        change_draft_factory(types.SimpleNamespace(DraftBackendFactory=DraftBackendFactory), changes)
        assert factory.create_decode_backend().shape[-1] == LATENT
    with pytest.raises(IndexError):
        factory.create_decode_backend()
