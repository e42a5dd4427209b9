"""Steps cut to fit and put into windows: one global order, in which every process stays busy.

1. Progress: lay each directed pair's steps in a row; a step's *pace* is where in its row it lies, in as many ticks as
   the busiest process needs windows. So all pairs are worked off side by side, each at the speed that ends with the
   others.
2. Cut: a step that spans several ticks is cut by member, then by rows, along granules; each part fits a window, and
   none is cut small for the sake of pace alone. A step of a later round has the tick two after those of the earlier
   ones of its move, whatever its own pair's pace: what passes through goes on soon.
3. Schedule, in order of (tick, diagonal of the pair, sender): each part goes to the smallest window, not before the
   current one of either end and two after all earlier rounds of its move, in which it fits at both ends: bytes sent,
   bytes received, and messages. Then that window is the current one of both. Two, because two windows are on the way at
   once: what is to be sent on has then arrived without anybody waiting for it.

Transports that relay have smaller windows (`narrowed`), so that their rounds overlap: it takes as many windows as there
are rounds until all links are busy.

Messages are counted as they will be made: a part whose members' pieces are small joins the one packed message of its
pair, engine and window; each larger piece is a message.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import evolve, frozen

from refit_sdk.cuts import num_members, split
from refit_sdk.overlap import volume
from refit_sdk.settings import Settings
from refit_sdk.transport import Ints

LAG: Final = 2
"""How many windows after it arrived something is sent on, at least."""
DEEP: Final = 32
"""How many windows the busiest process has of a push that relays, where that doesn't make them too small."""
COALESCED: Final = 4
"""Too small: below so many times the bytes from which a piece is a message of its own."""


@frozen(eq=False)
class StepTable:
    """Steps of the whole plan, as arrays: a box of family `family[k]` goes from process `src[k]` to `dst[k]`, in the
    group of engine number `engine[k]`. `move[k]` and `round[k]` say what has to come first; `window[k]` is -1 before
    scheduling.
    """

    family: Ints
    engine: Ints
    start: Ints
    stop: Ints
    granule: Ints
    src: Ints
    dst: Ints
    move: Ints
    round: Ints
    window: Ints

    def __len__(self) -> int:
        return len(self.family)

    def take(self, index: Ints) -> StepTable:
        """The rows of an index array, in its order."""
        return StepTable(
            self.family[index], self.engine[index], self.start[index], self.stop[index], self.granule[index],
            self.src[index], self.dst[index], self.move[index], self.round[index], self.window[index],
        )  # fmt: skip

    @property
    def volume(self) -> Ints:
        """Elements of each step."""
        return volume(self.start, self.stop)


@frozen(eq=False)
class Sizes:
    """Bytes of an element on the wire, and stacked dims, by family."""

    itemsize: Ints
    stacked: Ints

    def nbytes(self, steps: StepTable) -> Ints:
        """Bytes of each step on the wire."""
        return steps.volume * self.itemsize[steps.family]

    def members(self, steps: StepTable) -> Ints:
        """Checkpoint tensors that each step touches."""
        return num_members(steps.start, steps.stop, self.stacked[steps.family])


def schedule(steps: StepTable, sizes: Sizes, settings: Settings, *, first: int) -> StepTable:
    """Steps of one transport, cut, with windows from `first` on, in the order of scheduling."""
    if not len(steps):
        return steps
    ticks = _ticks(steps, sizes, settings)
    cut = fit(steps, sizes, settings, limit=_limits(steps, sizes, settings, ticks))
    tick = _after_rounds(cut, _pace(cut, sizes.nbytes(cut), ticks))
    processes = 1 + int(max(cut.src.max(), cut.dst.max()))
    order = np.lexsort((np.arange(len(cut)), cut.src, _diagonal(cut), tick))
    cut = cut.take(order)
    return evolve(cut, window=first + _pack(cut, sizes, settings, processes))


