"""Boxes in arrays: which of them meet, and what is left of one when others are taken away.

The planner compares thousands of boxes at once, so here a box is a row of two integer arrays, in a *group* (a family,
or a family at an engine); boxes of different groups never meet. Tensors of fewer dims are padded with `0:1` at the end.

How pairs are found (`pairs`):

1. For each group, count for every dim how many pairs of intervals meet in that dim, by binary search; take the best
   dim.
2. In that dim, list the pairs that meet: every b that starts inside an a, and every a that starts inside a b.
3. Keep those that meet in the other dims too.

How overlapping boxes become disjoint ones (`atoms`): boxes that meet no other stay; each cluster of the rest is cut in
two at a boundary of one of its boxes, again and again, until every box covers the cell it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import numpy as np
from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.transport import Ints

BLOCK: Final = 1 << 21
"""How many pairs that meet in one dim are looked at together."""


@frozen(eq=False)
class Boxes:
    """Boxes as arrays: `group` (n,), `start` and `stop` (n, dims). None is empty.

    >>> Boxes.of([(0, Box((4, 0), (8, 16)))], dims=2).volume.tolist()
    [64]
    """

    group: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Box]], *, dims: int) -> Boxes:
        """From (group, box) pairs, padded to `dims` dims."""
        listed = list(rows)
        return cls(
            np.array([group for group, _ in listed], np.int64),
            pad([box.start for _, box in listed], dims, 0),
            pad([box.stop for _, box in listed], dims, 1),
        )

    def __len__(self) -> int:
        return len(self.group)

    def take(self, index: Ints) -> Boxes:
        """The rows of an index array, in its order."""
        return Boxes(self.group[index], self.start[index], self.stop[index])

    def regroup(self, group: Ints) -> Boxes:
        """The same boxes in other groups."""
        return Boxes(group, self.start, self.stop)

    @property
    def volume(self) -> Ints:
        """Elements of each box, shape (n,)."""
        return volume(self.start, self.stop)

    def box(self, row: int, ndim: int) -> Box:
        """One row as a `Box` of its own first `ndim` dims."""
        return Box(self.start[row, :ndim].tolist(), self.stop[row, :ndim].tolist())


def pad(rows: list[tuple[int, ...]], dims: int, value: int) -> Ints:
    """Coordinate tuples of at most `dims` numbers as an array (n, dims), filled up with `value`."""
    tails = [(value,) * (dims - count) for count in range(dims + 1)]
    return np.array([row + tails[len(row)] for row in rows], np.int64).reshape(len(rows), dims)


def volume(start: Ints, stop: Ints) -> Ints:
    """Elements of each box, shape (n,)."""
    product: Ints = np.prod(stop - start, axis=1, dtype=np.int64)
    return product


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Each row `counts[i]` times: (which row, which of its repetitions).

    >>> [part.tolist() for part in spread(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def pairs(a: Boxes, b: Boxes) -> tuple[Ints, Ints]:
    """Rows of `a` and of `b` that meet, as two index arrays in ascending order of (row of a, row of b).

    >>> left = Boxes.of([(0, Box((0,), (4,))), (0, Box((4,), (8,)))], dims=1)
    >>> right = Boxes.of([(0, Box((2,), (6,))), (1, Box((0,), (8,)))], dims=1)
    >>> [rows.tolist() for rows in pairs(left, right)]
    [[0, 1], [0, 0]]
    """
    if not len(a) or not len(b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not a.start.shape[1]:
        return pairs(_as_one_dim(a), _as_one_dim(b))
    a_start, a_stop, b_start, b_stop = _best_keys(a, b)
    inside = _starts_between(b_start, a_start, a_stop, side="left")
    around = ((first, second) for second, first in _starts_between(a_start, b_start, b_stop, side="right"))
    found = [_meeting(a, b, first, second) for first, second in chain(inside, around)]
    first, second = (np.concatenate(rows) for rows in zip(*found, strict=True))
    order = np.lexsort((second, first))
    return first[order], second[order]


def _meeting(a: Boxes, b: Boxes, first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Those of the pairs that meet in every dim."""
    for dim in range(a.start.shape[1]):
        meet = (a.start[first, dim] < b.stop[second, dim]) & (b.start[second, dim] < a.stop[first, dim])
        first, second = first[meet], second[meet]
    return first, second


def _as_one_dim(boxes: Boxes) -> Boxes:
    """Scalars as boxes of one element."""
    ones = np.ones((len(boxes), 1), np.int64)
    return Boxes(boxes.group, 0 * ones, ones)


