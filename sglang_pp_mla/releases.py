"""What is known of SGLang's releases, read from their wheels. Data; tests/contract compares it with every wheel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

RELEASES: tuple[str, ...] = (
    "0.5.3",
    "0.5.3.post1",
    "0.5.3.post2",
    "0.5.3.post3",
    "0.5.4",
    "0.5.4.post1",
    "0.5.4.post2",
    "0.5.4.post3",
    "0.5.5",
    "0.5.5.post1",
    "0.5.5.post2",
    "0.5.5.post3",
    "0.5.6",
    "0.5.6.post1",
    "0.5.6.post2",
    "0.5.7",
    "0.5.8",
    "0.5.8.post1",
    "0.5.9",
    "0.5.10",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
"""Every release from the oldest supported to the newest that has been looked at, in order."""


@dataclass(frozen=True)
class Span:
    """Releases from ``first`` to ``last``, both counted in; without ``last``, to the newest and beyond."""

    first: str
    last: str | None = None

    def __contains__(self, release: object) -> bool:
        try:
            number = Version(Version(str(release)).public)
        except InvalidVersion:  # of a build of one's own; such are newer than any release
            return self.last is None
        return Version(self.first) <= number and (self.last is None or number <= Version(self.last))


ALWAYS = Span(RELEASES[0])

FAULTS: Mapping[str, Mapping[str, Span]] = {
    "triton-pp": {"srt/layers/attention/triton_backend.py": ALWAYS},
    "buffer-probe": {
        "srt/layers/attention/aiter_backend.py": ALWAYS,
        "srt/layers/attention/intel_amx_backend.py": Span("0.5.3", "0.5.8.post1"),
        "srt/layers/attention/triton_backend.py": Span("0.5.3", "0.5.17"),
        "srt/layers/attention/wave_backend.py": ALWAYS,
        "srt/mem_cache/memory_pool.py": Span("0.5.3", "0.5.17"),
    },
    "mla-geometry": {
        "srt/layers/attention/triton_ops/decode_attention.py": Span("0.5.12", "0.5.15.post1"),
        "kernels/ops/attention/decode_attention.py": Span("0.5.16"),
    },
    "hicache-hybrid-layers": {"srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py": Span("0.5.11", "0.5.20")},
    "ray-plugins": {"srt/ray/scheduler_actor.py": Span("0.5.11")},
    "missing-host": {"srt/distributed/parallel_state.py": ALWAYS},
}
"""For each fix, the files of the ``sglang`` package that have its fault, and in which releases."""

UNREPAIRED: Mapping[str, Span] = {
    # In srt/mem_cache/hi_mamba_radix_cache.py, whose maps are made inside a long constructor.
    "hicache-hybrid-layers": Span("0.5.10", "0.5.10.post1"),
}
"""Releases that have a fix's fault in a place that the fix does not reach."""

MODULES: Mapping[str, Span] = {
    "sglang.kernels.ops.attention.decode_attention": Span("0.5.16"),
    "sglang.srt.layers.attention.triton_ops.decode_attention": Span("0.5.3", "0.5.15.post1"),
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup": Span("0.5.16"),
    "sglang.srt.ray.engine": Span("0.5.11"),
    "sglang.srt.ray.scheduler_actor": Span("0.5.10"),
    "sglang.srt.speculative.draft_utils": Span("0.5.3.post2"),
    "sglang.srt.speculative.frozen_kv_mtp_worker_v2": Span("0.5.12"),
}
"""The releases in which fixes find something to change in a module; of one not listed, all that need the fix."""

PLUGINS = Span("0.5.11")
"""The releases that load plugins by the entry-point group ``sglang.srt.plugins``."""

DRAFT_ARGUMENT = Span("0.5.7")
"""The releases with ``--speculative-draft-attention-backend``."""
