"""Who serves what: bytes over holders, so that the busiest sender has as little as can be, over all tensors together.

1. Group pieces by the set of processes that hold them; a class's weight is its bytes times how often they leave a
   holder.
2. Fill: smallest sets first, pour each class over the least loaded of its holders, like water. A class is spread over
   no more holders than it has quanta of bytes for, so that small tensors don't go to every peer in crumbs.
3. Take each class out and pour it again until nothing gets better: where sets of holders cross, an early class doesn't
   know what later ones need. Each pour is the best answer to the others, and for loads that is the way to the best of
   all.
4. Cut: line up a class's pieces by who needs them, and cut the line at the quotas, so that a holder has few peers. A
   piece is cut only where a quota ends in it, at a granule.

All numbers are integers; ties go to the lower process number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from refit_sdk.cuts import Span, prefix, size_of
from refit_sdk.families import Processes
from refit_sdk.transport import Ints

PASSES = 32
"""Pours of step 3 at most; worlds met so far settle in a few."""


@frozen(eq=False)
class Shares:
    """Pieces cut by server: share i is the box `start[i]:stop[i]` of piece `piece[i]`, served by process
    `server[i]`."""

    piece: Ints
    start: Ints
    stop: Ints
    server: Ints


def pour(load: Ints, amount: int) -> Ints:
    """What each of some holders gets of an amount, so that the fullest ends up least full.

    >>> pour(np.array([5, 0, 2]), 6).tolist()
    [0, 4, 2]
    """
    order = np.argsort(load, kind="stable")
    ordered = load[order]
    filled = np.arange(1, len(load)) * ordered[1:] - np.cumsum(ordered)[:-1]
    count = 1 + int(np.searchsorted(filled, amount, side="left"))
    level, extra = divmod(amount + int(ordered[:count].sum()), count)
    quota = np.zeros(len(load), np.int64)
    quota[order[:count]] = level - ordered[:count]
    quota[np.sort(order[:count])[:extra]] += 1
    return quota


def quotas(sets: Sequence[Processes], weight: Sequence[int], *, processes: int, quantum: int) -> list[Ints]:
    """How much of each class each of its holders serves. `sets` are ordered smallest first.

    >>> [quota.tolist() for quota in quotas([(0,), (0, 1)], [10, 30], processes=2, quantum=1)]
    [[10], [10, 20]]
    """
    load = np.zeros(processes, np.int64)
    holders = [np.array(each, np.int64) for each in sets]
    parts = [np.zeros(len(each), np.int64) for each in sets]
    shared = [i for i, each in enumerate(sets) if len(each) > 1 and weight[i]]
    for i, each in enumerate(sets):
        if len(each) == 1:
            parts[i][0] = weight[i]
            load[each[0]] += weight[i]
    best: tuple[int, list[Ints]] | None = None
    for _ in range(PASSES if shared else 0):
        for i in shared:
            load[holders[i]] -= parts[i]
            parts[i] = _pour_quanta(load[holders[i]], weight[i], quantum)
            load[holders[i]] += parts[i]
        square = int(np.dot(load.astype(object), load.astype(object)))
        if best is not None and square >= best[0]:
            break
        best = (square, list(parts))
    return best[1] if best else parts


def _pour_quanta(load: Ints, amount: int, quantum: int) -> Ints:
    """`pour` over as many of the emptiest holders as there are quanta in the amount."""
    count = max(1, amount // max(quantum, 1))
    if count >= len(load):
        return pour(load, amount)
    chosen = np.sort(np.argsort(load, kind="stable")[:count])
    quota = np.zeros(len(load), np.int64)
    quota[chosen] = pour(load[chosen], amount)
    return quota


def share(
    start: Ints,
    stop: Ints,
    granule: Ints,
    *,
    weight: Ints,
    who: Ints,
    sets: Sequence[Processes],
    line: Ints,
    quantum: int,
) -> Shares:
    """Give each piece (n, dims) a server out of `sets[who]`. `weight` is its bytes times the copies that leave.

    `line` is the order in which pieces of a class stand in line. Shares come in order of (piece, box).
    """
    total = np.zeros(len(sets), np.int64)
    np.add.at(total, who, weight)
    processes = 1 + max((max(each) for each in sets if each), default=-1)
    quota = quotas(sets, total.tolist(), processes=processes, quantum=quantum)
    order = np.lexsort((line, who))
    bounds = np.searchsorted(who[order], np.arange(len(sets) + 1)).tolist()
    server = np.zeros(len(who), np.int64)
    cut: dict[int, list[tuple[int, Span]]] = {}
    for i, each in enumerate(sets):
        rows = order[bounds[i] : bounds[i + 1]]
        queue = _Queue(np.array(each, np.int64), np.cumsum(quota[i]), np.cumsum(weight[rows]), weight[rows])
        server[rows] = queue.server()
        slack = max(1, min(quantum, int(total[i]) // len(each)) // 64)
        for at in queue.crossing(slack):
            row = int(rows[at])
            span = (tuple(start[row].tolist()), tuple(stop[row].tolist()))
            unit = int(weight[row]) // size_of(span)
            parts = [(who, amount // unit) for who, amount in queue.parts(at, slack)]
            cut[row] = _cut(span, tuple(granule[row].tolist()), parts, slack // unit)
    return _with_cuts(start, stop, server, cut)


@frozen(eq=False)
class _Queue:
    """A class's pieces in line: piece k ends at `end[k]`, the quota of holder j at `limit[j]`."""

    holders: Ints
    limit: Ints
    end: Ints
    weight: Ints

    def server(self) -> Ints:
        """For each piece the holder in whose quota its middle lies."""
        at = np.searchsorted(self.limit, self.end - self.weight // 2 - 1, side="right")
        return self.holders[np.minimum(at, len(self.holders) - 1)]

    def crossing(self, slack: int) -> list[int]:
        """Pieces in which a quota ends, further than the slack from both ends."""
        first = np.searchsorted(self.limit, self.end - self.weight + slack, side="right")
        last = np.searchsorted(self.limit, self.end - slack, side="left")
        return np.flatnonzero((first < last) & (self.weight > 0)).tolist()

    def parts(self, at: int, slack: int) -> list[tuple[int, int]]:
        """One piece's (server, weight) parts in order; none but a lone one is smaller than the slack."""
        end = int(self.end[at])
        done = end - int(self.weight[at])
        parts: list[tuple[int, int]] = []
        first = int(np.searchsorted(self.limit, done, side="right"))
        for holder, limit in zip(self.holders[first:].tolist(), self.limit[first:].tolist(), strict=True):
            until = end if end - limit <= slack else limit
            if until - done > slack:
                parts.append((holder, until - done))
                done = until
            if done == end:
                return parts
        raise AssertionError("the quotas of a class add up to its weight")


def _cut(span: Span, granule: tuple[int, ...], parts: list[tuple[int, int]], slack: int) -> list[tuple[int, Span]]:
    """A box handed out in storage order: to each (server, elements) its part, to the last what is left."""
    rest, given = [span], []
    for server, want in parts[:-1]:
        while rest and want > slack:
            head, tail = prefix(rest[0], granule, want=want, slack=slack) if size_of(rest[0]) > want else (rest[:1], [])
            given += [(server, box) for box in head]
            want = want - sum(map(size_of, head)) if not tail else 0
            rest[:1] = tail
    return given + [(parts[-1][0], box) for box in rest]


def _with_cuts(start: Ints, stop: Ints, server: Ints, cut: dict[int, list[tuple[int, Span]]]) -> Shares:
    """Uncut pieces with their servers, and in place of each cut piece its parts."""
    if not cut:
        return Shares(np.arange(len(server)), start, stop, server)
    whole = np.array([row for row in range(len(server)) if row not in cut], np.int64)
    parts = [(row, who, box) for row, boxes in cut.items() for who, box in boxes]
    piece = np.concatenate((whole, np.array([row for row, _, _ in parts], np.int64)))
    starts = np.concatenate((start[whole], np.array([box[0] for _, _, box in parts], np.int64)))
    stops = np.concatenate((stop[whole], np.array([box[1] for _, _, box in parts], np.int64)))
    servers = np.concatenate((server[whole], np.array([who for _, who, _ in parts], np.int64)))
    order = np.lexsort((*starts.T[::-1], piece))
    return Shares(piece[order], starts[order], stops[order], servers[order])