def _starts_between(starts: Ints, low: Ints, high: Ints, *, side: str) -> Iterator[tuple[Ints, Ints]]:
    """(row of low/high, row of starts) where the start lies in `low:high`; with side "right", not at `low` itself.

    They come a block at a time: what meets in one dim can be a hundred times what meets in all.
    """
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    begin = np.searchsorted(ordered, low, side="right" if side == "right" else "left")
    end = np.searchsorted(ordered, high, side="left")
    counts = np.maximum(end - begin, 0)
    block = np.cumsum(counts) // BLOCK
    for rows in np.split(np.arange(len(low)), np.flatnonzero(np.diff(block)) + 1):
        which, nth = spread(counts[rows])
        yield rows[which], order[begin[rows[which]] + nth]


def _best_keys(a: Boxes, b: Boxes) -> tuple[Ints, Ints, Ints, Ints]:
    """Starts and stops in the most selective dim of each group, as keys that never mix groups."""
    groups = 1 + int(max(a.group.max(), b.group.max()))
    span = 2 * (len(a) + len(b))
    keys = [_keys(a, b, dim, span) for dim in range(a.start.shape[1])]
    counts = np.stack([_count(a.group, groups, *key) for key in keys])
    best = np.argmin(counts, axis=0)
    dim_a, dim_b = best[a.group], best[b.group]
    return (
        np.choose(dim_a, [key[0] for key in keys]),
        np.choose(dim_a, [key[1] for key in keys]),
        np.choose(dim_b, [key[2] for key in keys]),
        np.choose(dim_b, [key[3] for key in keys]),
    )


