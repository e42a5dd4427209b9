"""Cutting boxes: by member, then by rows, and so on inwards, only at multiples of the granule.

A box starts on its granules and ends on one or at the tensor's edge; so do all cuts of it.

1. Take the outermost dim in which the box spans more than one granule. A granule's thickness of the box is a *slab*.
2. If slabs fit the limit, cut into the fewest near-equal runs of slabs that do; else cut into single slabs.
3. Cut each single slab that is still too large in the next dim.
"""

from __future__ import annotations

from math import prod

import numpy as np

from refit_sdk.overlap import spread, volume
from refit_sdk.transport import Ints


def split(
    start: Ints, stop: Ints, granule: Ints, *, stacked: Ints, limit: Ints, members: Ints
) -> tuple[Ints, Ints, Ints]:
    """Cut boxes (n, dims) so that each has at most `limit` elements and `members` members: (parent, start, stop).

    `stacked` (n,) is how many leading dims count members. A single granule may still be larger than its limit. Parts
    of a box are in order.

    >>> ones = np.ones((1, 2), np.int64)
    >>> parent, start, stop = split(ones * 0, np.array([[3, 10]]), ones, stacked=np.array([1]),
    ...                             limit=np.array([6]), members=np.array([9]))
    >>> start.tolist(), stop.tolist()
    ([[0, 0], [0, 5], [1, 0], [1, 5], [2, 0], [2, 5]], [[1, 5], [1, 10], [2, 5], [2, 10], [3, 5], [3, 10]])
    """
    parent = np.arange(len(start))
    for dim in range(start.shape[1]):
        parts, slabs = _parts(start, stop, granule, dim, stacked, limit, members)
        if np.all(parts == 1):
            continue
        row, nth = spread(parts)
        size, extra = np.divmod(slabs, parts)
        begin = (nth * size[row] + np.minimum(nth, extra[row])) * granule[row, dim]
        end = ((nth + 1) * size[row] + np.minimum(nth + 1, extra[row])) * granule[row, dim]
        origin, edge = start[row, dim], stop[row, dim]
        start, stop = start[row], stop[row]
        start[:, dim], stop[:, dim] = origin + begin, np.minimum(origin + end, edge)
        parent, granule, stacked, limit, members = parent[row], granule[row], stacked[row], limit[row], members[row]
    return parent, start, stop


def _parts(
    start: Ints, stop: Ints, granule: Ints, dim: int, stacked: Ints, limit: Ints, members: Ints
) -> tuple[Ints, Ints]:
    """Into how many runs of slabs each box is cut in this dim, and how many slabs it has."""
    extent = stop[:, dim] - start[:, dim]
    slabs = -(-extent // granule[:, dim])
    size = volume(start, stop)
    slab = size // extent * np.minimum(granule[:, dim], extent)
    count = num_members(start, stop, stacked)
    counted = dim < stacked
    run = np.minimum(limit // slab, np.where(counted, members // np.where(counted, count // extent, 1), slabs))
    run = np.clip(run, 1, slabs)
    too_large = (size > limit) | (counted & (count > members))
    return np.where(too_large, -(-slabs // run), 1), slabs


def num_members(start: Ints, stop: Ints, stacked: Ints) -> Ints:
    """How many members each box spans, shape (n,)."""
    extent = np.where(np.arange(start.shape[1]) < stacked[:, None], stop - start, 1)
    product: Ints = np.prod(extent, axis=1, dtype=np.int64)
    return product


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""A box as plain (start, stop)."""


def prefix(box: Span, granule: tuple[int, ...], *, want: int, slack: int) -> tuple[list[Span], list[Span]]:
    """The first `want` elements of a box and the rest, slab by slab, as few boxes; off by at most about `slack`.

    >>> prefix(((0, 0), (4, 10)), (1, 1), want=25, slack=0)
    ([((0, 0), (2, 10)), ((2, 0), (3, 5))], [((2, 5), (3, 10)), ((3, 0), (4, 10))])
    >>> prefix(((0, 0), (4, 10)), (2, 10), want=25, slack=0)
    ([((0, 0), (2, 10))], [((2, 0), (4, 10))])
    """
    head: list[Span] = []
    tail: list[Span] = []
    for dim, step in enumerate(granule):
        low, high = box[0][dim], box[1][dim]
        slab = size_of(box) // (high - low) * step
        whole, rest = divmod(want, slab)
        deepest = dim == len(granule) - 1
        if rest <= slack or (deepest and 2 * rest <= slab):
            first, last = _two(box, dim, low + whole * step)
            return head + first, last + tail
        first, after = _two(box, dim, low + whole * step)
        between, last = _two(after[0], dim, low + (whole + 1) * step)
        if slab - rest <= slack or deepest:
            return head + _two(box, dim, low + (whole + 1) * step)[0], last + tail
        head, tail, box, want = head + first, last + tail, between[0], rest
    raise AssertionError("the deepest dim always ends the cut")


def size_of(box: Span) -> int:
    """Elements of a box."""
    return prod(b - a for a, b in zip(*box, strict=True))


def _two(box: Span, dim: int, at: int) -> tuple[list[Span], list[Span]]:
    """A box cut at a place of a dim: what is before and what is after; either may be nothing."""
    start, stop = box
    if at <= start[dim]:
        return [], [box]
    if at >= stop[dim]:
        return [box], []
    lower = (start, (*stop[:dim], at, *stop[dim + 1 :]))
    upper = ((*start[:dim], at, *start[dim + 1 :]), stop)
    return [lower], [upper]
