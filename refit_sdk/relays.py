"""What a process keeps of what arrives, to send it on in later windows, and where: slots of one relay buffer.

1. Find, for each piece that is sent and isn't the process's own, the pieces of which it arrived (`overlap.pairs`).
2. A piece that is sent on is kept, whole, from the window in which it is received until that in which it is sent last.
3. Lay slots out window by window, first fit: a stretch is free again two windows after its last use, since two windows
   are on the way at once. So the size of the buffer is known before anything moves.

A window here is its place in the process's program, from 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from attrs import evolve, field, frozen

from refit_sdk.box import Box
from refit_sdk.overlap import Boxes, pairs

if TYPE_CHECKING:
    from refit_sdk.program import Message, Piece, Window

UNDERWAY: Final = 2
"""Windows that are on the way at once."""
ALIGNED: Final = 16
"""Slots begin at multiples of this many bytes."""

Where = tuple[int, str, str, str, Box]
"""A piece in a window: the window's place, its engine, name, dtype and box."""


@frozen
class Slot:
    """A piece that is kept from window `first` to window `last`, at `offset` of the relay buffer."""

    box: Box
    dtype: str
    nbytes: int
    first: int
    last: int
    offset: int = 0


@frozen(eq=False)
class Relays:
    """All slots of a program: `kept` says which one holds a piece that arrives, `feeds` which ones hold one that is
    sent on. `after[k]` is the last window that has to be complete before window k is sent; -1 for none. `nbytes` is the
    size of the buffer.
    """

    slots: tuple[Slot, ...] = ()
    kept: dict[Where, int] = field(factory=dict)
    feeds: dict[Where, tuple[int, ...]] = field(factory=dict)
    after: tuple[int, ...] = ()
    nbytes: int = 0


def where(window: int, engine: str, piece: Piece) -> Where:
    """The key of a piece that is received or sent in a window."""
    return window, engine, piece.name, piece.dtype, piece.box


def relays_of(windows: Sequence[Window]) -> Relays:
    """The relays of a program's windows."""
    out = [(at, e, p) for at, w in enumerate(windows) for e, p in _pieces(w.sends) if not p.own]
    none = (-1,) * len(windows)
    if not out:
        return Relays(after=none)
    groups: dict[tuple[str, str, str], int] = {}
    for _, engine, piece in out:
        groups.setdefault((engine, piece.name, piece.dtype), len(groups))
    into = [(at, e, p) for at, w in enumerate(windows) for e, p in _pieces(w.recvs) if (e, p.name, p.dtype) in groups]
    dims = max(piece.box.ndim for _, _, piece in (*out, *into))
    sent, received = (
        Boxes.of([(groups[e, p.name, p.dtype], p.box) for _, e, p in each], dims=dims) for each in (out, into)
    )
    ends = [np.array([at for at, _, _ in each], np.int64) for each in (out, into)]
    of, by = pairs(sent, received)
    earlier = ends[1][by] < ends[0][of]
    of, by = of[earlier], by[earlier]
    last, after = np.full(len(into), -1, np.int64), np.array(none, np.int64)
    np.maximum.at(last, by, ends[0][of])
    np.maximum.at(after, ends[0][of], ends[1][by])
    return _laid_out(out, into, of.tolist(), by.tolist(), last.tolist(), tuple(after.tolist()))


def _pieces(messages: Sequence[Message]) -> list[tuple[str, Piece]]:
    return [(message.engine, piece) for message in messages for piece in message.pieces if piece.nbytes]


Listed = list[tuple[int, str, "Piece"]]


def _laid_out(
    out: Listed, into: Listed, of: list[int], by: list[int], last: list[int], after: tuple[int, ...]
) -> Relays:
    number: dict[int, int] = {}
    kept: dict[Where, int] = {}
    unplaced: list[Slot] = []
    for row, (at, engine, piece) in enumerate(into):
        if last[row] < 0:
            continue
        key = where(at, engine, piece)
        if key not in kept:
            kept[key] = len(unplaced)
            unplaced.append(Slot(piece.box, piece.dtype, piece.nbytes, at, last[row]))
        # The same bytes may come twice in a window, for ranks that want different dtypes: one slot keeps them.
        number[row] = kept[key]
        unplaced[number[row]] = evolve(unplaced[number[row]], last=max(unplaced[number[row]].last, last[row]))
    feeds: dict[Where, list[int]] = defaultdict(list)
    for a, b in zip(of, by, strict=True):
        feeds[where(*out[a])].append(number[b])
    slots, nbytes = _placed(unplaced)
    return Relays(slots, kept, {key: tuple(dict.fromkeys(which)) for key, which in feeds.items()}, after, nbytes)


def _placed(slots: list[Slot]) -> tuple[tuple[Slot, ...], int]:
    """Slots with offsets, and the size of what they take. Those of equal windows lie together."""
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, slot in enumerate(slots):
        batches[slot.first, slot.last].append(number)
    taken: list[tuple[int, int, int]] = []
    offsets, size = [0] * len(slots), 0
    for (first, last), numbers in sorted(batches.items()):
        taken = [each for each in taken if each[2] + UNDERWAY > first]
        need = sum(_aligned(slots[number].nbytes) for number in numbers)
        at = _first_fit(taken, need)
        taken = sorted([*taken, (at, at + need, last)])
        size = max(size, at + need)
        for number in numbers:
            offsets[number] = at
            at += _aligned(slots[number].nbytes)
    placed = (Slot(s.box, s.dtype, s.nbytes, s.first, s.last, offset) for s, offset in zip(slots, offsets, strict=True))
    return tuple(placed), size


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _first_fit(taken: list[tuple[int, int, int]], need: int) -> int:
    """The first offset from which `need` bytes are free. `taken` are (start, stop, …) in order.

    >>> _first_fit([(0, 16, 0), (32, 48, 0)], 16), _first_fit([(0, 16, 0), (32, 48, 0)], 32)
    (16, 48)
    """
    at = 0
    for start, stop, _ in taken:
        if start - at >= need:
            break
        at = max(at, stop)
    return at
