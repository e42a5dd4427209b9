"""Boxes, verb by verb, against masks of the whole tensor in NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError


def box_in(shape):
    """Boxes inside a tensor of this shape, empty ones among them."""
    corners = [st.tuples(st.integers(0, extent), st.integers(0, extent)).map(sorted) for extent in shape]
    return st.tuples(*corners).map(lambda runs: Box((a for a, _ in runs), (b for _, b in runs)))


shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
two_boxes = shapes.flatmap(lambda shape: st.tuples(st.just(shape), box_in(shape), box_in(shape)))


def mask(shape, box):
    found = np.zeros(shape, dtype=bool)
    found[box.slices()] = True
    return found


@given(two_boxes)
def test_intersect_is_the_common_elements(drawn):
    shape, a, b = drawn
    common = a.intersect(b)
    expected = mask(shape, a) & mask(shape, b)
    assert (common is None) == (not expected.any())
    assert common is None or (mask(shape, common) == expected).all()
    assert common == b.intersect(a)


@given(two_boxes)
def test_contains_is_the_subset_relation(drawn):
    shape, a, b = drawn
    assert a.contains(b) == (not (mask(shape, b) & ~mask(shape, a)).any())


@given(two_boxes)
def test_points_and_size_and_emptiness_are_those_of_the_mask(drawn):
    shape, box, _ = drawn
    found = mask(shape, box)
    assert list(box.points()) == [tuple(map(int, at)) for at in np.argwhere(found)]
    assert box.size == found.sum()
    assert box.is_empty == (not found.any())


@given(two_boxes, st.data())
def test_narrow_keeps_the_rows_asked_for(drawn, data):
    shape, box, _ = drawn
    if not shape:
        return
    dim = data.draw(st.integers(0, len(shape) - 1))
    low, high = sorted(data.draw(st.tuples(*[st.integers(box.start[dim], box.stop[dim])] * 2)))
    rows = np.zeros(shape, dtype=bool)
    rows[(slice(None),) * dim + (slice(low, high),)] = True
    assert (mask(shape, box.narrow(dim, low, high)) == (mask(shape, box) & rows)).all()


@given(two_boxes)
def test_relative_to_indexes_the_shard_as_the_box_indexes_the_whole(drawn):
    shape, outer, other = drawn
    inner = outer.intersect(other)
    if inner is None:
        return
    whole = np.arange(np.prod(shape)).reshape(shape)
    assert (whole[outer.slices()][inner.relative_to(outer).slices()] == whole[inner.slices()]).all()
    assert inner.relative_to(outer).translate(outer.start) == inner


@given(two_boxes, st.data())
def test_concat_undoes_split_dims(drawn, data):
    _, box, _ = drawn
    head, tail = box.split_dims(data.draw(st.integers(0, box.ndim)))
    assert head.concat(tail) == box


@given(two_boxes, st.data())
def test_cut_covers_once_within_the_limit_at_granules_in_row_major_order(drawn, data):
    shape, box, _ = drawn
    granule = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    limit = data.draw(st.integers(int(np.prod(granule)), int(np.prod(granule)) + 12))
    pieces = list(box.cut(limit=limit, granule=granule))
    count = np.zeros(shape, dtype=int)
    for piece in pieces:
        count[piece.slices()] += 1
        assert piece.size <= limit
        cuts = zip(piece.start + piece.stop, box.start + box.stop, granule * 2, strict=True)
        assert all(at == edge or at % unit == 0 for at, edge, unit in cuts)
    assert (count == mask(shape, box)).all()
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)


def test_cut_takes_as_much_as_fits():
    assert list(Box((0, 0), (7, 10)).cut(limit=35)) == [
        Box((0, 0), (3, 10)),
        Box((3, 0), (6, 10)),
        Box((6, 0), (7, 10)),
    ]
    assert list(Box((0, 0), (1, 10)).cut(limit=4)) == [Box((0, a), (1, b)) for a, b in ((0, 4), (4, 8), (8, 10))]


def test_cut_finds_the_granules_of_the_whole_tensor_not_of_the_box():
    assert list(Box((3,), (9,)).cut(limit=4, granule=(4,))) == [Box((a,), (b,)) for a, b in ((3, 4), (4, 8), (8, 9))]


def test_cut_refuses_a_granule_over_the_limit():
    with pytest.raises(LayoutError, match=r"one granule of \(4, 4\) with 16 elements, more than 15"):
        list(Box.whole((8, 8)).cut(limit=15, granule=(4, 4)))


@pytest.mark.parametrize(
    ("box", "aligned"),
    [
        (Box((0,), (4,)), True),
        (Box((8,), (10,)), True),
        (Box((8,), (9,)), False),
        (Box((2,), (8,)), False),
    ],
    ids=["whole granules", "a short last one", "cut before the end", "begun inside"],
)
def test_is_aligned(box, aligned):
    assert box.is_aligned((4,), shape=(10,)) is aligned


def test_sizes_need_no_32_bits():
    box = Box((0, 0), (262144, 8960))
    assert box.size == 2_348_810_240
    piece = list(box.cut(limit=2**30))[-1]
    assert piece.stop == box.stop
    assert Box((2**40,), (2**62,)).size == 2**62 - 2**40


def test_numpy_integers_become_plain_ones():
    box = Box(np.array([1, 2]), np.array([3, 4]))
    assert box == Box((1, 2), (3, 4))
    assert hash(box) == hash(Box((1, 2), (3, 4)))
    assert all(type(x) is int for x in box.start + box.stop)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Box((0,), (1, 2)), "as many starts as stops"),
        (lambda: Box((2,), (1,)), "0 <= start <= stop"),
        (lambda: Box((-1,), (1,)), "0 <= start <= stop"),
        (lambda: Box((0.5,), (1,)), r"whole numbers, got \(0.5,\)"),
        (lambda: Box((0,), (4,)).intersect(Box((0, 0), (1, 1))), "different dims"),
        (lambda: Box((0,), (4,)).narrow(0, 2, 5), "2:5 doesn't lie in 0:4"),
        (lambda: Box((0,), (4,)).narrow(-1, 2, 3), "no dim -1"),
        (lambda: Box((0,), (4,)).translate((1, 1)), "one number a dim"),
        (lambda: Box((0,), (4,)).translate((-1,)), "0 <= start <= stop"),
        (lambda: Box((0,), (4,)).split_dims(2), "can't be split after 2"),
        (lambda: Box((0,), (4,)).cut(limit=1, granule=(0,)), r"one number >= 1 a dim, got \(0,\)"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(LayoutError, match=message):
        wrong()
