"""Flat split-KV decode for MLA: the batch's KV tokens are one axis, cut into equal pieces.

SGLang's split-KV decode launches ``batch x head tiles x cap`` programs, most of which find nothing to do,
and keeps a partial result for each of them. Here the requests' KV lie end to end, as ``kv_indptr`` counts
them, and piece ``p`` is tokens ``[p * L, (p + 1) * L)`` whatever requests they belong to::

    requests   |---------- 0 ----------|-- 1 --|- 2 -|--------- 3 ---------|
    pieces     |       0       |       1       |       2       |     3     |

``L`` follows from the number of tokens alone, on the device, so the launch is the same for every batch of a
CUDA graph. A request that lies within one piece is finished there. One that is cut leaves at most two
partial results a piece: slot 0 for the one that goes on from the piece before, slot 1 for the one that goes
on in the next; a merge puts them together. So the workspace counts pieces, not requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_pp_mla.kernels.flat_schedule import BLOCK_H, PIECE_UNIT, head_tiles


def workspace(
    pieces: int, num_heads: int, latent: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results and their log-sum-exp: fp32 ``(pieces, 2, heads, latent)`` and ``(pieces, 2, heads)``."""
    shape = (pieces, 2, num_heads)
    options = {"dtype": torch.float32, "device": device}
    return torch.empty((*shape, latent), **options), torch.empty(shape, **options)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _tokens_a_piece(tokens, pieces, UNIT: tl.constexpr):
    return tl.maximum(1, tl.cdiv(tl.cdiv(tokens, pieces), UNIT)) * UNIT


