"""Stages and partitions, against SGLang's own split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.distributed.utils import get_pp_indices

from sglang_pp_mla.stage import Stage, default_partition, parse_partition


@given(layers=st.integers(1, 130), pp_size=st.integers(1, 16))
def test_the_default_partition_is_sglangs(layers, pp_size):
    if layers < pp_size:
        with pytest.raises(ValueError, match=f"{layers} layers cannot fill {pp_size}"):
            default_partition(layers, pp_size)
        return
    for stage in default_partition(layers, pp_size):
        assert (stage.start_layer, stage.end_layer) == get_pp_indices(layers, stage.rank, pp_size)


def test_the_default_partition_before_0_5_6_gave_the_last_rank_the_rest():
    counts = [len(stage.layers) for stage in default_partition(61, 8, remainder_last=True)]
    assert counts == [7, 7, 7, 7, 7, 7, 7, 12]


@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_partition_is_read_as_sglang_reads_it(counts):
    text = ",".join(map(str, counts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PP_LAYER_PARTITION", text)
        for stage in parse_partition(text, sum(counts), len(counts)):
            expected = (0, sum(counts)) if len(counts) == 1 else get_pp_indices(sum(counts), stage.rank, len(counts))
            assert (stage.start_layer, stage.end_layer) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("4,4", "adds up to 8 layers but the model has 7; change the count of a rank, for example rank 1, by -1"),
        ("4,2", "adds up to 6 layers but the model has 7; change the count of a rank, for example rank 1, by +1"),
        ("7", "has 1 stages but the pipeline has 2; write 2 layer counts"),
        ("7,0", "gives rank 1 0 layers; every rank needs at least one"),
        ("four,3", "is not a list of layer counts"),
        ("", "is not a list of layer counts"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence.replace("+", r"\+")) as refusal:
        parse_partition(text, 7, 2)
    assert "\n" not in str(refusal.value)


def test_a_stage_reads_like_a_log_line():
    assert str(Stage(3, 8, 22, 30)) == "PP3 of 8 (layers 22-29)"
    assert str(Stage(0, 2, 0, 1)) == "PP0 of 2 (layer 0)"
