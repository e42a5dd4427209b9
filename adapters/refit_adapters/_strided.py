"""Copies between strided views, as integers: chained over a storage in between, and cut into boxes of a tensor.

A copy is `size` steps in each of some dims, and each step's stride in the storage that is read and in the one that is
written. Two copies meet in a storage, the first writing it, the second reading it:

1. The strides of both in that storage, smallest first, are made digits: each must divide the next.
2. Each copy is then a range of every digit, or the chain isn't followed (`Unfollowed`).
3. The ranges' common part, with the strides of the first's source and the second's destination, is the chained copy.

>>> rows = Copy.between((6, 4), (0, (4, 1)), (0, (4, 1)))       # a (6, 4) tensor, copied
>>> right = Copy.between((6, 2), (2, (4, 1)), (0, (2, 1)))      # the right half of that copy, copied on
>>> chained(rows, right)
Copy(dims=((6, 4, 2), (2, 1, 1)), start=2, into=0)
>>> list(boxes(chained(rows, right), (6, 4)))
[(Box((0, 2), (6, 4)), 0, (2, 1))]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import Final

from attrs import frozen

from refit_sdk.box import Box

MOST_BOXES: Final = 1024
"""Into how many boxes one copy may be cut. A copy that takes more is not followed."""

Dim = tuple[int, int, int]
"""Steps, the stride of a step in what is read, and in what is written; in elements."""
Run = tuple[int, int, int]
"""A range of a digit: first, how many, and the stride in the other storage."""


class Unfollowed(Exception):
    """A copy that is no range of digits, or that takes too many boxes."""


@frozen
class Copy:
    """What is copied: from `start` in one storage to `into` in another, in elements. Dims with large steps come first.

    Dims of one step are left out, and neighbours that are one run in both storages are joined, so equal copies are ==.
    """

    dims: tuple[Dim, ...]
    start: int
    into: int

    @classmethod
    def between(
        cls, shape: Sequence[int], source: tuple[int, Sequence[int]], target: tuple[int, Sequence[int]]
    ) -> Copy:
        """The copy of a view onto another of the same shape; each view is its offset and its strides.

        >>> Copy.between((2, 3), (0, (3, 1)), (10, (3, 1)))
        Copy(dims=((6, 1, 1),), start=0, into=10)
        """
        return cls.of(zip(shape, source[1], target[1], strict=True), source[0], target[0])

    @classmethod
    def of(cls, dims: Iterable[Dim], start: int, into: int) -> Copy:
        """From dims in any order."""
        ordered = sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: (dim[2], dim[1]), reverse=True)
        joined: list[Dim] = []
        for size, read, write in ordered:
            if joined and joined[-1][1:] == (size * read, size * write):
                size *= joined.pop()[0]
            joined.append((size, read, write))
        return cls(tuple(joined), start, into)

    @property
    def size(self) -> int:
        """How many elements are written."""
        return prod(size for size, _, _ in self.dims)


def chained(first: Copy, second: Copy) -> Copy | None:
    """What `second` copies on of what `first` copied; None if that is nothing. `Unfollowed` if that can't be told."""
    strides = _digits([write for _, _, write in first.dims] + [read for _, read, _ in second.dims])
    written = _ranges([(size, write, read) for size, read, write in first.dims], first.into, strides)
    read = _ranges([(size, read, write) for size, read, write in second.dims], second.start, strides)
    dims, start, into = [], first.start, second.into
    for (low, count, back), (other, size, onward) in zip(written, read, strict=True):
        begin, end = max(low, other), min(low + count, other + size)
        if begin >= end:
            return None
        dims.append((end - begin, back, onward))
        start += (begin - low) * back
        into += (begin - other) * onward
    repeated = [(size, 0, write) for size, stride, write in second.dims if stride == 0]
    return Copy.of(dims + repeated, start, into)


