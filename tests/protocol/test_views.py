"""Views are found by name and box, and no storage is written as two different elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk import views as room
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.views import Views, check_storage


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    corners = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape))
    return corners.map(lambda found: Box((a for a, _ in found), (b for _, b in found)))


@given(st.data())
def test_find_gives_every_view_that_stores_a_part(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(), (4,), (4, 6), (0, 3), (2, 3, 4)]))
    w = np.arange(Box.whole(shape).size).reshape(shape)
    boxes = data.draw(st.lists(boxes_of(shape), max_size=6))
    views = Views(Fragment("w", shape, box, w[box.slices()]) for box in boxes)
    wanted = data.draw(boxes_of(shape))
    found = views.find("w", wanted)
    assert [part for part, _ in found] == [part for box in boxes if (part := box.intersect(wanted))]
    assert all(np.array_equal(view, w[part.slices()]) for part, view in found)


def test_find_gives_views_of_the_live_storage() -> None:
    w = torch.zeros(4, 4)
    views = Views([Fragment("w", (8, 4), Box((4, 0), (8, 4)), w)])
    ((part, view),) = views.find("w", Box((2, 1), (6, 3)))
    view.fill_(7)
    assert part == Box((4, 1), (6, 3))
    assert w.nonzero().tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]


def test_find_takes_an_alias() -> None:
    scalar = torch.tensor(3.0)
    views = Views([Fragment("embed.w", (), Box((), ()), scalar, aliases=("head.w",))])
    assert views.find("head.w", Box((), ())) == [(Box((), ()), scalar)]
    assert "head.w" in views
    assert "other.w" not in views
    assert views.find("other.w", Box((), ())) == []


def test_find_gives_a_view_for_each_copy() -> None:
    slots = torch.zeros(2, 3)
    views = Views(Fragment("experts.0.w", (3,), Box((0,), (3,)), slot) for slot in slots)
    for _, view in views.find("experts.0.w", Box((1,), (2,))):
        view.fill_(1)
    assert slots.tolist() == [[0, 1, 0], [0, 1, 0]]


def parts_of(name: str, shape: tuple[int, ...], *placed: tuple[Box, torch.Tensor]) -> list[Fragment]:
    return [Fragment(name, shape, box, view) for box, view in placed]


W = torch.zeros(8, 8)
LEFT, RIGHT = Box((0, 0), (8, 4)), Box((0, 4), (8, 8))
WHOLE = Box.whole((8, 8))


@pytest.mark.parametrize(
    "fragments",
    [
        pytest.param(parts_of("w", (8, 8), (LEFT, W[:, :4]), (RIGHT, W[:, 4:])), id="columns of one storage"),
        pytest.param(parts_of("w", (8, 8), (LEFT, W.t()[:, :4]), (RIGHT, W.t()[:, 4:])), id="columns, transposed"),
        pytest.param(
            [*parts_of("even", (8, 4), (LEFT, W[:, ::2])), *parts_of("odd", (8, 4), (LEFT, W[:, 1::2]))],
            id="interleaved columns of two tensors",
        ),
        pytest.param(
            [
                *parts_of("gate", (4, 8), (Box.whole((4, 8)), W[:4])),
                *parts_of("up", (4, 8), (Box.whole((4, 8)), W[4:])),
            ],
            id="gate and up rows of a fused buffer",
        ),
        pytest.param(parts_of("w", (8, 8), (WHOLE, W), (WHOLE, W)), id="the same twice"),
        pytest.param(parts_of("w", (8, 8), (WHOLE, W), (Box((2, 2), (6, 6)), W[2:6, 2:6])), id="a part of it again"),
        pytest.param(
            parts_of("w", (8, 8), (Box((0, 0), (5, 8)), W[:5]), (Box((4, 0), (8, 8)), W[4:])),
            id="a row in two views, the same row",
        ),
        pytest.param(
            parts_of("w", (8, 8), (WHOLE, W), (Box((3, 0), (4, 8)), W[3:4].as_strided((1, 8), (99, 1)))),
            id="one row, its row stride another",
        ),
        pytest.param(parts_of("w", (8, 8), (Box((0, 0), (0, 8)), W[:0]), (WHOLE, W)), id="an empty box"),
        pytest.param(parts_of("w", (8, 8), (WHOLE, W), (WHOLE, torch.zeros(8, 8))), id="two copies apart"),
        pytest.param(
            [*parts_of("a", (), (Box((), ()), W[0, 0])), *parts_of("b", (), (Box((), ()), W[0, 1]))], id="scalars"
        ),
        pytest.param(
            [*parts_of("a", (8, 8), (WHOLE, W.to("meta"))), *parts_of("b", (8, 8), (WHOLE, W.to("meta")))],
            id="no storage at all: meta tensors",
        ),
        pytest.param(
            [Fragment("w", (4, 2, 8), Box((i, 0, 0), (i + 1, 2, 8)), W.view(4, 2, 8)[i : i + 1]) for i in range(4)],
            id="experts of a stack",
        ),
    ],
)
def test_storage_may_be(fragments: list[Fragment]) -> None:
    check_storage(fragments)
    check_storage(fragments[::-1])


HALF = W.view(torch.bfloat16)


@pytest.mark.parametrize(
    ("fragments", "names"),
    [
        pytest.param(
            [*parts_of("a", (8, 8), (WHOLE, W)), *parts_of("b", (8, 8), (WHOLE, W))],
            ("'a' [0:8", "'b' [0:8"),
            id="two names",
        ),
        pytest.param(
            [*parts_of("a", (8, 8), (WHOLE, W)), *parts_of("b", (), (Box((), ()), W[3, 5]))],
            ("'a'", "'b' []"),
            id="one element",
        ),
        pytest.param(
            parts_of("w", (16, 8), (Box((0, 0), (5, 8)), W[:5]), (Box((8, 0), (12, 8)), W[4:])),
            ("'w' [0:5", "'w' [8:12"),
            id="one row is two rows",
        ),
        pytest.param(
            parts_of("w", (8, 8), (Box((0, 0), (5, 8)), W[:5]), (Box((4, 0), (8, 8)), W[3:7])),
            ("'w' [0:5", "'w' [4:8"),
            id="a common row, a row off",
        ),
        pytest.param(parts_of("w", (8, 8), (WHOLE, W), (WHOLE, W.t())), ("'w'", "'w'"), id="transposed against itself"),
        pytest.param(
            parts_of("w", (8, 8), (WHOLE, W), (Box((0, 0), (2, 2)), W[2:4, 2:4])),
            ("'w' [0:8", "'w' [0:2"),
            id="a shifted block",
        ),
        pytest.param(
            parts_of("w", (8, 8), (Box((0, 0), (4, 8)), W[:4]), (Box((0, 0), (4, 8)), W[1:5])),
            ("'w' [0:4", "'w' [0:4"),
            id="the same box, a row off",
        ),
        pytest.param(
            parts_of("w", (8, 8), (Box((0, 0), (4, 1)), W[:1, :4].t()), (Box((0, 0), (1, 4)), W[:1, :4])),
            ("'w' [0:4, 0:1]", "'w' [0:1, 0:4]"),
            id="a row and a column from one corner",
        ),
        pytest.param(
            parts_of("w", (8, 8), (LEFT, W[:, :4]), (RIGHT, W[:, 3:7])), ("'w'", "'w'"), id="columns overlap by one"
        ),
        pytest.param(
            [*parts_of("a", (8, 8), (WHOLE, W)), *parts_of("b", (8, 1), (Box.whole((8, 1)), HALF[:, 15:]))],
            ("'a'", "'b'"),
            id="half of an element, as another dtype",
        ),
    ],
)
def test_storage_refuses_two_elements_in_one_place(fragments: list[Fragment], names: tuple[str, str]) -> None:
    for order in (fragments, fragments[::-1]):
        with pytest.raises(LayoutError, match="at the same addresses") as caught:
            check_storage(order)
        assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(torch.zeros(1, 8).expand(8, 8), id="expanded"),
        pytest.param(torch.zeros(15).unfold(0, 8, 1), id="sliding windows"),
    ],
)
def test_storage_refuses_a_view_onto_itself(view: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"'w' \[0:8, 0:8\] has strides"):
        check_storage(parts_of("w", (8, 8), (WHOLE, view)))


class FakeView:
    """A view at addresses of our choice: the check must read nothing there."""

    device = "cuda:0"

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.shape, self._address, self._strides, self._itemsize = shape, address, strides, itemsize

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._itemsize


@st.composite
def fake_pairs(draw: st.DrawFn) -> list[Fragment]:
    """Two views at random addresses, of random strides that slicing could make, of one tensor or two."""
    pair = []
    for name in ("w", draw(st.sampled_from("wv"))):
        shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
        strides, reach = [0, 0], 1
        for dim in draw(st.permutations((0, 1))):
            strides[dim] = reach * draw(st.integers(1, 3))
            reach = strides[dim] * shape[dim]
        start = [draw(st.integers(0, 3)), draw(st.integers(0, 3))]
        box = Box(start, (a + n for a, n in zip(start, shape, strict=True)))
        view = FakeView(4096 + 2 * draw(st.integers(0, 12)), tuple(shape), tuple(strides), 2)
        pair.append(Fragment(name, (8, 8), box, view))  # type: ignore[arg-type]
    return pair


def elements_by_address(fragments: list[Fragment]) -> dict[int, set[tuple[str, tuple[int, ...]]]]:
    found: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for f in fragments:
        for point in f.box.points():
            offset = sum((x - a) * s for x, a, s in zip(point, f.box.start, f.view.stride(), strict=True))
            found.setdefault(f.view.data_ptr() + 2 * offset, set()).add((f.name, point))
    return found


@given(fake_pairs())
def test_storage_agrees_with_a_walk_over_all_elements(pair: list[Fragment]) -> None:
    """A pair of one tensor with other strides may be refused for a place it shares rightly: the rest never is wrong."""
    wrong = any(len(elements) > 1 for elements in elements_by_address(pair).values())
    one, two = pair
    touching = one.name == two.name and one.box.intersect(two.box) is not None
    if wrong:
        with pytest.raises(LayoutError, match="at the same addresses"):
            check_storage(pair)
    elif not touching or one.view.stride() == two.view.stride():
        check_storage(pair)


def fake(name: str, address: int, rows: int) -> Fragment:
    view = FakeView(address, (rows, 4), (4, 1), 2)
    return Fragment(name, (rows, 4), Box.whole((rows, 4)), view)  # type: ignore[arg-type]


def test_storage_ignores_where_an_empty_view_lies() -> None:
    check_storage([fake("a", 4096, 4), fake("b", 4104, 0)])


def test_storage_tells_devices_apart() -> None:
    other = fake("b", 4096, 4)
    other.view.device = "cuda:1"
    check_storage([fake("a", 4096, 4), other])


def test_storage_solves_only_for_views_whose_ranges_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[bool] = []
    monkeypatch.setattr(room, "_meet", lambda a, b: bool(solved.append(True)))
    check_storage(fake(f"w{i}", 4096 + 32 * i, 4) for i in range(300))
    assert len(solved) == 0
    check_storage([fake("a", 4096, 4), fake("b", 4104, 4)])
    assert len(solved) == 1
