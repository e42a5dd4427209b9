"""One rank's steps, cut into windows: a pure function of (plan, process number).

A window is a bounded batch: a rank posts all its receives, then all its sends, and those of the next window before it
waits. Both ends of a step have it in the window of the same number, and messages of a directed pair match in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import itemsize
from refit_sdk.relays import Relays, relays_of

if TYPE_CHECKING:
    from refit_sdk.pieces import Family
    from refit_sdk.plan import Plan
    from refit_sdk.settings import Settings
    from refit_sdk.windows import StepTable


@frozen
class Piece:
    """A region of one checkpoint tensor on its way: `box` in the tensor's own coordinates, `dtype` on the wire.

    `name` is a name (or alias) under which both ends know the tensor. `own`: this process holds what it sends, or needs
    what it receives; else the bytes only pass through it.
    """

    name: str
    box: Box
    dtype: str
    own: bool = field(default=True, eq=False)

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
    nbytes: int = field(init=False, eq=False, repr=False)
    """Bytes of the whole message, summed once: every push asks for it."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(piece.nbytes for piece in self.pieces))

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

    @cached_property
    def relays(self) -> Relays:
        """What this process keeps of what arrives, to send it on."""
        return relays_of(self.windows)

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


def lower(plan: Plan, process: int) -> Program:
    """The program of one process: its steps, unfolded to checkpoint tensors and put into messages, window by window.

    In a window, a pair's small pieces (of one engine) share the first message, larger ones follow one by one, in the
    order of the plan's steps: so both ends have the same messages. Peers come in the order (peer - process) mod n for
    sends and the other way round for receives, so that not everybody starts with the same one.
    """
    count = plan.world.num_processes
    sends, recvs, copies = _lines(plan, process)
    windows = []
    for number in sorted({*sends, *recvs, *copies}):
        out = _messages(sends.get(number, {}), plan.settings, lambda peer: (peer - process) % count)
        into = _messages(recvs.get(number, {}), plan.settings, lambda peer: (process - peer) % count)
        windows.append(Window(number, out, into, tuple(copies.get(number, ()))))
    return Program(process, tuple(windows))


Lines = dict[int, dict[tuple[int, str], list[Piece]]]
"""By window, by (peer, engine): pieces in order."""


def _lines(plan: Plan, process: int) -> tuple[Lines, Lines, dict[int, list[tuple[str, Piece]]]]:
    """The pieces that a process sends, receives and copies, by window."""
    sends: Lines = defaultdict(lambda: defaultdict(list))
    recvs: Lines = defaultdict(lambda: defaultdict(list))
    copies: dict[int, list[tuple[str, Piece]]] = defaultdict(list)
    steps = plan.steps.take(np.flatnonzero((plan.steps.src == process) | (plan.steps.dst == process)))
    for window, src, dst, engine, pieces in _unfolded(plan, steps, _own(plan, steps, process)):
        peer, lines = (dst, sends) if src == process else (src, recvs)
        lines[window][peer, engine].extend(pieces)
    local = plan.copies.take(np.flatnonzero(plan.copies.src == process))
    for window, _, _, engine, pieces in _unfolded(plan, local, [True] * len(local)):
        copies[window].extend((engine, piece) for piece in pieces)
    return sends, recvs, copies


def _own(plan: Plan, steps: StepTable, process: int) -> list[bool]:
    """For each step of a process, whether it holds what it sends, or needs what it receives."""
    table = plan.table
    holds = np.array([process in each for each in table.holder_sets], bool)[table.holders[steps.move]]
    needs = np.array([process in each for each in table.need_sets], bool)[table.needs[steps.move]]
    own: list[bool] = np.where(steps.src == process, holds, needs).tolist()
    return own


def _unfolded(plan: Plan, steps: StepTable, owned: list[bool]) -> Iterator[tuple[int, int, int, str, list[Piece]]]:
    """Each step as (window, src, dst, engine, pieces)."""
    engines = plan.world.engines
    columns = (steps.window, steps.src, steps.dst, steps.engine, steps.family, steps.start, steps.stop)
    listed = (*(column.tolist() for column in columns), owned)
    for window, src, dst, engine, family, start, stop, own in zip(*listed, strict=True):
        yield window, src, dst, engines[engine], list(unfold(plan.families[family], start, stop, own=own))


def unfold(family: Family, start: Sequence[int], stop: Sequence[int], *, own: bool = True) -> Iterator[Piece]:
    """The pieces of a box of a family, one a member, in order of the members' numbers."""
    stacked, ndim, wire = family.num_stacked, family.ndim, family.wire
    box = Box(start[stacked:ndim], stop[stacked:ndim])
    for index in product(*(range(a, b) for a, b in zip(start[:stacked], stop[:stacked], strict=True))):
        yield Piece(family.name.format(*index), box, wire, own)


def _messages(
    lines: dict[tuple[int, str], list[Piece]], settings: Settings, turn: Callable[[int], int]
) -> tuple[Message, ...]:
    messages = []
    for peer, engine in sorted(lines, key=lambda line: (turn(line[0]), line[1])):
        pieces = lines[peer, engine]
        small = tuple(piece for piece in pieces if piece.nbytes < settings.coalesce_bytes)
        messages += [Message(peer, engine, small)] if small else []
        messages += [Message(peer, engine, (piece,)) for piece in pieces if piece.nbytes >= settings.coalesce_bytes]
    return tuple(messages)
