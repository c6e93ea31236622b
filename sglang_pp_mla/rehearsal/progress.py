"""What a rehearsal's log says while it runs: which stage has come how far, and why one died."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PREFIX = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<ranks>[^\]]*)\] (?P<text>.*)$")
_RANK = re.compile(r"\bPP(\d+)\b")
_SCHEDULER_DIED = re.compile(r"Scheduler hit an exception: (?P<rest>Traceback .*)$")
_STEPS = (
    ("Init torch distributed begin", "joining the pipeline"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "weights loaded"),
    ("KV Cache is allocated", "cache allocated"),
    ("max_total_num_tokens=", "ready"),
)


@dataclass(frozen=True)
class Progress:
    """One thing that happened, ``seconds`` after the start.

    ``kind`` is ``log`` (any line), ``stage`` (a pipeline rank has come to ``text``), ``imported``,
    ``ready`` (requests are taken) or ``answers`` (a batch of prompts is done). ``rank`` is the pipeline
    rank the line names; 0 stands for an engine of one stage too; None if it names none.
    """

    kind: str
    seconds: float
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Death:
    """The first stage to die: its pipeline rank (None if the log names none) and its traceback."""

    rank: int | None
    traceback: str


def rank_of(line: str) -> int | None:
    """Pipeline rank in the prefix of a line of SGLang's log, or None."""
    match = _PREFIX.match(line)
    named = _RANK.search(match["ranks"]) if match else None
    return int(named[1]) if named else None


def stage_step(line: str) -> tuple[int, str] | None:
    """``(rank, step)`` if the line says that a stage has come to a new step, else None."""
    match = _PREFIX.match(line)
    if match is None:
        return None
    for text, step in _STEPS:
        if match["text"].startswith(text):
            return rank_of(line) or 0, step
    return None


def find_death(lines: Sequence[str], *, of_stages_only: bool = False) -> Death | None:
    """The first scheduler's traceback in a log, or else the last traceback of any kind; None if it has none.

    ``of_stages_only`` leaves out the latter, which in the log of something that still runs may be harmless.
    """
    for number, line in enumerate(lines):
        match = _SCHEDULER_DIED.search(line)
        if match:
            return Death(rank_of(line), "\n".join([match["rest"], *_block(lines[number + 1 :])]))
    for number in range(-1 if of_stages_only else len(lines) - 1, -1, -1):
        at = lines[number].find("Traceback (most recent call last)")
        if at >= 0:
            head = lines[number][at:]
            return Death(rank_of(lines[number]), "\n".join([head, *_block(lines[number + 1 :])]))
    return None


def _block(lines: Sequence[str]) -> list[str]:
    """The rest of a traceback: up to its exception's message, or the next line of the log."""
    block: list[str] = []
    for line in lines:
        if not line.strip() or _PREFIX.match(line):
            break
        block.append(line)
        if not line.startswith((" ", "\t")) and len(block) > 1:
            break
    return block
