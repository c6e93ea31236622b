"""The real engine and server with ``triton_pp`` give what transformers gives on the same weights.

An engine takes most of a minute to start, so each start is asked several things.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from sglang_pp_mla.rehearsal import FORK, EngineAnswer, engine, server
from sglang_pp_mla.rehearsal.reference import greedy
from sglang_pp_mla.rehearsal.tokenizer import words
from tests.e2e.compare import assert_same
from tests.e2e.witness import LONGEST, NEW_TOKENS, PROMPTS, RELATED, Witness, show

pytestmark = pytest.mark.engine

Session = tuple[tuple[EngineAnswer, ...], EngineAnswer, EngineAnswer]


def ask(witness: Witness, **options: Any) -> Session:
    """Prompts of several lengths at once; then one that shares a prefix, twice, from the warm cache."""
    with engine(witness.folder, attention_backend="triton_pp", on_progress=show, env=FORK, **options) as running:
        together = running.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        (related,) = running.generate([RELATED], max_new_tokens=NEW_TOKENS)
        (again,) = running.generate([LONGEST], max_new_tokens=NEW_TOKENS)
        return together, related, again


@pytest.fixture(scope="module")
def single_stage(seven_layers: Witness) -> Session:
    return ask(seven_layers)


def check(witness: Witness, session: Session, page_size: int) -> None:
    together, related, again = session
    assert_same(together, witness.of(PROMPTS))
    assert_same([related, again], witness.of([RELATED, LONGEST]))
    assert related.cached_tokens >= 60 // page_size * page_size
    assert again.cached_tokens >= (len(LONGEST) - 1) // page_size * page_size


def test_one_stage(seven_layers: Witness, single_stage: Session) -> None:
    check(seven_layers, single_stage, page_size=1)


def test_two_uneven_stages_with_chunked_prefill(seven_layers: Witness) -> None:
    session = ask(seven_layers, pp_size=2, partition="4,3", engine_args={"chunked_prefill_size": 16})
    check(seven_layers, session, page_size=1)


def test_four_stages_with_pages_of_16(seven_layers: Witness) -> None:
    session = ask(seven_layers, pp_size=4, engine_args={"page_size": 16})
    check(seven_layers, session, page_size=16)


def test_two_stages_over_http(seven_layers: Witness) -> None:
    """Here the stages are spawned, as SGLang does it, and each is armed by its own ``.pth``."""
    vocabulary = words(512)
    with server(seven_layers.folder, pp_size=2, engine_args={"page_size": 16}, on_progress=show) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300)
        for prompt in (PROMPTS[2], LONGEST):
            wanted = seven_layers.answers[prompt]
            given = client.completions.create(
                model="default",
                prompt=list(prompt),
                max_tokens=NEW_TOKENS,
                temperature=0,
                logprobs=1,
                extra_body={"ignore_eos": True},
            )
            choice = given.choices[0]
            assert choice.text.split() == [vocabulary[token] for token in wanted.tokens]
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == pytest.approx(list(wanted.logprobs), abs=1e-4)
            assert given.usage is not None
            assert given.usage.prompt_tokens == len(prompt)
        assert running.pids()


def leave_out_a_layer(model: Any) -> None:
    """Layer 4 adds nothing to the residual stream."""
    layer = model.model.layers[4]
    layer.self_attn.o_proj.weight.zero_()
    for name, weight in layer.mlp.named_parameters():
        if "down_proj" in name:
            weight.zero_()


def swap_two_layers(model: Any) -> None:
    layers = model.model.layers
    third, fourth = copy.deepcopy(layers[3].state_dict()), copy.deepcopy(layers[4].state_dict())
    layers[3].load_state_dict(fourth)
    layers[4].load_state_dict(third)


@pytest.mark.parametrize("fault", [leave_out_a_layer, swap_two_layers])
def test_the_comparison_goes_red(seven_layers: Witness, single_stage: Session, fault: Callable[[Any], None]) -> None:
    """What the engine answered does not pass against a reference with one layer out or out of place."""
    faulty = copy.deepcopy(seven_layers.model)
    with torch.no_grad():
        fault(faulty)
    with pytest.raises(AssertionError):
        assert_same(single_stage[0], greedy(faulty, PROMPTS, NEW_TOKENS))
