"""``triton_pp``: SGLang's Triton attention backend, built by a stage that knows which layers are its own.

Imported only by the factory of :mod:`sglang_pp_mla.fixes.triton_pp`, in a process that has SGLang.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sglang_pp_mla.fixes.fix import Changes
from sglang_pp_mla.kernels.flat_schedule import number_of_pieces, workspace_bytes
from sglang_pp_mla.kv_splits import fit_kv_splits
from sglang_pp_mla.probes import held_layers, stage_local_probes
from sglang_pp_mla.shared_partials import SharedPartials
from sglang_pp_mla.stage import Stage

DECODE = "SGLANG_PP_MLA_DECODE"
# Lifts the number of KV splits that the user asked for to the number of multiprocessors, from 0.5.12 on.
_LIFT = "_mla_decode_kv_splits_cap"

logger = logging.getLogger("sglang_pp_mla")


class TritonPPAttnBackend(TritonAttnBackend):
    """``TritonAttnBackend`` for one pipeline stage.

    ``model_runner`` and the other arguments are those of the release's own class. Raises ``ValueError``,
    naming rank and layers, for a stage the Triton kernels cannot serve: one with no attention layer, or
    one whose layers differ in the size of their value heads.
    """

    max_kv_splits: int
    decode_attention_fwd: Callable[..., Any]
    shares_partials = False

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        stage = stage_of(model_runner)
        pool = model_runner.token_to_kv_pool
        refuse_without_attention(stage, pool)
        # What the user asked for, where the release has lifted the cap of KV splits beyond it.
        self.asked_kv_splits: int | None = None
        with stage_local_probes(pool), Changes() as meanwhile:
            if lift := vars(triton_backend).get(_LIFT):
                meanwhile.put(vars(triton_backend), _LIFT, partial(self._note_asked, lift))
            super().__init__(model_runner, *args, **kwargs)
        refuse_mixed_value_heads(stage, pool, {self.v_head_dim, getattr(self, "swa_v_head_dim", None)})
        self.lifted_kv_splits = self.max_kv_splits
        self.fit_kv_splits(slots=1)
        self.decode = self.choose_decode(stage, model_runner)
        if not kwargs.get("skip_prefill"):
            logger.info("%s", self.describe(stage, model_runner))

    def _note_asked(self, lift: Callable[..., int], asked: int, *args: Any) -> int:
        self.asked_kv_splits = asked
        return lift(asked, *args)

    def fit_kv_splits(self, slots: int) -> None:
        """Lower the cap of KV splits to what a stage that keeps all heads can use, where the release lifted it.

        A tile size, given or that of deterministic inference, decides the number by itself.
        """
        if self.fits_kv_splits:
            assert self.asked_kv_splits is not None
            self.max_kv_splits = fit_kv_splits(
                self.max_kv_splits,
                self.asked_kv_splits,
                num_heads=self.num_head,
                value_width=self.v_head_dim,
                sm_count=self.device_core_count,
                slots=slots,
            )

    @property
    def fits_kv_splits(self) -> bool:
        return self.asked_kv_splits is not None and getattr(self, "split_tile_size", None) is None

    def get_num_kv_splits(self, *args: Any, **kwargs: Any) -> None:
        """As many for each request as the release would choose; :class:`SharedPartials` cuts them to the room."""
        with Changes() as meanwhile:
            if self.shares_partials:
                meanwhile.put(self.__dict__, "max_kv_splits", self.lifted_kv_splits)
            super().get_num_kv_splits(*args, **kwargs)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Here the partial results are kept for every slot, so here their number counts."""
        before = self.max_kv_splits
        self.fit_kv_splits(max_num_tokens)
        if self.max_kv_splits != before:
            logger.info("triton_pp: at most %d KV splits for %d slots.", self.max_kv_splits, max_num_tokens)
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)

    def choose_decode(self, stage: Stage, model_runner: Any) -> str:
        """Put the flat decode in place of the stock one where ``SGLANG_PP_MLA_DECODE=flat`` asks for it.

        Returns what serves, in words. Raises ``ValueError`` for any other setting but ``stock``.
        """
        wanted = os.environ.get(DECODE, "").strip().lower() or "stock"
        if wanted not in ("stock", "flat"):
            raise ValueError(f"{stage}: {DECODE}={wanted} is neither stock nor flat; set one of them or unset it.")
        reason = self.flat_cannot_serve(model_runner) if wanted == "flat" else None
        if wanted == "stock" or reason:
            self.share_partials(model_runner.token_to_kv_pool)
            said = f"at most {self.max_kv_splits} KV splits"
            return f"{said}, stock since the flat decode does not serve {reason}" if reason else said
        from sglang_pp_mla.kernels.flat_attention import FlatDecode  # imports triton's language, for flat alone

        pieces = number_of_pieces(self.num_head, max(1, self.device_core_count))
        flat = FlatDecode(
            self.decode_attention_fwd,
            pieces=pieces,
            num_heads=self.num_head,
            latent=self.v_head_dim,
            device=model_runner.device,
        )
        self.decode_attention_fwd = torch.compiler.disable(flat)
        self.max_kv_splits = 1  # the stock partial results are not used
        size = workspace_bytes(pieces, self.num_head, self.v_head_dim) / 2**20
        return f"flat decode in {pieces} pieces, workspace {size:.1f} MiB"

    def share_partials(self, pool: Any) -> None:
        """Let the requests of a batch share the room of all slots, where a stage keeps less than SGLang would."""
        layers = held_layers(pool)
        windowed = (getattr(self, "sliding_window_size", None) or 0) > 0  # whose layers have splits of their own
        if not self.fits_kv_splits or not layers or windowed or torch.version.hip or getattr(self, "dcp_size", 1) > 1:
            return
        keys, again = pool.get_key_buffer(layers[0]), pool.get_key_buffer(layers[0])
        if keys.data_ptr() != again.data_ptr():  # dequantised for each answer, so no layer is known by its buffer
            return
        shared = SharedPartials(self.decode_attention_fwd, stock=self.lifted_kv_splits, first_layer=keys.data_ptr())
        self.decode_attention_fwd = torch.compiler.disable(shared)
        self.shares_partials = True

    def flat_cannot_serve(self, model_runner: Any) -> str | None:
        """What a whole backend has that the flat decode lacks, or None."""
        if not model_runner.use_mla_backend:
            return "models without MLA"
        if torch.version.hip:
            return "AMD GPUs, where it has not been tried"
        if getattr(self, "split_tile_size", None) is not None:
            return "a split tile size, given or of deterministic inference, whose sums must not depend on the batch"
        if getattr(self, "dcp_size", 1) > 1:
            return "decode context parallelism, which reads the stock log-sum-exp"
        pool = model_runner.token_to_kv_pool
        layers = held_layers(pool)
        if not layers:
            return "a KV pool that does not say which layers it holds"
        keys, values = pool.get_key_buffer(layers[0]), pool.get_value_buffer(layers[0])  # both kept: no memory twice
        if keys.data_ptr() != values.data_ptr():
            return "a KV cache whose values are no part of its keys"
        return None

    def describe(self, stage: Stage, model_runner: Any) -> str:
        """One line for the log of a rank."""
        model_config = model_runner.model_config
        parts = [f"{self.num_head} heads"]
        if model_runner.use_mla_backend:
            parts.append(f"latent {model_config.kv_lora_rank} + rope {model_config.qk_rope_head_dim}")
        else:
            parts.append(f"{self.num_kv_head} KV heads")
        parts.append(f"value head {self.v_head_dim}")
        parts.append(self.decode)
        return f"triton_pp {stage}: {', '.join(parts)}"


