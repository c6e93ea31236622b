"""The flat split-KV decode under the signature of SGLang's ``decode_attention_fwd``, and what it covers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_pp_mla.kernels.flat_decode import flat_decode, workspace

logger = logging.getLogger("sglang_pp_mla")


class FlatDecode:
    """Callable in place of ``decode_attention_fwd``; hands what it does not cover to the stock function.

    ``stock`` is the release's own function, ``pieces``, ``num_heads`` and ``latent`` size the workspace,
    which is kept on ``device`` for the life of the backend (a CUDA graph holds its address).
    """

    def __init__(self, stock: Callable[..., Any], *, pieces: int, num_heads: int, latent: int, device: Any) -> None:
        self.stock = stock
        self.latent = latent
        self.partial, self.lse = workspace(pieces, num_heads, latent, device)
        self._told: set[str] = set()

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
        sm_scale: float,
        *scales: Any,
        logit_cap: float = 0.0,
        **others: Any,
    ) -> None:
        reason = self.not_covered(q, k_buffer, v_buffer, others)
        if reason is None:
            # From 0.5.10 on the KV cache's own scales follow; before, there are none.
            k_scale, v_scale = scales or (1.0, 1.0)
            flat_decode(
                q,
                k_buffer,
                o,
                kv_indptr,
                kv_indices,
                self.partial,
                self.lse,
                latent=self.latent,
                scale=sm_scale * k_scale,
                v_scale=v_scale,
                logit_cap=logit_cap,
            )
            return
        if reason not in self._told:
            self._told.add(reason)
            logger.info("triton_pp: stock decode for layers with %s, which the flat decode does not cover.", reason)
        self.stock(
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
            sm_scale,
            *scales,
            logit_cap=logit_cap,
            **others,
        )

    def not_covered(self, q: Any, k_buffer: Any, v_buffer: Any, others: dict[str, Any]) -> str | None:
        """What speaks against the flat decode for a call, or None."""
        if k_buffer.ndim != 3 or k_buffer.shape[1] != 1 or v_buffer.data_ptr() != k_buffer.data_ptr():
            return "a KV cache that is not one latent buffer"
        if v_buffer.shape[-1] != self.latent or q.shape[1] != self.lse.shape[2]:
            return f"{q.shape[1]} heads and a value width of {v_buffer.shape[-1]}"
        if others.get("sinks") is not None:
            return "attention sinks"
        if others.get("score_mod") is not None:
            return "a score modification"
        if others.get("xai_temperature_len", -1) > 0:
            return "a temperature by length"
        return None