@triton.jit(do_not_specialize=["batch", "pieces"])
def _decode_pieces(
    q_ptr,
    kv_ptr,
    kv_indptr,
    kv_indices,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    v_scale,
    batch,
    pieces,
    num_heads,
    stride_q_row,
    stride_q_head,
    stride_kv,
    stride_out_row,
    stride_out_head,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Head tiles of one piece run side by side, so that all but the first read its KV from the L2 cache.
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    piece = tl.program_id(1)
    tokens = tl.load(kv_indptr + batch)
    length = _tokens_a_piece(tokens, pieces, UNIT)
    start = piece * length
    end = tl.minimum(start + length, tokens)

    head_ok = heads < num_heads
    latent = tl.arange(0, BLOCK_L)
    latent_ok = latent < LATENT
    # The widths beyond the latent part, in a tile of their own: its power of two is far smaller.
    rest = LATENT + tl.arange(0, BLOCK_R)
    rest_ok = rest < WIDTH

    # The last request that starts at or before the piece; empty ones before it are passed over.
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(kv_indptr + middle) <= start:
            low = middle
        else:
            high = middle
    request = low

    at = start
    while at < end:
        request_start = tl.load(kv_indptr + request)
        request_end = tl.load(kv_indptr + request + 1)
        until = tl.minimum(request_end, end)

        row = q_ptr + tl.cast(request, tl.int64) * stride_q_row + heads[:, None] * stride_q_head
        q = tl.load(row + latent[None, :], mask=head_ok[:, None] & latent_ok[None, :], other=0.0)
        q_rest = tl.load(row + rest[None, :], mask=head_ok[:, None] & rest_ok[None, :], other=0.0)

        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
        for block in range(at, until, BLOCK_N):
            token = block + tl.arange(0, BLOCK_N)
            token_ok = token < until
            slot = tl.load(kv_indices + token, mask=token_ok, other=0).to(tl.int64)
            base = kv_ptr + slot[:, None] * stride_kv
            kv = tl.load(base + latent[None, :], mask=token_ok[:, None] & latent_ok[None, :], other=0.0)
            kv_rest = tl.load(base + rest[None, :], mask=token_ok[:, None] & rest_ok[None, :], other=0.0)
            kv = kv.to(q.dtype)
            score = _dot(q, tl.trans(kv), PRECISION)
            score += _dot(q_rest, tl.trans(kv_rest.to(q.dtype)), PRECISION)
            score *= scale
            if LOGIT_CAP > 0:
                score = LOGIT_CAP * (2 * tl.sigmoid(2 * score / LOGIT_CAP) - 1)
            score = tl.where(token_ok[None, :], score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            fade = tl.exp(peak - new_peak)
            weight = tl.exp(score - new_peak[:, None])
            acc = acc * fade[:, None] + _dot(weight.to(kv.dtype), kv, PRECISION)
            total = total * fade + tl.sum(weight, 1)
            peak = new_peak

        result = acc / total[:, None]
        store_ok = head_ok[:, None] & latent_ok[None, :]
        if (at == request_start) & (until == request_end):
            row = out_ptr + tl.cast(request, tl.int64) * stride_out_row + heads[:, None] * stride_out_head
            tl.store(row + latent[None, :], (result * v_scale).to(out_ptr.dtype.element_ty), mask=store_ok)
        else:
            slot = (piece * 2 + (at > start).to(tl.int32)) * num_heads + heads
            tl.store(partial_ptr + slot[:, None] * LATENT + latent[None, :], result, mask=store_ok)
            tl.store(lse_ptr + slot, peak + tl.log(total), mask=head_ok)
        at = until
        request += 1


@triton.jit(do_not_specialize=["batch", "pieces"])
def _merge_pieces(
    kv_indptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    v_scale,
    batch,
    pieces,
    num_heads,
    stride_out_row,
    stride_out_head,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    UNIT: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(kv_indptr + request)
    end = tl.load(kv_indptr + request + 1)
    length = _tokens_a_piece(tl.load(kv_indptr + batch), pieces, UNIT)
    first = start // length
    last = (end - 1) // length
    latent = tl.arange(0, BLOCK_L)
    latent_ok = latent < LATENT
    out = out_ptr + tl.cast(request, tl.int64) * stride_out_row + head * stride_out_head + latent
    if end == start:
        tl.store(out, tl.zeros([BLOCK_L], out_ptr.dtype.element_ty), mask=latent_ok)
    elif last > first:
        peak = float("-inf")
        total = 0.0
        acc = tl.zeros([BLOCK_L], tl.float32)
        for piece in range(first, last + 1):
            begun_here = (piece == first) & (start > first * length)
            slot = (piece * 2 + begun_here.to(tl.int32)) * num_heads + head
            lse = tl.load(lse_ptr + slot)
            part = tl.load(partial_ptr + slot * LATENT + latent, mask=latent_ok, other=0.0)
            new_peak = tl.maximum(peak, lse)
            fade = tl.exp(peak - new_peak)
            weight = tl.exp(lse - new_peak)
            acc = acc * fade + part * weight
            total = total * fade + weight
            peak = new_peak
        tl.store(out, (acc / total * v_scale).to(out_ptr.dtype.element_ty), mask=latent_ok)


def _precision(dtype: torch.dtype) -> str:
    # Triton's interpreter multiplies the bit patterns of bf16 (3.8.0).
    return "upcast" if dtype == torch.bfloat16 and triton.knobs.runtime.interpret else "ieee"


def flat_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    latent: int,
    scale: float,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> None:
    """Attention of one new token a request over its latent KV, written to ``out``.

    ``q`` is ``(batch, heads, width)`` with the absorbed latent part first and the rope part behind it,
    ``kv`` is ``(slots, 1, width)``, of which the first ``latent`` columns are the values too; ``out`` is
    ``(batch, heads, latent)``. ``kv_indptr`` ``(batch + 1,)`` counts the requests' tokens and
    ``kv_indices`` names their slots. ``partial`` and ``lse`` are a :func:`workspace`, whose first extent is
    the number of pieces. ``scale`` goes on the scores (with the KV's own scale in it), ``v_scale`` on the
    result. A request without tokens gets zeros.
    """
    batch, num_heads, width = q.shape
    pieces = partial.shape[0]
    block_l = max(16, triton.next_power_of_2(latent))
    shared = {"LATENT": latent, "BLOCK_L": block_l, "UNIT": PIECE_UNIT}
    _decode_pieces[(head_tiles(num_heads), pieces)](
        q,
        kv,
        kv_indptr,
        kv_indices,
        out,
        partial,
        lse,
        scale,
        v_scale,
        batch,
        pieces,
        num_heads,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        out.stride(0),
        out.stride(1),
        WIDTH=width,
        BLOCK_R=max(16, triton.next_power_of_2(width - latent)),
        BLOCK_H=BLOCK_H,
        BLOCK_N=32,
        LOGIT_CAP=logit_cap,
        PRECISION=_precision(q.dtype),
        num_warps=4,
        num_stages=2,
        **shared,
    )
    _merge_pieces[(batch, num_heads)](
        kv_indptr,
        out,
        partial,
        lse,
        v_scale,
        batch,
        pieces,
        num_heads,
        out.stride(0),
        out.stride(1),
        num_warps=4,
        **shared,
    )
