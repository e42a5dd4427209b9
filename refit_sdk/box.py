"""A box: a half-open region of a tensor, in absolute coordinates. Everything else is made of boxes.

>>> shard = Box((4, 0), (8, 16))
>>> shard.shape, shard.size
((4, 16), 64)
>>> shard.intersect(Box((6, 8), (10, 32)))
Box((6, 8), (8, 16))
>>> shard.intersect(Box((8, 0), (12, 16))) is None
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from operator import ge, index, le, lt

from attrs import field, frozen

from refit_sdk.errors import LayoutError


def coordinates(values: Iterable[int]) -> tuple[int, ...]:
    """Any run of integers as a tuple of plain ints; a converter for attrs fields. `LayoutError` for a fraction.

    >>> coordinates(range(3))
    (0, 1, 2)
    """
    run = tuple(values)
    try:
        return tuple(map(index, run))
    except TypeError:
        raise LayoutError(f"coordinates and extents are whole numbers, got {run}") from None


@frozen(repr=False, order=True)
class Box:
    """The elements `start <= x < stop` of a tensor, dim by dim. A 0-D box is one scalar.

    Coordinates are those of the whole tensor, never of a shard. A box may be empty (`start == stop` in
    some dim). `LayoutError` if the two corners don't make a box.
    """

    start: tuple[int, ...] = field(converter=coordinates)
    stop: tuple[int, ...] = field(converter=coordinates)

    def __attrs_post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(f"a box needs as many starts as stops, got start={self.start} and stop={self.stop}")
        if not all(map(le, self.start, self.stop)) or (self.start and min(self.start) < 0):
            raise LayoutError(f"a box needs 0 <= start <= stop in every dim, got start={self.start}, stop={self.stop}")

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The box of a whole tensor of this shape.

        >>> Box.whole((2, 3))
        Box((0, 0), (2, 3))
        """
        extents = coordinates(shape)
        return cls((0,) * len(extents), extents)

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"

    def __str__(self) -> str:
        """The box as an index, as NumPy and torch write it.

        >>> str(Box((4, 0), (8, 16))), str(Box((), ()))
        ('[4:8, 0:16]', '[]')
        """
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"

    @property
    def ndim(self) -> int:
        """How many dims the box has."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent in each dim, in elements."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """How many elements the box has."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether the box has no element."""
        return any(a == b for a, b in zip(self.start, self.stop, strict=True))

    def _same_dims(self, other: Box) -> None:
        if self.ndim != other.ndim:
            raise LayoutError(
                f"boxes of different dims don't compare: {self} has {self.ndim}, {other} has {other.ndim}"
            )

    def _has_dim(self, dim: int) -> None:
        if not 0 <= dim < self.ndim:
            raise LayoutError(f"{self} has {self.ndim} dims, counted from 0, and no dim {dim}")

    def intersect(self, other: Box) -> Box | None:
        """The elements that both boxes have, or None if there are none."""
        self._same_dims(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box.

        >>> Box((0,), (4,)).contains(Box((1,), (4,)))
        True
        """
        self._same_dims(other)
        return other.is_empty or (all(map(le, self.start, other.start)) and all(map(ge, self.stop, other.stop)))

    def translate(self, offset: Iterable[int]) -> Box:
        """The box moved by `offset`, one number a dim.

        >>> Box((4, 0), (8, 16)).translate((-4, 2))
        Box((0, 2), (4, 18))
        """
        by = tuple(offset)
        if len(by) != self.ndim:
            raise LayoutError(f"{self} has {self.ndim} dims and can't move by {by}; give one number a dim")
        return Box(
            (a + d for a, d in zip(self.start, by, strict=True)),
            (b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def relative_to(self, outer: Box) -> Box:
        """The box in the coordinates of a shard that holds `outer`.

        >>> Box((6, 8), (8, 16)).relative_to(Box((4, 0), (8, 16)))
        Box((2, 8), (4, 16))
        """
        return self.translate(-a for a in outer.start)

    def narrow(self, dim: int, start: int, stop: int) -> Box:
        """The box cut to `start:stop` (absolute) in one dim.

        >>> Box((4, 0), (8, 16)).narrow(1, 8, 12)
        Box((4, 8), (8, 12))
        """
        self._has_dim(dim)
        if not self.start[dim] <= start <= stop <= self.stop[dim]:
            raise LayoutError(f"{start}:{stop} doesn't lie in {self.start[dim]}:{self.stop[dim]}, dim {dim} of {self}")
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole tensor.

        >>> Box((6, 8), (8, 16)).slices()
        (slice(6, 8, None), slice(8, 16, None))
        """
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def concat(self, inner: Box) -> Box:
        """This box's dims followed by `inner`'s: a range of members and a region of each make a region of the family.

        >>> Box((3,), (61,)).concat(Box((0, 0), (8, 16)))
        Box((3, 0, 0), (61, 8, 16))
        """
        return Box(self.start + inner.start, self.stop + inner.stop)

    def split_dims(self, count: int) -> tuple[Box, Box]:
        """The undoing of `concat`: the first `count` dims, and the rest.

        >>> Box((3, 0, 0), (61, 8, 16)).split_dims(1)
        (Box((3,), (61,)), Box((0, 0), (8, 16)))
        """
        if not 0 <= count <= self.ndim:
            raise LayoutError(f"{self} has {self.ndim} dims and can't be split after {count} of them")
        return Box(self.start[:count], self.stop[:count]), Box(self.start[count:], self.stop[count:])

    def is_aligned(self, granule: Iterable[int], *, shape: Iterable[int]) -> bool:
        """Whether the box is whole granules of a tensor of this shape; the last granule of a dim may be short.

        >>> Box((4, 0), (6, 3)).is_aligned((4, 1), shape=(6, 9)), Box((4, 0), (6, 3)).is_aligned((4, 1), shape=(8, 9))
        (True, False)
        """
        whole = zip(self.start, self.stop, coordinates(granule), coordinates(shape), strict=True)
        return all(a % unit == 0 and (b % unit == 0 or b == extent) for a, b, unit, extent in whole)

    def cut(self, *, limit: int, granule: Iterable[int] | None = None) -> Iterator[Box]:
        """The box in pieces of at most `limit` elements, row-major, cut only at absolute multiples of `granule`.

        The first dims are cut first, so that each piece is as near to one run of memory as can be. `LayoutError` if a
        single granule has more elements than `limit`.

        >>> list(Box((2, 0), (9, 4)).cut(limit=12, granule=(2, 1)))
        [Box((2, 0), (4, 4)), Box((4, 0), (6, 4)), Box((6, 0), (8, 4)), Box((8, 0), (9, 4))]
        """
        units = (1,) * self.ndim if granule is None else coordinates(granule)
        if len(units) != self.ndim or any(unit < 1 for unit in units):
            raise LayoutError(f"a granule has one number >= 1 a dim, got {units} for {self}")
        return self._cut(0, limit, units)

    def _cut(self, dim: int, limit: int, units: tuple[int, ...]) -> Iterator[Box]:
        if self.size <= limit:
            yield self
            return
        if dim == self.ndim:
            raise LayoutError(f"{self} is one granule of {units} with {self.size} elements, more than {limit}")
        first, last, unit = self.start[dim], self.stop[dim], units[dim]
        row = self.size // (last - first)
        step = max(1, limit // row // unit) * unit
        while first < last:
            upper = min(last, (first // unit) * unit + step)
            yield from self.narrow(dim, first, upper)._cut(dim + 1, limit, units)
            first = upper

    def points(self) -> Iterator[tuple[int, ...]]:
        """Every coordinate of the box, last dim fastest.

        >>> list(Box((1, 4), (3, 6)).points())
        [(1, 4), (1, 5), (2, 4), (2, 5)]
        """
        if not self.ndim:
            yield ()
            return
        head, tail = self.split_dims(1)
        for first in range(head.start[0], head.stop[0]):
            for rest in tail.points():
                yield (first, *rest)