def stage_of(model_runner: Any) -> Stage:
    """The stage of a runner; its layer range stands in ``layer_info`` from 0.5.16 on, before on the runner."""
    layers = getattr(model_runner, "layer_info", model_runner)
    group = model_runner.pp_group
    return Stage(group.rank_in_group, group.world_size, layers.start_layer, layers.end_layer)


def refuse_without_attention(stage: Stage, pool: Any) -> None:
    mapping = getattr(pool, "full_attention_layer_id_mapping", None)
    if mapping is not None and not mapping:
        raise ValueError(
            f"{stage} holds no full-attention layer, so triton_pp has nothing to build there; "
            "move a stage boundary with SGLANG_PP_LAYER_PARTITION or lower --pp-size."
        )


def refuse_mixed_value_heads(stage: Stage, pool: Any, served: set[int | None]) -> None:
    """The decode kernel strides its partial results by one value-head size for all layers of a buffer.

    Only a pool made of two, for full and sliding-window attention, can hold sizes that differ; one layer of
    each is looked at, since some pools dequantise a whole layer to answer.
    """
    mapping = getattr(pool, "layers_mapping", None) or {}
    one_of_each = {sliding: layer_id for layer_id, (_, sliding) in mapping.items()}
    for layer_id in one_of_each.values():
        size = pool.get_value_buffer(layer_id).shape[-1]
        if size not in served:
            expected = " or ".join(str(each) for each in served if each is not None)
            raise ValueError(
                f"{stage} has a value head of {size} on layer {layer_id} where the Triton kernels expect "
                f"{expected}; move the boundary with SGLANG_PP_LAYER_PARTITION so that a stage's layers agree."
            )
