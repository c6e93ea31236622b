"""The cap of stock KV splits for a stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pp_mla.kv_splits import fit_kv_splits, partial_bytes, splits_of_batch

GIB = 2**30


def of_kimi(heads: int, sms: int, slots: int, stock: int = 256, asked: int = 8) -> int:
    return fit_kv_splits(stock, asked, num_heads=heads, value_width=512, sm_count=sms, slots=slots)


@pytest.mark.parametrize(
    ("heads", "sms", "slots", "splits"),
    [
        (64, 188, 256, 47),  # one program a multiprocessor: 1.5 GiB where stock takes 8
        (64, 188, 16, 141),  # three, since few slots leave the room
        (64, 132, 160, 51),  # what a gibibyte holds lies between
        (8, 188, 256, 256),  # tensor parallelism: as stock
    ],
)
def test_kimi_k26(heads: int, sms: int, slots: int, splits: int) -> None:
    assert of_kimi(heads, sms, slots) == splits


def test_eight_gib_become_one_and_a_half() -> None:
    assert 256 * partial_bytes(256, 64, 512) == 8 * GIB
    assert 256 * partial_bytes(of_kimi(64, 188, 256), 64, 512) < 1.5 * GIB


@given(
    stock=st.integers(1, 512),
    asked=st.integers(1, 512),
    heads=st.integers(1, 128),
    sms=st.integers(0, 256),
    slots=st.integers(0, 1024),
)
def test_bounds(stock: int, asked: int, heads: int, sms: int, slots: int) -> None:
    asked = min(asked, stock)
    splits = fit_kv_splits(stock, asked, num_heads=heads, value_width=512, sm_count=sms, slots=slots)
    assert asked <= splits <= stock
    tiles = -(-heads // 16)
    assert splits * tiles >= min(sms, stock * tiles)


@pytest.mark.parametrize(
    ("batch", "splits"), [(1, 256), (40, 256), (47, 256), (48, 250), (64, 188), (256, 47), (300, 47)]
)
def test_a_small_batch_has_the_splits_of_stock(batch: int, splits: int) -> None:
    assert splits_of_batch(256, 47, slots=256, batch=batch) == splits


@given(stock=st.integers(1, 512), kept=st.integers(1, 512), slots=st.integers(1, 512), batch=st.integers(1, 512))
def test_a_batch_fits_in_the_room(stock: int, kept: int, slots: int, batch: int) -> None:
    kept, batch = min(kept, stock), min(batch, slots)
    splits = splits_of_batch(stock, kept, slots=slots, batch=batch)
    assert kept <= splits <= stock
    assert splits * batch <= kept * slots
