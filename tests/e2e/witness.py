"""Models with seeded weights, what transformers says they answer, and the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pp_mla.rehearsal import Progress
from sglang_pp_mla.rehearsal.reference import Answer, greedy, write_model
from sglang_pp_mla.rehearsal.tokenizer import write_tokenizer

NEW_TOKENS = 3
PROMPTS: tuple[tuple[int, ...], ...] = (
    (7,),
    (5, 9, 17),
    tuple(range(20, 41)),
    # More than four chunks of 16, and no multiple of a page.
    tuple((37 * i + 11) % 500 + 5 for i in range(70)),
)
LONGEST = PROMPTS[-1]
# Shares 60 tokens with the longest prompt, so a warm prefix cache has something to give.
RELATED = (*LONGEST[:60], 111, 222, 333)


@dataclass(frozen=True)
class Witness:
    """A model's folder, and the reference answers by prompt."""

    folder: Path
    model: Any
    answers: dict[tuple[int, ...], Answer]

    def of(self, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
        return [self.answers[prompt] for prompt in prompts]


def make_witness(
    config: dict[str, Any], folder: Path, prompts: Sequence[tuple[int, ...]], new_tokens: int = NEW_TOKENS
) -> Witness:
    model = write_model(config, folder)
    write_tokenizer(folder, config["vocab_size"])
    return Witness(folder, model, dict(zip(prompts, greedy(model, prompts, new_tokens), strict=True)))


def show(progress: Progress) -> None:
    """Into pytest's captured output, which is shown when a test fails."""
    print(f"{progress.seconds:7.1f} {progress.kind:8} {progress.text}", flush=True)
