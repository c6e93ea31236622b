"""The room for partial results of a decode step, shared by the requests that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pp_mla.kv_splits import splits_of_batch


class SharedPartials:
    """Callable in place of SGLang's ``decode_attention_fwd``: a small batch gets the splits that a large one cannot.

    SGLang keeps its partial results in fp32 ``(slots, heads, splits, value width)`` for every slot of its CUDA
    graphs, of which a batch of four uses four. Here the same bytes are ``(batch, heads, more splits, value
    width)``, with up to ``stock`` splits, which is what the release would have kept room for. So the room can be
    small and a long request in a small batch still has all the splits that it has in stock.

    What was chosen for each request is cut to the room on the device, in the stage's first layer, whose key
    buffer begins at ``first_layer``: a graph is captured with one batch and replayed with another.
    """

    def __init__(self, decode: Callable[..., Any], *, stock: int, first_layer: int) -> None:
        self.decode = decode
        self.stock = stock
        self.first_layer = first_layer

    def __call__(
        self,
        q: Any,
        k_buffer: Any,
        v_buffer: Any,
        o: Any,
        kv_indptr: Any,
        kv_indices: Any,
        attn_logits: Any,
        attn_lse: Any,
        num_kv_splits: Any,
        max_kv_splits: int,
        *scales: Any,
        **others: Any,
    ) -> None:
        batch, (slots, heads, kept, width) = q.shape[0], attn_logits.shape
        splits = splits_of_batch(self.stock, kept, slots=slots, batch=batch)
        if k_buffer.data_ptr() == self.first_layer:
            num_kv_splits.clamp_(max=splits)
        if splits > kept:
            attn_logits = attn_logits.view(-1)[: batch * heads * splits * width].view(batch, heads, splits, width)
            attn_lse = attn_lse.view(-1)[: batch * heads * splits].view(batch, heads, splits)
            max_kv_splits = splits
        self.decode(
            q,
            k_buffer,
            v_buffer,
            o,
            kv_indptr,
            kv_indices,
            attn_logits,
            attn_lse,
            num_kv_splits,
            max_kv_splits,
            *scales,
            **others,
        )
