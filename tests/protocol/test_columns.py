"""Members as columns: nothing is lost, equal members have equal columns, and what must hold of them is found out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk import columns as room
from refit_sdk.box import Box
from refit_sdk.columns import MAX_MEMBERS, are_among, are_distinct, count, pack, unpack
from refit_sdk.errors import LayoutError
from refit_sdk.tensor import Members, merge_indices


def indices(dims: int) -> st.SearchStrategy[set[tuple[int, ...]]]:
    return st.sets(st.tuples(*[st.integers(0, 6)] * dims), max_size=40)


SETS = st.integers(1, 3).flatmap(lambda dims: st.tuples(st.just(dims), indices(dims)))
BOXES = st.integers(1, 3).flatmap(
    lambda dims: st.tuples(
        st.just(dims),
        st.lists(
            st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 3))] * dims).map(
                lambda sides: Box((a for a, _ in sides), (a + n for a, n in sides))
            ),
            min_size=1,
            max_size=8,
        ),
    )
)


def points(members: Members) -> list[tuple[int, ...]]:
    return [point for box in members for point in box.points()]


@given(SETS)
def test_unpack_undoes_pack(given_set: tuple[int, set[tuple[int, ...]]]) -> None:
    dims, chosen = given_set
    members = Members(merge_indices(chosen))
    if not members:
        return
    found = unpack(pack(members), dims=dims)
    assert found == members
    assert set(points(found)) == chosen
    assert pack(found) == pack(members)


@given(SETS)
def test_columns_of_disjoint_boxes_are_never_negative(given_set: tuple[int, set[tuple[int, ...]]]) -> None:
    assert all(number >= 0 for column in pack(Members(merge_indices(given_set[1]))) for number in column)


@given(SETS, st.randoms(use_true_random=False))
def test_columns_forget_the_order(given_set: tuple[int, set[tuple[int, ...]]], rng: object) -> None:
    boxes = list(merge_indices(given_set[1]))
    assert pack(Members(boxes[::-1])) == pack(Members(boxes))


@given(BOXES)
def test_members_are_distinct_if_no_point_comes_twice(given_boxes: tuple[int, list[Box]]) -> None:
    listed = points(Members(given_boxes[1]))
    assert are_distinct([Members(given_boxes[1])]) == (len(set(listed)) == len(listed))
    assert are_distinct([Members([box]) for box in given_boxes[1]]) == (len(set(listed)) == len(listed))


@given(BOXES, st.data())
def test_members_are_among_others_if_all_points_are(given_boxes: tuple[int, list[Box]], data: st.DataObject) -> None:
    dims, boxes = given_boxes
    others = Members(merge_indices(data.draw(indices(dims))))
    expected = set(points(Members(boxes))) <= set(points(others))
    distinct = Members(merge_indices(points(Members(boxes))))
    assert are_among(distinct, others) == expected


@given(BOXES, st.data())
def test_what_is_too_much_for_a_line_is_found_out_otherwise(
    given_boxes: tuple[int, list[Box]], data: st.DataObject
) -> None:
    dims, boxes = given_boxes
    others = Members(merge_indices(data.draw(indices(dims))))
    distinct = Members(merge_indices(points(Members(boxes))))
    quick = are_distinct([Members(boxes)]), are_among(distinct, others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_MAX_LINES", -1)
        assert (are_distinct([Members(boxes)]), are_among(distinct, others)) == quick


def test_names_without_numbers_have_no_columns() -> None:
    assert pack(Members([Box((), ())])) == ()
    assert unpack((), dims=0) == Members([Box((), ())])


def test_far_numbers_survive() -> None:
    far = Members([Box((10**17, 3), (10**17 + 1, 4)), Box((10**17, 10**17), (10**17 + 5, 10**17 + 2))])
    assert unpack(pack(far), dims=2) == far
    assert are_distinct([far])


@pytest.mark.parametrize(
    ("columns", "dims"),
    [
        pytest.param(((0,),), 1, id="one column"),
        pytest.param(((0,), (1,), (0,)), 1, id="three columns"),
        pytest.param(((0, 1), (1,)), 1, id="of two lengths"),
        pytest.param(((2**62,), (1,)), 1, id="beyond 62 bits"),
        pytest.param(((2**61, 2**61), (2**61, 2**61)), 1, id="beyond 62 bits in all"),
        pytest.param(((0,), (1,)), 0, id="columns where there are no dims"),
    ],
)
def test_unpack_refuses(columns: tuple[tuple[int, ...], ...], dims: int) -> None:
    with pytest.raises(LayoutError):
        unpack(columns, dims=dims)


def test_count_doesn_t_overflow() -> None:
    assert count(Members([Box((0, 0, 0), (2**40, 2**40, 2**40))])) == MAX_MEMBERS + 1
    assert count(Members([Box((0, 0), (2**20, 2**20))])) == MAX_MEMBERS


def test_scattered_experts_take_few_bytes() -> None:
    """What a balancer makes: nine of 256 experts in each of 58 layers, at random."""
    dice = np.random.default_rng(3)
    chosen = {(layer, int(e)) for layer in range(58) for e in dice.choice(256, 9, replace=False)}
    numbers = [number for column in pack(Members(merge_indices(chosen))) for number in column]
    assert max(numbers) < 256
    assert sum(len(str(number)) for number in numbers) < 6 * len(chosen)


def test_members_are_a_sequence_of_boxes() -> None:
    boxes = tuple(Box(at, [i + 1 for i in at]) for at in product(range(2), (3, 5)))
    members = Members(boxes[::-1])
    assert members == boxes
    assert (members[1], members[1:3], len(members), members.ndim) == (boxes[1], boxes[1:3], 4, 2)
    assert Members([]) == ()
    assert len({members, Members(boxes)}) == 1
    with pytest.raises(LayoutError, match="several"):
        Members([Box((0,), (1,)), Box((), ())])
    with pytest.raises(LayoutError, match="64 bits"):
        Members([Box((2**64,), (2**64 + 1,))])
