"""The schedule of :mod:`sglang_pp_mla.kernels.flat_decode`, as arithmetic: what runs, and what it walks.

Neither torch nor triton, so that a plan can be made where there is none; a test holds it to the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PIECE_UNIT = 16
"""A piece is a multiple of this many tokens."""
BLOCK_H = 16
"""Query heads of one program."""


def head_tiles(num_heads: int) -> int:
    return -(-num_heads // BLOCK_H)


def number_of_pieces(num_heads: int, sm_count: int, waves: int = 2) -> int:
    """Pieces such that all head tiles of all pieces make about ``waves`` programs a multiprocessor."""
    return max(1, waves * sm_count // head_tiles(num_heads))


def tokens_a_piece(tokens: int, pieces: int) -> int:
    """Tokens of every piece but the last, which may have fewer."""
    units = -(-tokens // (pieces * PIECE_UNIT))
    return max(1, units) * PIECE_UNIT


def workspace_bytes(pieces: int, num_heads: int, latent: int) -> int:
    """Two fp32 partial results, and their log-sum-exp, a piece and head."""
    return pieces * 2 * num_heads * (latent + 1) * 4


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, end)`` of the batch's one axis, of one request, walked by one piece.

    ``slot`` is where the partial result goes; None where the request lies within the piece and is finished.
    """

    piece: int
    request: int
    start: int
    end: int
    slot: int | None


def segments(lengths: Sequence[int], pieces: int) -> list[Segment]:
    """What each piece does, in order."""
    found = []
    length = tokens_a_piece(sum(lengths), pieces)
    start = 0
    for request, tokens in enumerate(lengths):
        end = start + tokens
        at = start
        while at < end:
            piece = at // length
            until = min(end, (piece + 1) * length)
            whole = at == start and until == end
            found.append(Segment(piece, request, at, until, None if whole else int(at > piece * length)))
            at = until
        start = end
    return found
