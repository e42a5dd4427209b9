"""A mesh: ranks laid out on named axes, as PyTorch's DeviceMesh does. The compact way to say who cuts a tensor.

1. The ranks are given nested (a DeviceMesh's own `mesh` tensor will do) or flat with a shape; they're kept flat, in
   row-major order, with one extent and one name an axis. Any list of distinct ranks will do, in any order.
2. A rank's coordinate is its position in that order, unravelled over the shape.

>>> mesh = Mesh([[0, 1, 2, 3], [4, 5, 6, 7]], axes=("dp", "tp"))
>>> mesh.shape, mesh.coordinate(6)
((2, 4), (1, 2))
>>> mesh == Mesh(range(8), shape=(2, 4), axes=("dp", "tp"))
True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any

from attrs import frozen

from refit_sdk.box import coordinates
from refit_sdk.errors import LayoutError


@frozen(init=False)
class Mesh:
    """Distinct ranks on axes: flat in `ranks`, one extent an axis in `shape`, one name an axis in `axes`.

    `ranks` may be nested sequences, an array or tensor (anything with `tolist`), or flat with `shape` beside it. Axes
    without names are called "0", "1", … . A mesh without axes is one rank. `LayoutError` if the ranks don't fill the
    shape, a rank is negative or there twice, or the names don't fit.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __init__(self, ranks: Any, *, shape: Iterable[int] | None = None, axes: Iterable[str] | None = None) -> None:
        flat, nesting = _flatten(ranks)
        extents = nesting if shape is None else coordinates(shape)
        names = tuple(str(axis) for axis in range(len(extents))) if axes is None else tuple(axes)
        _check_ranks(flat, shape=extents)
        _check_names(names, shape=extents)
        self.__attrs_init__(ranks=flat, shape=extents, axes=names)

    @property
    def ndim(self) -> int:
        """How many axes the mesh has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return len(self.ranks)

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where a rank stands, one number an axis; None if it isn't in the mesh.

        >>> Mesh([[3, 1], [0, 2]]).coordinate(0), Mesh([[3, 1], [0, 2]]).coordinate(9)
        ((1, 0), None)
        """
        position = self._position.get(rank)
        if position is None:
            return None
        found = []
        for extent in reversed(self.shape):
            position, index = divmod(position, extent)
            found.append(index)
        return tuple(reversed(found))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank that stands at a coordinate: the undoing of `coordinate`.

        >>> Mesh([[3, 1], [0, 2]]).rank_at((1, 0))
        0
        """
        at = tuple(coordinate)
        if len(at) != self.ndim or not all(0 <= i < n for i, n in zip(at, self.shape, strict=True)):
            raise LayoutError(f"{at} is no coordinate of a mesh of shape {self.shape}; count each axis from 0")
        position = 0
        for index, extent in zip(at, self.shape, strict=True):
            position = position * extent + index
        return self.ranks[position]

    def axis(self, key: str | int) -> int:
        """The number of an axis, given its name or its number.

        >>> Mesh(range(8), shape=(2, 4), axes=("dp", "tp")).axis("tp")
        1
        """
        if key in self.axes:
            return self.axes.index(str(key))
        if isinstance(key, int) and 0 <= key < self.ndim:
            return key
        raise LayoutError(f"the mesh has no axis {key!r}; it has {', '.join(self.axes) or 'none'}")


def _flatten(ranks: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks in row-major order, and the shape that their nesting has."""
    values = ranks.tolist() if hasattr(ranks, "tolist") else ranks
    if not isinstance(values, Iterable):
        return coordinates((values,)), ()
    items = [_flatten(value) for value in values]
    shapes = {shape for _, shape in items}
    if len(shapes) > 1:
        raise LayoutError(f"a mesh's rows need equal lengths, got rows of shape {sorted(shapes)} in {values}")
    return tuple(rank for flat, _ in items for rank in flat), (len(items), *(shapes.pop() if shapes else ()))


def _check_ranks(ranks: tuple[int, ...], *, shape: tuple[int, ...]) -> None:
    if any(extent < 1 for extent in shape) or prod(shape) != len(ranks):
        raise LayoutError(f"a mesh of shape {shape} needs {prod(shape)} ranks (1 or more), got {len(ranks)}: {ranks}")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice or min(ranks) < 0:
        wrong = f"{twice} more than once" if twice else f"the negative rank {min(ranks)}"
        raise LayoutError(f"a mesh needs distinct ranks from 0 up, got {wrong} in {ranks}")


def _check_names(axes: tuple[str, ...], *, shape: tuple[int, ...]) -> None:
    if len(axes) != len(shape) or len(set(axes)) != len(axes):
        raise LayoutError(f"a mesh of shape {shape} needs {len(shape)} different axis names, got {axes}")
