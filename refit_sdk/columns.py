"""Members as columns of small numbers, the way they travel, and what must hold of them when they arrive.

1. Boxes are in order. For each dim there are two columns: where boxes start, and how long they are.
2. A start is counted from the box before, as long as the two start alike in all earlier dims: in the last dim from
   where that box stops, in others from where it starts. Else it's the number itself. So the numbers of disjoint boxes
   are small, never negative, and alike from rank to rank: they compress.

>>> members = Members([Box((3, 4), (4, 6)), Box((3, 9), (4, 10)), Box((5, 2), (6, 3))])
>>> pack(members)
((3, 0, 2), (1, 1, 1), (4, 3, 2), (2, 1, 1))
>>> unpack(pack(members), dims=2) == members
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.overlap import Boxes, meet, pairs, spread, volume
from refit_sdk.tensor import Members
from refit_sdk.transport import Ints

Columns = tuple[tuple[int, ...], ...]

MAX_MEMBERS: Final = 1 << 40
"""How many tensors a family can have."""

_MAX_NUMBER: Final = 1 << 62
_MAX_LINES: Final = 1 << 20
_Mask = npt.NDArray[np.bool_]


def pack(members: Members) -> Columns:
    """Members as columns; none at all for those of a name without numbers."""
    return tuple(tuple(column.tolist()) for column in _columns(members))


def _columns(members: Members) -> Iterator[Ints]:
    start, size = members.start, members.stop - members.start
    for dim, alike in enumerate(_alike(start)):
        before = start[:-1, dim] + (size[:-1, dim] if dim == start.shape[1] - 1 else 0)
        column = start[:, dim].copy()
        column[1:] -= np.where(alike[1:], before, 0)
        yield from (column, size[:, dim])


def _alike(start: Ints) -> Iterator[_Mask]:
    """For each dim, whether each box starts like the one before it in all earlier dims."""
    alike = np.arange(len(start)) > 0
    for dim in range(start.shape[1]):
        yield alike
        alike = alike.copy()
        alike[1:] &= start[1:, dim] == start[:-1, dim]


def unpack(columns: Sequence[Sequence[int]], *, dims: int) -> Members:
    """The members that `pack` made columns of. `LayoutError` if these are no such columns."""
    if len(columns) != 2 * dims or len({len(column) for column in columns}) > 1:
        raise LayoutError(
            f"members of {dims} dims need {2 * dims} columns of one length, not {list(map(len, columns))}"
        )
    if sum(map(sum, columns)) > _MAX_NUMBER:
        raise LayoutError("members have numbers of more than 62 bits")
    if not dims:
        return Members([Box((), ())])
    steps, sizes = (np.array(columns[which::2], np.int64).T for which in (0, 1))
    starts = np.zeros_like(steps)
    for dim, alike in enumerate(_alike(starts)):
        starts[:, dim] = _sums(steps[:, dim], sizes[:, dim] if dim == dims - 1 else 0 * sizes[:, dim], alike)
    return Members.of(starts, starts + sizes)


def _sums(steps: Ints, sizes: Ints, alike: _Mask) -> Ints:
    """Starts of a dim: each is a step from the box before, or begins anew where that one isn't alike."""
    steps = steps.copy()
    steps[1:] += np.where(alike[1:], sizes[:-1], 0)
    total = np.cumsum(steps)
    anew = np.flatnonzero(~alike)
    begun: Ints = total[anew] - steps[anew]
    found: Ints = total - begun[np.cumsum(~alike) - 1]
    return found


def count(members: Members) -> int:
    """How many tensors these are. More than `MAX_MEMBERS` are counted as one more than that.

    >>> count(Members([Box((0, 0), (1 << 40, 1 << 40))])) - MAX_MEMBERS
    1
    """
    sizes = members.stop - members.start
    if np.prod(sizes, axis=1, dtype=np.float64).sum() > MAX_MEMBERS:
        return MAX_MEMBERS + 1
    return int(np.prod(sizes, axis=1, dtype=np.int64).sum())


def are_distinct(several: Iterable[Members]) -> bool:
    """Whether no tensor is among these twice.

    >>> one, other = Members([Box((0,), (4,))]), Members([Box((2,), (3,)), Box((8,), (9,))])
    >>> are_distinct([one]), are_distinct([one, other])
    (True, False)
    """
    listed = list(several)
    if sum(map(len, listed)) < 2:
        return True
    boxes = _boxes(listed)
    lines = _lines(boxes, boxes.stop.max(axis=0))
    if lines is not None:
        return bool((lines[1][:-1] <= lines[0][1:]).all())
    first, second = pairs(boxes, boxes)
    return bool((first == second).all())


def are_among(members: Members, others: Members) -> bool:
    """Whether all of these tensors are among those, where each of those is there once.

    >>> are_among(Members([Box((1,), (6,))]), Members([Box((0,), (4,)), Box((4,), (8,))]))
    True
    """
    if members == others:
        return True
    if not len(members) or not len(others):
        return not len(members)
    a, b = _boxes([members]), _boxes([others])
    extents = np.maximum(a.stop.max(axis=0), b.stop.max(axis=0))
    lines, around = _lines(a, extents), _lines(b, extents)
    if lines is None or around is None:
        return int(volume(*meet(a, b, pairs(a, b))).sum()) == count(members)
    begins = np.append(True, around[0][1:] != around[1][:-1])
    ends = around[1][np.append(np.flatnonzero(begins)[1:], len(begins)) - 1]
    which = np.searchsorted(around[0][begins], lines[0], side="right") - 1
    return bool((which >= 0).all() and (lines[1] <= ends[which]).all())


def _lines(boxes: Boxes, extents: Ints) -> tuple[Ints, Ints] | None:
    """The boxes as intervals of one line on which all numbers lie, in order; None if that takes too many."""
    size = boxes.stop - boxes.start
    many = size[:, :-1].prod(axis=1, dtype=np.float64).sum() > _MAX_LINES
    if not len(extents) or many or extents.prod(dtype=np.float64) >= _MAX_NUMBER:
        return None
    steps = np.append(np.cumprod(extents[:0:-1])[::-1], 1)
    row, nth = spread(size[:, :-1].prod(axis=1))
    begin = (boxes.start @ steps)[row]
    for dim in reversed(range(len(extents) - 1)):
        begin += nth % size[row, dim] * steps[dim]
        nth = nth // size[row, dim]
    order = np.argsort(begin)
    return begin[order], (begin + size[row, -1])[order]


def _boxes(several: Sequence[Members]) -> Boxes:
    start = np.concatenate([members.start for members in several])
    return Boxes(np.zeros(len(start), np.int64), start, np.concatenate([members.stop for members in several]))