def boxes(copy: Copy, shape: Sequence[int]) -> Iterator[tuple[Box, int, tuple[int, ...]]]:
    """A copy out of a contiguous tensor of this shape, as boxes of it: each with the offset and the strides of the view
    that is written. `Unfollowed` if it takes more than `MOST_BOXES`.
    """
    extents = [(dim, extent, prod(shape[dim + 1 :])) for dim, extent in enumerate(shape) if extent > 1]
    strides = _digits([stride for _, _, stride in extents] + [read for _, read, _ in copy.dims])
    ranges = _ranges([(size, read, write) for size, read, write in copy.dims], copy.start, strides)
    start, stop, steps = [0] * len(shape), [1] * len(shape), [1] * len(shape)
    loops: list[tuple[range, int, int, int]] = [
        (range(size), -1, 0, write) for size, read, write in copy.dims if read == 0
    ]
    for dim, extent, stride in extents:
        own = [at for at, each in enumerate(strides) if stride <= each < stride * extent]
        run, rest = _lowest_run([(strides[at] // stride, ranges[at]) for at in own])
        start[dim], stop[dim], steps[dim] = run[0], run[0] + run[1], run[2]
        loops += [(range(low, low + count), dim, unit, write) for unit, (low, count, write) in rest]
    if prod(len(values) for values, *_ in loops) > MOST_BOXES:
        raise Unfollowed(f"it takes more than {MOST_BOXES} boxes")
    yield from _repeated(start, stop, copy.into, tuple(steps), loops)


def _repeated(
    start: list[int], stop: list[int], into: int, steps: tuple[int, ...], loops: list[tuple[range, int, int, int]]
) -> Iterator[tuple[Box, int, tuple[int, ...]]]:
    """The box at each place of the digits that are no part of its runs."""
    if not loops:
        yield Box(start, stop), into, steps
        return
    for digits in product(*(values for values, *_ in loops)):
        low, high, at = list(start), list(stop), into
        for digit, (values, dim, unit, write) in zip(digits, loops, strict=True):
            at += (digit - values[0]) * write
            if dim >= 0:
                low[dim] += digit * unit
                high[dim] += digit * unit
        yield Box(low, high), at, steps


def _lowest_run(digits: list[tuple[int, Run]]) -> tuple[Run, list[tuple[int, Run]]]:
    """The longest run of a dim that its lowest digits make, and the digits left; each with the elements of a step."""
    (_, (low, count, write)), *higher = digits
    rest: list[tuple[int, Run]] = []
    for unit, (first, more, stride) in higher:
        if more == 1:
            low += first * unit
        elif not rest and low == 0 and count == unit and stride == write * unit:
            low, count = first * unit, more * unit
        else:
            rest.append((unit, (first, more, stride)))
    return (low, count, write or 1), rest


def _digits(strides: Iterable[int]) -> list[int]:
    found = sorted({1, *strides} - {0})
    for low, high in pairwise(found):
        if high % low:
            raise Unfollowed(f"strides {low} and {high} have no common digits")
    return found


def _ranges(dims: Iterable[Dim], offset: int, strides: list[int]) -> list[Run]:
    """A view as a range of each digit: first, how many, and the stride on the other side."""
    sizes = [high // low for low, high in pairwise(strides)]
    place = [offset // stride % size for stride, size in zip(strides, [*sizes, 1 << 62], strict=True)]
    runs: list[Run] = [(first, 1, 0) for first in place]
    for size, stride, other in dims:
        at = strides.index(stride) if stride else len(strides)
        while size > 1 and at < len(strides):
            room = sizes[at] if at < len(sizes) else 1 << 62
            taken = min(size, room)
            if runs[at][1] > 1 or place[at] + taken > room or size % taken:
                raise Unfollowed(f"{size} steps of {stride} from {offset} are no range of digits {strides}")
            runs[at] = (place[at], taken, other)
            size, other, at = size // taken, other * taken, at + 1
    return runs
