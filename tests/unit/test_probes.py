"""The probe mechanism on SGLang's real pools: every split, stage, pool kind and dtype."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pp_mla.probes import GETTERS, held_layers, stage_local_probes
from sglang_pp_mla.stage import stages_of
from tests.unit.pools import KINDS, LATENT, VALUE_HEAD, make_pool, own_layers

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)

stages = st.lists(st.integers(1, 9), min_size=1, max_size=8).flatmap(
    lambda counts: st.sampled_from(stages_of(tuple(counts)))
)


def same_storage(one, other):
    """Whether two answers, tensors or pairs of them, are views of the same memory."""
    if isinstance(one, tuple):
        return all(same_storage(*pair) for pair in zip(one, other, strict=True))
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype


class Counter:
    """SGLang's layer transfer counter as the pool sees it: an index must be one of the stage's own."""

    def __init__(self, layers):
        self.layers = layers
        self.waited = []

    def wait_until(self, index):
        assert 0 <= index < self.layers, f"waits for layer {index} of {self.layers}"
        self.waited.append(index)


@given(stage=stages, kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES), probed=st.integers(0, 80))
@settings(max_examples=150, deadline=None)
def test_a_probe_is_answered_with_a_layer_of_the_stage(stage, kind, dtype, probed):
    pool = make_pool(kind, stage, dtype)
    layers = own_layers(kind, stage)
    expected = probed if probed in layers else min(layers)
    for getter in GETTERS:
        if kind == "swa" and probed not in layers:
            continue  # the pool's first full-attention layer, see the test below
        with stage_local_probes(pool):
            answered = getattr(pool, getter)(probed)
        assert same_storage(answered, getattr(pool, getter)(expected))
    assert pool.get_value_buffer(layers[0]).dtype == dtype


@given(stage=stages, kind=st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None, report_multiple_bugs=False)
def test_layer_0_gives_the_size_of_a_value_head_on_every_stage(stage, kind):
    pool = make_pool(kind, stage)
    with stage_local_probes(pool):
        size = pool.get_value_buffer(0).shape[-1]
        if hasattr(pool, "get_v_head_dim"):
            assert pool.get_v_head_dim() == size
    assert size == (LATENT if kind.endswith("mla") else VALUE_HEAD)


@given(stage=stages, kind=st.sampled_from(("mla", "mha", "hybrid-mla")), probed=st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_a_transfer_counter_is_asked_for_a_layer_of_the_stage(stage, kind, probed):
    pool = make_pool(kind, stage)
    counter = Counter(len(stage.layers))
    pool.register_layer_transfer_counter(counter)
    with stage_local_probes(pool):
        pool.get_value_buffer(probed)
    layers = own_layers(kind, stage)
    expected = (probed if probed in layers else layers[0]) - stage.start_layer
    assert counter.waited == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_on_the_pool(kind):
    pool = make_pool(kind, stages_of((4, 3))[1])
    inner = [value for value in vars(pool).values() if hasattr(value, "get_value_buffer")]
    before = [dict(vars(each)) for each in (pool, *inner)]
    with stage_local_probes(pool):
        assert "get_value_buffer" in vars(pool)
    for each, attributes in zip((pool, *inner), before, strict=True):
        assert vars(each).keys() == attributes.keys()
        for getter in GETTERS:
            assert getattr(each, getter).__func__ is getattr(type(each), getter)


def test_nothing_is_left_when_the_building_fails():
    pool = make_pool("mla", stages_of((4, 3))[1])
    with pytest.raises(RuntimeError, match="builder"), stage_local_probes(pool):
        raise RuntimeError("builder")
    assert "get_value_buffer" not in vars(pool)


def test_an_inner_use_leaves_the_outer_one_in_force():
    pool = make_pool("mla", stages_of((4, 3))[1])
    with stage_local_probes(pool):
        with stage_local_probes(pool):
            assert pool.get_value_buffer(0).shape[-1] == LATENT
        assert pool.get_value_buffer(0).shape[-1] == LATENT
    with pytest.raises(IndexError):
        pool.get_value_buffer(0)


def test_a_patch_of_somebody_else_on_the_instance_is_kept():
    pool = make_pool("mla", stages_of((4, 3))[1])
    asked = []
    stock = pool.get_value_buffer

    def observed(layer_id):
        asked.append(layer_id)
        return stock(layer_id)

    pool.get_value_buffer = observed
    with stage_local_probes(pool):
        pool.get_value_buffer(0)
    assert pool.get_value_buffer is observed
    assert asked == [4]


def test_the_stage_1_index_error_before_and_the_head_size_after():
    pool = make_pool("mla", stages_of((4, 3))[1])
    with pytest.raises(IndexError, match="list index out of range"):
        pool.get_value_buffer(0)
    with stage_local_probes(pool):
        assert pool.get_value_buffer(0).shape[-1] == LATENT


def test_the_silent_wrap_before_and_the_own_first_layer_after():
    stage = stages_of((3, 4))[1]
    pool = make_pool("mla", stage)
    wrapped = pool.get_value_buffer(0)
    assert same_storage(wrapped, pool.get_value_buffer(stage.start_layer + 1))  # index -3 of 4
    with stage_local_probes(pool):
        assert same_storage(pool.get_value_buffer(0), pool.get_value_buffer(stage.start_layer))


@pytest.mark.parametrize("nothing", [None, object(), 3])
def test_something_without_buffers_is_left_alone(nothing):
    with stage_local_probes(nothing):
        pass


def test_a_pool_of_unknown_layout_answers_as_it_would():
    class Pool:
        def get_value_buffer(self, layer_id):
            return layer_id

    assert held_layers(Pool()) == ()
    pool = Pool()
    with stage_local_probes(pool):
        assert pool.get_value_buffer(7) == 7


@contextmanager
def _no_change(pool):
    yield


def test_without_the_mechanism_the_property_fails(monkeypatch):
    """A property that holds for anything proves nothing."""
    monkeypatch.setitem(globals(), "stage_local_probes", _no_change)
    with pytest.raises((IndexError, KeyError, ValueError, AssertionError)):
        test_layer_0_gives_the_size_of_a_value_head_on_every_stage()
