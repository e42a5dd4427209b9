"""What one axis of a mesh does to a tensor: cut a dim, cut it in strides, or nothing. DTensor's words and arithmetic.

A placement says which positions of a dim of extent n the part `index` of `num_parts` keeps, as runs `(start, stop)` in
the order in which they're stored:

1. `Shard` cuts like torch.chunk: parts of ceil(n / num_parts), the last ones shorter or empty.
2. `StridedShard` first cuts the dim into `split_factor` pieces, then each piece into `num_parts`, and keeps part
   `index` of every piece. That's what is left when the axes to its right cut first (FSDP over tensor-parallel shards).
3. `Replicate` keeps everything.

>>> Shard(0).runs(10, num_parts=4, index=3)
((9, 10),)
>>> StridedShard(0, split_factor=2).runs(6, num_parts=2, index=0)
((0, 2), (3, 5))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from attrs import field, frozen

from refit_sdk.errors import LayoutError

Runs = tuple[tuple[int, int], ...]
"""Ranges of positions in storage order: none is empty, and no two neighbours could be one."""


def chunk(extent: int, *, num_parts: int, index: int) -> tuple[int, int]:
    """The range of part `index` when torch.chunk cuts `extent` into `num_parts`; the last parts may be empty.

    >>> [chunk(5, num_parts=4, index=i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-extent // num_parts)
    return min(extent, step * index), min(extent, step * (index + 1))


def join(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same positions in the same order, in as few runs as possible.

    >>> join([(4, 6), (6, 8), (3, 3), (0, 2)])
    ((4, 8), (0, 2))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return tuple(joined)


def select(runs: Runs, kept: Runs) -> Runs:
    """What a second cut leaves of a first: `kept` counts positions along `runs`, laid end to end.

    >>> select(((0, 3), (6, 9)), ((2, 5),))
    ((2, 3), (6, 8))
    """
    ends = list(accumulate(stop - start for start, stop in runs))
    taken = []
    for low, high in kept:
        number = bisect_right(ends, low)
        while low < high:
            shift = runs[number][1] - ends[number]
            upper = min(high, ends[number])
            taken.append((low + shift, upper + shift))
            low, number = upper, number + 1
    return join(taken)


def _from_front(instance: object, attribute: object, dim: int) -> None:
    if dim < 0:
        raise LayoutError(f"a placement counts dims from 0 at the front, got dim {dim}; add the tensor's ndim to it")


@frozen
class Replicate:
    """Every part holds the whole.

    >>> Replicate().runs(10, num_parts=4, index=3)
    ((0, 10),)
    """

    def runs(self, extent: int, *, num_parts: int, index: int) -> Runs:
        """The positions that part `index` keeps: all of them."""
        return join([(0, extent)])


@frozen
class Shard:
    """The axis cuts `dim` by torch.chunk's rule.

    >>> [Shard(0).runs(5, num_parts=4, index=i) for i in range(4)]
    [((0, 2),), ((2, 4),), ((4, 5),), ()]
    """

    dim: int = field(validator=_from_front)

    def runs(self, extent: int, *, num_parts: int, index: int) -> Runs:
        """The positions that part `index` keeps: one run, or none."""
        return join([chunk(extent, num_parts=num_parts, index=index)])


@frozen
class StridedShard:
    """The axis cuts each of `split_factor` pieces of `dim`, as DTensor's `_StridedShard` does.

    >>> [StridedShard(0, split_factor=2).runs(9, num_parts=4, index=i) for i in (0, 3)]
    [((0, 2), (5, 6)), ((8, 9),)]
    """

    dim: int = field(validator=_from_front)
    split_factor: int

    def __attrs_post_init__(self) -> None:
        if self.split_factor < 1:
            raise LayoutError(f"a strided shard needs split_factor >= 1, got {self.split_factor} for dim {self.dim}")

    def runs(self, extent: int, *, num_parts: int, index: int) -> Runs:
        """The positions that part `index` keeps: at most one run a piece."""
        kept = []
        for number in range(min(self.split_factor, extent)):
            low, high = chunk(extent, num_parts=self.split_factor, index=number)
            start, stop = chunk(high - low, num_parts=num_parts, index=index)
            kept.append((low + start, low + stop))
        return join(kept)


Placement = Shard | StridedShard | Replicate
"""What a layout has one of for each axis of its mesh."""