def narrowed(settings: Settings, *, busiest: int, granule: int) -> Settings:
    """Settings with windows for relays. `busiest`: bytes of the busiest process; `granule`: of the largest granule."""
    least = max(COALESCED * settings.coalesce_bytes, COALESCED * granule, -(-busiest // DEEP))
    return evolve(settings, window_bytes=min(settings.window_bytes, max(1, least)))


def _diagonal(steps: StepTable) -> Ints:
    """A number a pair, as few as can be, so that pairs of equal number have different senders and receivers."""
    senders, src = np.unique(steps.src, return_inverse=True)
    receivers, dst = np.unique(steps.dst, return_inverse=True)
    found: Ints = (dst.reshape(-1) - src.reshape(-1)) % max(len(senders), len(receivers))
    return found


def _ticks(steps: StepTable, sizes: Sizes, settings: Settings) -> int:
    """Windows that the busiest process needs, with a sixteenth to spare for what doesn't cut evenly."""
    nbytes = sizes.nbytes(steps)
    busiest = max(int(total(steps.src, nbytes).max()), int(total(steps.dst, nbytes).max()))
    usable = settings.window_bytes - settings.window_bytes // 16
    return max(1, -(-busiest // usable))


def total(key: Ints, amount: Ints) -> Ints:
    """The sum of the amounts of each key.

    >>> total(np.array([2, 0, 2]), np.array([1, 5, 1])).tolist()
    [5, 0, 2]
    """
    sums = np.zeros(int(key.max(initial=-1)) + 1, np.int64)
    np.add.at(sums, key, amount)
    return sums


def _pairs(steps: StepTable) -> Ints:
    """A number for each directed pair."""
    return steps.src * (1 + int(steps.dst.max())) + steps.dst


def _row(steps: StepTable, nbytes: Ints) -> tuple[Ints, Ints]:
    """For each step, the bytes of its pair's row that lie before it, and those of the whole row."""
    pair = _pairs(steps)
    order = np.argsort(pair, kind="stable")
    before = np.cumsum(nbytes[order]) - nbytes[order]
    new = np.ones(len(order), bool)
    new[1:] = pair[order][1:] != pair[order][:-1]
    begin = np.flatnonzero(new)
    which = np.cumsum(new) - 1
    whole = np.add.reduceat(nbytes[order], begin)
    lead, length = np.empty_like(nbytes), np.empty_like(nbytes)
    lead[order], length[order] = before - before[begin][which], whole[which]
    return lead, length


def _limits(steps: StepTable, sizes: Sizes, settings: Settings, ticks: int) -> Ints:
    """The bytes to which each step is cut."""
    nbytes = sizes.nbytes(steps)
    lead, length = _row(steps, nbytes)
    spanned = _scaled(lead + nbytes - 1, ticks, length) - _scaled(lead, ticks, length) + 1
    least = max(1, settings.window_bytes // 16, min(settings.coalesce_bytes, settings.window_bytes))
    return np.minimum(settings.window_bytes, np.maximum(least, -(-nbytes // spanned)))


def _scaled(position: Ints, ticks: int, length: Ints) -> Ints:
    """`position * ticks // length` without overflow at 64 bits."""
    if int(length.max()) < (1 << 62) // ticks:
        return position * ticks // length
    return (position // ticks) * ticks // np.maximum(length // ticks, 1)


def _pace(steps: StepTable, nbytes: Ints, ticks: int) -> Ints:
    lead, length = _row(steps, nbytes)
    return _scaled(lead + nbytes // 2, ticks, length)


def _after_rounds(steps: StepTable, tick: Ints) -> Ints:
    """Ticks, later for later rounds of a move."""
    moves = 1 + int(steps.move.max())
    latest = np.full(moves, -1, np.int64)
    for number in range(int(steps.round.max()) + 1):
        now = np.flatnonzero(steps.round == number)
        before = latest[steps.move[now]]
        tick[now] = np.where(before < 0, tick[now], before + LAG)
        np.maximum.at(latest, steps.move[now], tick[now])
    return tick


def fit(steps: StepTable, sizes: Sizes, settings: Settings, *, limit: Ints) -> StepTable:
    """Steps cut to at most `limit` bytes, and to messages that fit a window."""
    itemsize = sizes.itemsize[steps.family]
    members = np.where(_inner(steps, sizes) >= settings.coalesce_bytes, settings.window_ops, np.iinfo(np.int64).max)
    parent, start, stop = split(
        steps.start, steps.stop, steps.granule,
        stacked=sizes.stacked[steps.family], limit=np.maximum(limit // itemsize, 1), members=members,
    )  # fmt: skip
    return evolve(steps.take(parent), start=start, stop=stop)


def _inner(steps: StepTable, sizes: Sizes) -> Ints:
    """Bytes of one member's piece of each step."""
    return sizes.nbytes(steps) // sizes.members(steps)


def granule_nbytes(steps: StepTable, sizes: Sizes) -> Ints:
    """Bytes of a single granule of each step."""
    least: Ints = np.prod(np.minimum(steps.granule, steps.stop - steps.start), axis=1, dtype=np.int64)
    return least * sizes.itemsize[steps.family]


def unfit(steps: StepTable, sizes: Sizes, settings: Settings) -> Ints:
    """Steps of which a single granule is larger than a window, as row numbers."""
    return np.flatnonzero(granule_nbytes(steps, sizes) > settings.window_bytes)


def _pack(steps: StepTable, sizes: Sizes, settings: Settings, processes: int) -> Ints:
    """Step 3: a window for each step, in the order given."""
    most_bytes, most_ops = settings.window_bytes, settings.window_ops
    piece, nbytes = _inner(steps, sizes), sizes.nbytes(steps)
    messages = np.where(piece >= settings.coalesce_bytes, nbytes // piece, 0)
    now, sent, received, ops = ([0] * processes for _ in range(4))
    floor: dict[tuple[int, int], int] = {}
    packed: dict[tuple[int, int, int], int] = {}
    windows = []
    late = int(steps.round.max()) > 0
    columns = (steps.src, steps.dst, steps.engine, nbytes, messages, steps.move, steps.round)
    for src, dst, engine, size, large, move, turn in zip(*(column.tolist() for column in columns), strict=True):
        here, there = now[src], now[dst]
        window = here if here > there else there
        if late and turn:
            window = max(window, LAG + max(floor.get((move, earlier), -LAG) for earlier in range(turn)))
        begun = -1 if large else packed.get((src, dst, engine), -1)
        while True:
            new = large or int(begun != window)
            out, busy_src = (sent[src], ops[src]) if here == window else (0, 0)
            into, busy_dst = (received[dst], ops[dst]) if there == window else (0, 0)
            fits = out + size <= most_bytes and into + size <= most_bytes
            if fits and busy_src + new <= most_ops and busy_dst + new <= most_ops:
                break
            window += 1
        if here != window:
            now[src], received[src] = window, 0
        if there != window:
            now[dst], sent[dst] = window, 0
        sent[src], ops[src] = out + size, busy_src + new
        received[dst], ops[dst] = into + size, busy_dst + new
        if not large:
            packed[src, dst, engine] = window
        if late:
            floor[move, turn] = max(floor.get((move, turn), -1), window)
        windows.append(window)
    return np.array(windows, np.int64)
