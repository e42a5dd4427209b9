"""Names, members and families."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.tensor import TensorSpec, fold_name, merge_indices

index_sets = st.integers(0, 4).flatmap(lambda ndim: st.sets(st.tuples(*[st.integers(0, 4)] * ndim), max_size=40))


@given(index_sets, st.randoms(use_true_random=False))
def test_merge_indices_covers_exactly_these_once_in_any_order(indices, random):
    shuffled = [*indices, *list(indices)[:3]]
    random.shuffle(shuffled)
    boxes = merge_indices(shuffled)
    points = [point for box in boxes for point in box.points()]
    assert len(points) == len(indices)
    assert set(points) == indices
    assert boxes == merge_indices(sorted(indices)) == tuple(sorted(boxes))


@given(index_sets)
def test_merge_indices_leaves_no_two_boxes_that_make_one_along_the_first_dim(indices):
    boxes = merge_indices(indices)
    ends = {(box.stop[:1], box.start[1:], box.stop[1:]) for box in boxes if box.ndim}
    assert not any((box.start[:1], box.start[1:], box.stop[1:]) in ends for box in boxes if box.ndim)


@pytest.mark.parametrize(
    ("indices", "boxes"),
    [
        ([], ()),
        ([()], (Box((), ()),)),
        ([(i, j) for i in range(61) for j in range(328)], (Box((0, 0), (61, 328)),)),
        ([(i,) for i in (0, 1, 4, 5)], (Box((0,), (2,)), Box((4,), (6,)))),
        ([(10**17,)], (Box((10**17,), (10**17 + 1,)),)),
    ],
    ids=["none", "a name without numbers", "20,008 experts", "interleaved stages", "a big number"],
)
def test_merge_indices(indices, boxes):
    assert merge_indices(indices) == boxes
    assert merge_indices(reversed(indices)) == boxes


def test_merge_indices_of_scattered_members_are_single_boxes():
    scattered = [(2 * i, 2 * j) for i in range(100) for j in range(200)]
    assert merge_indices(scattered) == tuple(Box(at, np.add(at, 1)) for at in scattered)


@pytest.mark.parametrize(
    ("name", "folded"),
    [
        ("lm_head.weight", ("lm_head.weight", ())),
        ("model.layers.12.norm.weight", ("model.layers.{}.norm.weight", (12,))),
        ("h.0.experts.255.w1", ("h.{}.experts.{}.w1", (0, 255))),
        ("blocks.01.w", ("blocks.01.w", ())),
        ("rev.1234567890123456789012.w", ("rev.1234567890123456789012.w", ())),
        ("w2.k_proj", ("w2.k_proj", ())),
        ("layers.².w", ("layers.².w", ())),
    ],
    ids=[
        "none",
        "one",
        "two",
        "leading zero",
        "too long for 64 bits",
        "digits inside a part",
        "a digit that isn't ASCII",
    ],
)
def test_fold_name_and_back(name, folded):
    template, numbers = fold_name(name)
    assert (template, numbers) == folded
    assert template.format(*numbers) == name


@pytest.mark.parametrize("name", ["a..b", "", "a.{}.b", "a."])
def test_fold_name_refuses_what_is_no_checkpoint_name(name):
    with pytest.raises(LayoutError, match="not a checkpoint name"):
        fold_name(name)


def test_members_are_numbered_by_their_names():
    family = TensorSpec("layers.{}.experts.{}.w", (4, 2), [Box((5, 0), (6, 2)), Box((2, 1), (3, 2))])
    assert list(family.names()) == ["layers.2.experts.1.w", "layers.5.experts.0.w", "layers.5.experts.1.w"]
    assert (family.num_members, family.num_stacked, family.ndim) == (3, 2, 4)


def test_equal_families_are_equal_in_whatever_order_the_members_come():
    members = [Box((5,), (6,)), Box((2,), (3,))]
    assert TensorSpec("l.{}.w", [2], members) == TensorSpec("l.{}.w", (2,), reversed(members))


@pytest.mark.parametrize(
    ("name", "shape", "members", "message"),
    [
        ("layers.{}.w", (2,), [Box((), ())], "has 1 stacked dims"),
        ("w", (2,), [Box((0,), (1,))], "has 0 stacked dims"),
        ("w", (-2,), [Box((), ())], "negative extent"),
    ],
)
def test_a_family_that_cannot_be_is_refused(name, shape, members, message):
    with pytest.raises(LayoutError, match=message):
        TensorSpec(name, shape, members)
