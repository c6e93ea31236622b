"""A pipeline stage: which rank holds which layers. Pure arithmetic, no torch, no SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline and its layers, ``[start_layer, end_layer)`` in the model's numbering."""

    rank: int
    size: int
    start_layer: int
    end_layer: int

    @property
    def layers(self) -> range:
        """Global ids of the layers of this stage."""
        return range(self.start_layer, self.end_layer)

    def __str__(self) -> str:
        if not self.layers:
            return f"PP{self.rank} of {self.size} (no layers)"
        if len(self.layers) == 1:
            return f"PP{self.rank} of {self.size} (layer {self.start_layer})"
        return f"PP{self.rank} of {self.size} (layers {self.start_layer}-{self.end_layer - 1})"


def stages_of(counts: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages of a partition that gives rank ``i`` its ``counts[i]`` layers."""
    ends = list(accumulate(counts))
    return tuple(
        Stage(rank, len(counts), end - count, end) for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def parse_partition(text: str, num_layers: int, pp_size: int) -> tuple[Stage, ...]:
    """Stages for a value of ``SGLANG_PP_LAYER_PARTITION`` such as ``"4,3"``.

    Raises ``ValueError``, in one sentence, where SGLang would refuse it or a rank would get no layer.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"The partition {text!r} is not a list of layer counts; write one whole number a stage, "
            f"joined by commas, {pp_size} in all."
        ) from None
    if len(counts) != pp_size:
        raise ValueError(
            f"The partition {text!r} has {len(counts)} stages but the pipeline has {pp_size}; "
            f"write {pp_size} layer counts."
        )
    for rank, count in enumerate(counts):
        if count < 1:
            raise ValueError(f"The partition {text!r} gives rank {rank} {count} layers; every rank needs at least one.")
    if sum(counts) != num_layers:
        raise ValueError(
            f"The partition {text!r} adds up to {sum(counts)} layers but the model has {num_layers}; "
            f"change the count of a rank, for example rank {pp_size - 1}, by {num_layers - sum(counts):+d}."
        )
    return stages_of(counts)


def default_partition(num_layers: int, pp_size: int, *, remainder_last: bool = False) -> tuple[Stage, ...]:
    """The split SGLang makes when no partition is given.

    The last ``num_layers % pp_size`` ranks get one layer more. Up to 0.5.5.post3 (``remainder_last``)
    the last rank got the whole remainder. Source: ``get_pp_indices`` in ``sglang/srt/distributed/utils.py``.
    """
    if num_layers < pp_size:
        raise ValueError(
            f"{num_layers} layers cannot fill {pp_size} pipeline stages; use a --pp-size of at most {num_layers}."
        )
    base, remainder = divmod(num_layers, pp_size)
    if remainder_last:
        return stages_of((base,) * (pp_size - 1) + (base + remainder,))
    return stages_of((base,) * (pp_size - remainder) + (base + 1,) * remainder)
