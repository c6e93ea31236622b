"""The comparison with the reference, so that a test can show it fails when it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TOLERANCE = 1e-4


class Answered(Protocol):
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[float, ...]: ...


def assert_same(got: Sequence[Answered], wanted: Sequence[Answered], tolerance: float = TOLERANCE) -> float:
    """Tokens equal and log-probabilities within ``tolerance``; returns the largest difference."""
    assert len(got) == len(wanted)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in wanted]
    largest = max(
        abs(mine - theirs)
        for one, other in zip(got, wanted, strict=True)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
    )
    assert largest <= tolerance, f"log-probabilities differ by {largest:.2e}"
    return largest
