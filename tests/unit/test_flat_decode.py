"""The flat split-KV decode, run by Triton's interpreter, against attention in float64."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pp_mla.kernels import flat_decode, flat_schedule

pytestmark = pytest.mark.release("0.5.23")
EXAMPLES = int(os.environ.get("FLAT_DECODE_EXAMPLES", "60"))


class Batch:
    """Random queries and latent KV, in slots that are in no order; unused slots and the workspace hold NaN."""

    def __init__(self, lengths: Sequence[int], heads: int, latent: int, rope: int, dtype: torch.dtype, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)
        slots = tokens + 3
        self.lengths, self.heads, self.latent, self.dtype = lengths, heads, latent, dtype
        self.q = torch.randn(len(lengths), heads, latent + rope, generator=random).to(_computing(dtype))
        self.indices = torch.randperm(slots, generator=random)[:tokens]
        kv = torch.full((slots, 1, latent + rope), float("nan"))
        kv[self.indices] = torch.randn(tokens, 1, latent + rope, generator=random)
        self.kv = kv.to(dtype)
        self.indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    def decode(self, pieces: int, **scales: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernels say, and which slots of the workspace they wrote, ``(pieces, 2)``."""
        partial, lse = flat_decode.workspace(pieces, self.heads, self.latent, "cpu")
        partial.fill_(float("nan"))
        lse.fill_(float("nan"))
        out = torch.full((len(self.lengths), self.heads, self.latent), float("nan"), dtype=self.q.dtype)
        flat_decode.flat_decode(
            self.q, self.kv, out, self.indptr, self.indices, partial, lse, latent=self.latent, **scales
        )
        return out, ~lse.isnan().all(-1)

    def reference(self, scale: float, v_scale: float = 1.0, logit_cap: float = 0.0) -> torch.Tensor:
        answers = torch.zeros(len(self.lengths), self.heads, self.latent, dtype=torch.float64)
        for request, tokens in enumerate(self.lengths):
            if tokens:
                own = self.indices[self.indptr[request] : self.indptr[request + 1]]
                kv = self.kv[own, 0].double()
                scores = self.q[request].double() @ kv.T * scale
                if logit_cap:
                    scores = logit_cap * torch.tanh(scores / logit_cap)
                answers[request] = torch.softmax(scores, -1) @ kv[:, : self.latent] * v_scale
        return answers


def _computing(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def tolerance(dtype: torch.dtype) -> float:
    """Three roundings (scores' weights, values, result) of numbers below about 4."""
    return {torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 6e-2)


GEOMETRIES = [(32, 16), (16, 8), (40, 10), (64, 32), (24, 40)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=6),
    heads=st.sampled_from([1, 2, 16, 20]),
    geometry=st.sampled_from(GEOMETRIES),
    pieces=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    logit_cap=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_any_batch_in_any_number_of_pieces(
    lengths: list[int],
    heads: int,
    geometry: tuple[int, int],
    pieces: int,
    dtype: torch.dtype,
    logit_cap: float,
    seed: int,
) -> None:
    batch = Batch(lengths, heads, *geometry, dtype, seed)
    scales = {"scale": 0.2, "v_scale": 1.5, "logit_cap": logit_cap}
    out, written = batch.decode(pieces, **scales)
    assert (out.double() - batch.reference(**scales)).abs().max() <= tolerance(dtype)
    planned = torch.zeros(pieces, 2, dtype=torch.bool)
    for segment in flat_schedule.segments(lengths, pieces):
        if segment.slot is not None:
            planned[segment.piece, segment.slot] = True
    assert torch.equal(written, planned)


@pytest.mark.parametrize(
    ("latent", "rope"), [(512, 64), (256, 32), (256, 64), (128, 64), (32, 16), (192, 32), (100, 28)]
)
def test_the_geometries_of_models(latent: int, rope: int) -> None:
    batch = Batch([5, 70, 1], 2, latent, rope, torch.float32)
    out, _ = batch.decode(3, scale=0.1)
    assert (out.double() - batch.reference(0.1)).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_kv(dtype: torch.dtype) -> None:
    """The cache is read as it is stored; products are made in the queries' type."""
    batch = Batch([40, 7], 3, 32, 16, dtype)
    out, _ = batch.decode(2, scale=0.2)
    assert (out.double() - batch.reference(0.2)).abs().max() <= tolerance(dtype)


def test_an_empty_batch_row_is_zero_and_touches_nothing() -> None:
    out, written = Batch([0, 0], 2, 32, 16, torch.float32).decode(2, scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert not written.any()


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=40), pieces=st.integers(1, 400))
def test_the_schedule_walks_each_token_once(lengths: list[int], pieces: int) -> None:
    walked = flat_schedule.segments(lengths, pieces)
    assert [token for one in walked for token in (one.start, one.end)] == sorted(
        token for one in walked for token in (one.start, one.end)
    )
    assert sum(one.end - one.start for one in walked) == sum(lengths)
    assert all(one.piece < pieces for one in walked)
    loads = [
        sum(one.end - one.start for one in walked if one.piece == piece) for piece in {one.piece for one in walked}
    ]
    assert max(loads, default=0) <= flat_schedule.tokens_a_piece(sum(lengths), pieces)
    slots = [(one.piece, one.slot) for one in walked if one.slot is not None]
    assert len(set(slots)) == len(slots)


def call(**changed: Any) -> tuple[list[str], Any, Any]:
    """One call in SGLang's form: what the stock function was given, the answer, and the reference."""
    from sglang_pp_mla.kernels.flat_attention import FlatDecode

    batch = Batch([40, 7], 3, 32, 16, torch.float32)
    kv = batch.kv
    out = torch.zeros(2, 3, 32)
    stock: list[str] = []
    decode = FlatDecode(lambda *args, **kwargs: stock.append("stock"), pieces=2, num_heads=3, latent=32, device="cpu")
    given = {"k_buffer": kv, "v_buffer": kv[..., :32], "has_mla": True, "use_pdl": False, "page_size": 1, **changed}
    rest = (out, batch.indptr, batch.indices, None, None, None, 8, 0.2)
    decode(batch.q, given.pop("k_buffer"), given.pop("v_buffer"), *rest, *given.pop("scales", ()), **given)
    return stock, out, batch


def test_a_call_of_sglang_is_served() -> None:
    """To 0.5.9 without the cache's scales, from 0.5.10 with them."""
    stock, out, batch = call()
    assert not stock
    assert (out.double() - batch.reference(0.2)).abs().max() <= 1e-5
    stock, out, batch = call(scales=(0.5, 2.0), logit_cap=3.0)
    assert not stock
    assert (out.double() - batch.reference(0.1, 2.0, 3.0)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "changed",
    [
        {"sinks": torch.zeros(3)},
        {"score_mod": SimpleNamespace()},
        {"xai_temperature_len": 4},
        {"v_buffer": torch.zeros(50, 1, 32)},
        {"v_buffer": torch.zeros(50, 2, 32), "k_buffer": torch.zeros(50, 2, 48)},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_what_is_not_covered_goes_to_stock_and_is_said_once(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "sglang_pp_mla"):
        stock, _, _ = call(**changed)
    assert stock == ["stock"]
    assert "stock decode for layers with" in caplog.text
