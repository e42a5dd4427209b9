"""Placements, verb by verb: what a part keeps of a dim."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types

from refit_sdk.errors import LayoutError
from refit_sdk.placement import Replicate, Shard, StridedShard, chunk, join, select


def positions(runs):
    return [position for start, stop in runs for position in range(start, stop)]


@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_chunk_is_torch_chunk(extent, num_parts, data):
    index = data.draw(st.integers(0, num_parts - 1))
    pieces = [piece.tolist() for piece in torch.arange(extent).chunk(num_parts)]
    start, stop = chunk(extent, num_parts=num_parts, index=index)
    assert list(range(start, stop)) == (pieces[index] if index < len(pieces) else [])


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_strided_shard_is_dtensors(extent, num_parts, split_factor):
    theirs = placement_types._StridedShard(0, split_factor=split_factor)
    pieces, _ = theirs._split_tensor(torch.arange(extent), num_parts, with_padding=False)
    ours = StridedShard(0, split_factor=split_factor)
    kept = [ours.runs(extent, num_parts=num_parts, index=index) for index in range(num_parts)]
    assert [positions(runs) for runs in kept] == [piece.tolist() for piece in pieces]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=6))
def test_join_keeps_positions_and_order_in_the_fewest_runs(runs):
    joined = join(map(tuple, runs))
    assert positions(joined) == positions(runs)
    breaks = np.diff(positions(runs)) != 1
    assert len(joined) == (breaks.sum() + 1 if positions(runs) else 0)


@given(st.data())
def test_select_indexes_the_positions_that_were_left(data):
    edges = sorted(data.draw(st.sets(st.integers(0, 60), max_size=10)))
    held = join(zip(edges[::2], edges[1::2], strict=False))
    marks = sorted(data.draw(st.sets(st.integers(0, len(positions(held))), max_size=8)))
    kept = join(zip(marks[::2], marks[1::2], strict=False))
    assert positions(select(held, kept)) == [positions(held)[at] for at in positions(kept)]


def test_a_part_of_a_huge_dim_costs_nothing():
    assert Shard(0).runs(2**45 + 1, num_parts=4096, index=1) == (((2**33 + 1), 2 * (2**33 + 1)),)
    assert len(StridedShard(0, split_factor=4).runs(2**45, num_parts=8, index=7)) == 4
    assert StridedShard(0, split_factor=2**40).runs(3, num_parts=2, index=0) == ((0, 3),)
    assert Replicate().runs(2**45, num_parts=8, index=0) == ((0, 2**45),)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Shard(-1), "got dim -1; add the tensor's ndim"),
        (lambda: StridedShard(-2, split_factor=2), "got dim -2"),
        (lambda: StridedShard(0, split_factor=0), "needs split_factor >= 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(LayoutError, match=message):
        wrong()
