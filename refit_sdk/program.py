"""One rank's steps, cut into windows: a pure function of (plan, process number).

A window is a bounded batch: in it a rank posts all receives, then all sends, then waits. Both ends of a step have it in
the window of the same number, and messages of a directed pair match in order.
"""

from __future__ import annotations

from math import prod

from attrs import frozen

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


@frozen
class Message:
    """Pieces that travel as one run of bytes, in order, between this process and `peer`, in `engine`'s group."""

    peer: int
    engine: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return sum(piece.nbytes for piece in self.pieces)


@frozen
class Window:
    """A bounded batch of steps. `copies` are pieces that this process holds as source and needs as target of an engine."""

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
