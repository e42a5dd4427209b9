"""A program bound to views: which bytes a message is, when it needs a window buffer, and what can't be bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moving_support import fragment, truth

from refit_sdk.binding import Bound, Carried, bind, cover
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.program import Message, Piece, Program, Window
from refit_sdk.views import Views

CPU = Carried()


def boxes(ndim: int, extent: int = 6) -> st.SearchStrategy[Box]:
    ends = st.lists(st.integers(0, extent), min_size=2, max_size=2, unique=True).map(sorted)
    return st.lists(ends, min_size=ndim, max_size=ndim).map(
        lambda dims: Box([start for start, _ in dims], [stop for _, stop in dims])
    )


@given(st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes(ndim), st.lists(boxes(ndim), max_size=5))))
def test_cover_takes_each_element_once_and_names_the_rest(drawn: tuple[Box, list[Box]]) -> None:
    box, held = drawn
    whole = torch.arange(6**box.ndim).reshape((6,) * box.ndim)
    inside = [part for each in held if (part := each.intersect(box)) is not None]
    parts, missing = cover(box, [(part, whole[part.slices()]) for part in inside])
    count = np.zeros(whole.shape, int)
    for part, view in parts:
        assert torch.equal(view, whole[part.slices()])
        count[part.slices()] += 1
    for part in missing:
        count[part.slices()] += 1
    assert (count[box.slices()] == 1).all()
    assert count.sum() == box.size
    held_somewhere = np.zeros(whole.shape, bool)
    for part in inside:
        held_somewhere[part.slices()] = True
    assert not any(held_somewhere[part.slices()].any() for part in missing)


def bound_send(
    view: torch.Tensor, piece: Piece, *, held: Box | None = None, copies: Sequence[torch.Tensor] = ()
) -> Bound:
    where = held or Box.whole(view.shape)
    program = Program(0, (Window(0, sends=(Message(1, "e", (piece,)),)),))
    views = Views([fragment("w", where.stop, where, each) for each in (view, *copies)])
    return bind(program, sources=views, targets=None, carried=CPU)


def sends_itself(bound: Bound, view: torch.Tensor) -> bool:
    (transfer,) = bound.windows[0].sends
    same = transfer.buffer.data_ptr() == view.data_ptr()
    assert same == transfer.live == (bound.buffer_nbytes == 0)
    return same


def test_a_contiguous_view_is_its_own_message() -> None:
    view = torch.zeros(4, 6)
    bound = bound_send(view, Piece("w", Box.whole((4, 6)), "float32"))
    assert sends_itself(bound, view)
    assert bound.windows[0].sends[0].buffer.numel() == 96
    assert not bound.windows[0].batches["e"].pack.into


def test_whole_rows_of_a_view_are_their_own_message() -> None:
    view = torch.zeros(4, 6)
    assert sends_itself(bound_send(view, Piece("w", Box((1, 0), (3, 6)), "float32")), view[1:])


@pytest.mark.parametrize(
    ("view", "piece"),
    [
        (torch.zeros(6, 4).t(), Piece("w", Box((0, 0), (4, 6)), "float32")),
        (torch.zeros(4, 6), Piece("w", Box((0, 0), (4, 3)), "float32")),
        (torch.zeros(4, 6), Piece("w", Box((0, 0), (4, 6)), "bfloat16")),
        (torch.zeros(4, 6, dtype=torch.complex64).conj(), Piece("w", Box((0, 0), (4, 6)), "complex64")),
    ],
    ids=["transposed", "columns", "cast", "conjugated"],
)
def test_anything_else_is_packed(view: torch.Tensor, piece: Piece) -> None:
    bound = bound_send(view, piece)
    assert not sends_itself(bound, view)
    assert bound.buffer_nbytes == -(-piece.nbytes // 16) * 16


def test_memory_that_the_fabric_does_not_reach_is_packed() -> None:
    program = Program(0, (Window(0, sends=(Message(1, "e", (Piece("w", Box.whole((4,)), "int8"),)),)),))
    views = Views([fragment("w", (4,), Box.whole((4,)), torch.zeros(4, dtype=torch.int8))])
    bound = bind(program, sources=views, targets=None, carried=Carried(devices=frozenset({"cuda"})))
    assert not bound.windows[0].sends[0].live


def test_of_several_copies_one_is_sent() -> None:
    view, copy = torch.zeros(4), torch.zeros(4)
    assert sends_itself(bound_send(view, Piece("w", Box((0,), (4,)), "float32"), copies=[copy]), view)


@pytest.mark.parametrize("side", ["send", "recv"])
@pytest.mark.parametrize("views", [True, False], ids=["other-rows", "no-side"])
def test_a_piece_without_views_is_an_error_that_names_what_is_missing(side: str, views: bool) -> None:
    messages = (Message(1, "e", (Piece("w", Box((0, 0), (4, 2)), "float32"),)),)
    window = Window(0, sends=messages) if side == "send" else Window(0, recvs=messages)
    program = Program(0, (window,))
    found = Views([fragment("w", (4, 2), Box((0, 0), (3, 2)), torch.zeros(3, 2))]) if views else None
    with pytest.raises(LayoutError, match=rf"to {side} w .*no .*\[{'3:4' if views else '0:4'}, 0:2\]"):
        bind(program, sources=found, targets=found, carried=CPU)


def test_window_buffers_are_two_as_large_as_the_largest_window() -> None:
    """Window numbers of a rank have holes; it's the turn that decides on the buffer, not the number."""
    transposed = torch.zeros(4, 64, dtype=torch.int8).t()
    rows = [(0, 1), (1, 33), (33, 40), (40, 64)]
    windows = tuple(
        Window(2 * index, sends=(Message(1, "e", (Piece("w", Box((a, 0), (b, 4)), "int8"),)),))
        for index, (a, b) in enumerate(rows)
    )
    views = Views([fragment("w", (64, 4), Box.whole((64, 4)), transposed)])
    bound = bind(Program(0, windows), sources=views, targets=None, carried=CPU)
    first, second, third, fourth = (window.sends[0].buffer.data_ptr() for window in bound.windows)
    assert (first, second) == (third, fourth)
    assert first != second
    assert bound.buffer_nbytes == 32 + 128


@given(st.permutations(["int8", "bfloat16", "float16", "float32", "complex64", "float8_e5m2", "int64"]))
def test_a_message_is_its_pieces_widest_first_with_nothing_between(order: list[str]) -> None:
    """What is packed is what the layout in `Message` says, and both ends say the same whatever order they list."""
    whole = {dtype: truth(dtype, (3, 5), getattr(torch, dtype)).t() for dtype in order}
    message = Message(1, "e", tuple(Piece(dtype, Box((1, 0), (4, 3)), dtype) for dtype in order))
    views = Views([fragment(dtype, (5, 3), Box.whole((5, 3)), view) for dtype, view in whole.items()])
    bound = bind(Program(0, (Window(0, sends=(message,)),)), sources=views, targets=None, carried=CPU)
    bound.windows[0].batches["e"].pack.make()
    sizes = [getattr(torch, piece.dtype).itemsize for piece in message.pieces]
    assert sizes == sorted(sizes, reverse=True)
    expected = b"".join(
        whole[piece.dtype][1:4].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for piece in message.pieces
    )
    assert bound.windows[0].sends[0].buffer.numpy().tobytes() == expected
    assert len(expected) == message.nbytes
    assert message == Message(1, "e", tuple(reversed(message.pieces)))