def _keys(a: Boxes, b: Boxes, dim: int, span: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Coordinates of one dim by rank (of which there are at most `span`), so that group and rank fit one 64-bit key."""
    columns = (a.start[:, dim], a.stop[:, dim], b.start[:, dim], b.stop[:, dim])
    _, rank = np.unique(np.concatenate(columns), return_inverse=True)
    ranks = np.split(rank.reshape(-1), np.cumsum([len(column) for column in columns])[:-1])
    a_start, a_stop, b_start, b_stop = ranks
    group_a, group_b = a.group * span, b.group * span
    return group_a + a_start, group_a + a_stop, group_b + b_start, group_b + b_stop


def _count(group: Ints, groups: int, a_start: Ints, a_stop: Ints, b_start: Ints, b_stop: Ints) -> Ints:
    """Pairs that meet in one dim, by group: those that start before a's stop, less those that stop by a's start."""
    before = np.searchsorted(np.sort(b_start), a_stop, side="left")
    over = np.searchsorted(np.sort(b_stop), a_start, side="right")
    return np.bincount(group, weights=before - over, minlength=groups).astype(np.int64)


def meet(a: Boxes, b: Boxes, rows: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The intersections of pairs found by `pairs`: start and stop, each (pairs, dims)."""
    first, second = rows
    return np.maximum(a.start[first], b.start[second]), np.minimum(a.stop[first], b.stop[second])


def atoms(boxes: Boxes) -> tuple[Boxes, Ints, Ints]:
    """Disjoint boxes that cover the same elements, and which boxes cover each: (atoms, atom of pair, box of pair).

    `boxes` are pairwise different in a group. Pairs are in order of (atom, box).

    >>> rows = Boxes.of([(0, Box((0,), (4,))), (0, Box((3,), (6,)))], dims=1)
    >>> found, atom, box = atoms(rows)
    >>> [str(found.box(i, 1)) for i in range(3)], atom.tolist(), box.tolist()
    (['[0:3]', '[3:4]', '[4:6]'], [0, 1, 1, 2], [0, 0, 1, 1])
    """
    first, second = pairs(boxes, boxes)
    crossing = first != second
    if not crossing.any():
        every = np.arange(len(boxes))
        return boxes, every, every
    label = _clusters(len(boxes), first[crossing], second[crossing])
    alone = np.bincount(label, minlength=len(boxes))[label] == 1
    clustered = np.flatnonzero(~alone)
    order = clustered[np.argsort(label[clustered], kind="stable")]
    cells: list[tuple[Ints, Ints, Ints]] = []
    alike: dict[tuple[bytes, bytes], list[tuple[Ints, Ints, Ints]]] = {}
    for rows in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        cells.extend(_refined(boxes, rows, alike))
    return _collect(boxes, np.flatnonzero(alone), cells)


def _clusters(count: int, first: Ints, second: Ints) -> Ints:
    """The smallest row that each row is connected to."""
    label = np.arange(count)
    while True:
        after = label.copy()
        np.minimum.at(after, first, label[second])
        after = after[after]
        if np.array_equal(after, label):
            return label
        label = after


def _refined(
    boxes: Boxes, rows: Ints, alike: dict[tuple[bytes, bytes], list[tuple[Ints, Ints, Ints]]]
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Cells of one cluster. Most clusters are another moved elsewhere, and are cut like that one."""
    start, stop = boxes.start[rows], boxes.stop[rows]
    origin = start.min(axis=0)
    start, stop = start - origin, stop - origin
    key = (start.tobytes(), stop.tobytes())
    if key not in alike:
        moved = Boxes(np.zeros(len(rows), np.int64), start, stop)
        alike[key] = list(_refine(moved, np.arange(len(rows))))
    return ((low + origin, high + origin, rows[inside]) for low, high, inside in alike[key])


def _refine(boxes: Boxes, rows: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Cells (start, stop, the boxes that cover it) of one cluster."""
    open_cells = [(boxes.start[rows].min(axis=0), boxes.stop[rows].max(axis=0), rows)]
    while open_cells:
        low, high, inside = open_cells.pop()
        start, stop = np.maximum(boxes.start[inside], low), np.minimum(boxes.stop[inside], high)
        present = np.all(start < stop, axis=1)
        inside, start, stop = inside[present], start[present], stop[present]
        if not len(inside):
            continue
        low, high = start.min(axis=0), stop.max(axis=0)
        if np.all(start == low) and np.all(stop == high):
            yield low, high, inside
        else:
            open_cells.extend((*half, inside) for half in _halves(low, high, start, stop))


def _halves(low: Ints, high: Ints, start: Ints, stop: Ints) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """The cell `low:high` cut at the middle one of its boxes' boundaries, in the first dim that has any inside."""
    for dim in range(len(low)):
        bounds = np.unique(np.concatenate((start[:, dim], stop[:, dim])))
        bounds = bounds[(bounds > low[dim]) & (bounds < high[dim])]
        if len(bounds):
            middle, upper = high.copy(), low.copy()
            middle[dim] = upper[dim] = bounds[len(bounds) // 2]
            return (low, middle), (upper, high)
    raise AssertionError("boxes that differ have a boundary inside the cell")


def _collect(boxes: Boxes, alone: Ints, cells: list[tuple[Ints, Ints, Ints]]) -> tuple[Boxes, Ints, Ints]:
    """The boxes that meet no other, and the cells of those that do, in order."""
    lows, highs, covers = (list(column) for column in zip(*cells, strict=True))
    box = np.concatenate((alone, *covers))
    cell = np.repeat(np.arange(len(alone) + len(cells)), [1] * len(alone) + [len(rows) for rows in covers])
    group = boxes.group[np.concatenate((alone, [rows[0] for rows in covers]))]
    start = np.concatenate((boxes.start[alone], np.stack(lows)))
    found = Boxes(group, start, np.concatenate((boxes.stop[alone], np.stack(highs))))
    order = canonical(found)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    pairs_in_order = np.lexsort((box, place[cell]))
    return found.take(order), place[cell][pairs_in_order], box[pairs_in_order]


def canonical(boxes: Boxes) -> Ints:
    """The order of (group, start, stop), as an index array."""
    columns = (*boxes.stop.T[::-1], *boxes.start.T[::-1], boxes.group)
    return np.lexsort([column for column in columns if len(column) and (column != column[0]).any()] or [boxes.group])


def disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes with the same elements, in order.

    >>> disjoint([Box((0,), (4,)), Box((2,), (6,)), Box((0,), (4,))])
    (Box((0,), (2,)), Box((2,), (4,)), Box((4,), (6,)))
    """
    unique = sorted(set(boxes))
    if len(unique) < 2:
        return tuple(unique)
    ndim = unique[0].ndim
    found = atoms(Boxes.of(((0, box) for box in unique), dims=ndim))[0]
    return tuple(map(Box, found.start.tolist(), found.stop.tolist()))


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """Disjoint boxes of the elements that `box` has and none of `others`.

    >>> subtract(Box((0, 0), (4, 4)), [Box((1, 0), (2, 4)), Box((2, 0), (9, 2))])
    [Box((0, 0), (1, 4)), Box((2, 2), (4, 4))]
    """
    left = [box]
    for other in others:
        left = [rest for piece in left for rest in _without(piece, other)]
    return sorted(left)


def _without(box: Box, other: Box) -> Iterator[Box]:
    shared = box.intersect(other)
    if shared is None:
        yield box
        return
    for dim in range(box.ndim):
        if box.start[dim] < shared.start[dim]:
            yield box.narrow(dim, box.start[dim], shared.start[dim])
        if shared.stop[dim] < box.stop[dim]:
            yield box.narrow(dim, shared.stop[dim], box.stop[dim])
        box = box.narrow(dim, shared.start[dim], shared.stop[dim])
