"""How many KV splits a stage's stock decode gets: pure arithmetic.

From 0.5.12 SGLang lets an MLA request have as many splits as the GPU has multiprocessors, rounded up to a
power of two, whatever the heads, and keeps a partial result for every split, head and slot of its CUDA
graphs. Under tensor parallelism a rank has few heads. A pipeline stage keeps all of them: Kimi K2.6's 64
need 32 MiB a slot, 8 GiB for 256 slots, and each split already is four programs, one a head tile.
"""

from __future__ import annotations

from sglang_pp_mla.kernels.flat_schedule import head_tiles

WORKSPACE_BYTES = 2**30
"""What the partial results of all slots should fit in."""
WAVES = 3
"""Programs a multiprocessor that one request alone may make; as many as fit where a block takes a third."""


def partial_bytes(splits: int, num_heads: int, value_width: int) -> int:
    """fp32 partial results of one slot."""
    return splits * num_heads * value_width * 4


def fit_kv_splits(stock: int, asked: int, *, num_heads: int, value_width: int, sm_count: int, slots: int) -> int:
    """Splits to keep room for, where SGLang would keep room for ``stock`` and the user asked for ``asked``.

    Never more than ``stock``, never fewer than ``asked``, and never fewer than one request needs to give every
    multiprocessor a program: a long request among short ones is as fast as it would be alone.
    """
    tiles = head_tiles(num_heads)
    full, many = -(-sm_count // tiles), -(-WAVES * sm_count // tiles)
    room = WORKSPACE_BYTES // (max(1, slots) * partial_bytes(1, num_heads, value_width))
    return min(stock, max(asked, full, min(many, room)))


def splits_of_batch(stock: int, kept: int, *, slots: int, batch: int) -> int:
    """Splits that each of ``batch`` requests may have where the room of ``kept`` splits for all slots is theirs."""
    return max(kept, min(stock, kept * slots // max(1, batch)))
