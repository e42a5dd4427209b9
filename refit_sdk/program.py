"""One rank's steps, cut into windows: a pure function of (plan, process number).

A window is a bounded batch: in it a rank posts all receives, then all sends, then waits. Both ends of a step have it in
the window of the same number, and messages of a directed pair match in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from attrs import field, frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import itemsize


@frozen
class Piece:
    """A region of one checkpoint tensor on its way: `box` in the tensor's own coordinates, `dtype` on the wire.

    `name` is a name (or alias) under which both ends know the tensor.
    """

    name: str
    box: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return prod(self.box.shape) * itemsize(self.dtype)


def _widest_first(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: (-itemsize(piece.dtype), piece.dtype)))


@frozen
class Message:
    """Pieces that travel as one run of bytes, in order, between this process and `peer`, in `engine`'s group.

    There is nothing between the pieces: those of wider elements come first, so that each lies at a multiple of its own
    item size, and each is its elements in row-major order.

    >>> row = Box((0,), (3,))
    >>> [piece.name for piece in Message(1, "e", (Piece("b", row, "int8"), Piece("w", row, "float32"))).pieces]
    ['w', 'b']
    """

    peer: int
    engine: str
    pieces: tuple[Piece, ...] = field(converter=_widest_first)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes that the message takes of a window buffer, if it needs one: the next one begins at a multiple of 16."""
        return -(-self.nbytes // 16) * 16


@frozen
class Window:
    """A bounded batch of steps. `copies` are pieces that this process holds as source and needs as target of an engine,
    with that engine's name.
    """

    number: int
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    copies: tuple[tuple[str, Piece], ...] = ()


@frozen
class Program:
    """All windows of one process, in their global order."""

    process: int
    windows: tuple[Window, ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process sends in one push."""
        return sum(message.nbytes for window in self.windows for message in window.sends)

    @property
    def bytes_arriving(self) -> int:
        """Bytes that arrive at this process from others in one push."""
        return sum(message.nbytes for window in self.windows for message in window.recvs)

    def arriving(self, engine: str) -> int:
        """Bytes that arrive at this process in one engine's group."""
        return sum(m.nbytes for window in self.windows for m in window.recvs if m.engine == engine)

    def only(self, engines: frozenset[str]) -> Program:
        """The program without the steps of all other engines; windows keep their numbers.

        >>> left, right = Message(1, "a", ()), Message(2, "b", ())
        >>> Program(0, (Window(0, sends=(left, right)),)).only(frozenset({"b"})).windows[0].sends == (right,)
        True
        """
        windows = (_window_of(window, engines) for window in self.windows)
        return Program(self.process, tuple(w for w in windows if w.sends or w.recvs or w.copies))


def _window_of(window: Window, engines: frozenset[str]) -> Window:
    return Window(
        window.number,
        tuple(message for message in window.sends if message.engine in engines),
        tuple(message for message in window.recvs if message.engine in engines),
        tuple((engine, piece) for engine, piece in window.copies if engine in engines),
    )
