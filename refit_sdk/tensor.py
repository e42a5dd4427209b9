"""Logical tensors: checkpoint tensors with their numbered members stacked into families.

`model.layers.0.mlp.up_proj.weight` … `model.layers.35.mlp.up_proj.weight`, each (I, H), are one logical tensor of shape
(36, I, H). The coordinate in a stacked dim is the number in the name, absolute on every rank of both sides.

>>> fold_name("model.layers.3.mlp.experts.7.up_proj.weight")
('model.layers.{}.mlp.experts.{}.up_proj.weight', (3, 7))
>>> family = TensorSpec("model.layers.{}.norm.weight", (64,), (Box((0,), (2,)), Box((5,), (6,))))
>>> list(family.names())
['model.layers.0.norm.weight', 'model.layers.1.norm.weight', 'model.layers.5.norm.weight']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from refit_sdk.box import Box, coordinates
from refit_sdk.errors import LayoutError

IntRows = npt.NDArray[np.int64]


def fold_name(name: str) -> tuple[str, tuple[int, ...]]:
    """A checkpoint name as (template, numbers): each dotted part that is a plain number becomes `{}`.

    A number of more than 18 digits stays part of the name: it counts nothing, and needn't fit in 64 bits.
    `LayoutError` if the name has braces of its own or a part is empty.
    """
    parts = name.split(".")
    if "{" in name or "}" in name or "" in parts:
        raise LayoutError(f"{name!r} is not a checkpoint name: it has braces or an empty part between dots")
    numbers = tuple(int(part) for part in parts if _is_number(part))
    return ".".join("{}" if _is_number(part) else part for part in parts), numbers


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and (part == "0" or part[0] != "0") and len(part) < 19


def merge_indices(indices: Iterable[tuple[int, ...]]) -> tuple[Box, ...]:
    """Disjoint boxes of exactly these index tuples, in order: runs along the last dim, then equal runs joined.

    The same set gives the same boxes, whatever order it comes in.

    >>> merge_indices([(1, 0), (0, 1), (0, 0), (1, 1), (4, 1)])
    (Box((0, 0), (2, 2)), Box((4, 1), (5, 2)))
    """
    unique = sorted(set(indices))
    if not unique or not unique[0]:
        return tuple(Box(index, index) for index in unique)
    start = np.array(unique, dtype=np.int64)
    stop = start + 1
    for dim in reversed(range(start.shape[1])):
        start, stop = _join_runs(start, stop, dim)
    return tuple(sorted(map(Box, start.tolist(), stop.tolist())))


def _join_runs(start: IntRows, stop: IntRows, dim: int) -> tuple[IntRows, IntRows]:
    """Boxes as rows (boxes, dims) of starts and stops; those that touch in `dim` and agree elsewhere become one."""
    across = np.delete(np.hstack((start, stop)), (dim, start.shape[1] + dim), axis=1)
    order = np.lexsort((start[:, dim], *across.T))
    across, start, stop = across[order], start[order], stop[order]
    opens = np.ones(len(start), dtype=bool)
    opens[1:] = (across[1:] != across[:-1]).any(axis=1) | (start[1:, dim] != stop[:-1, dim])
    return start[opens], stop[np.append(np.flatnonzero(opens)[1:], len(opens)) - 1]


class Members(Sequence[Box]):
    """Boxes of index tuples, in order, as two arrays `start` and `stop` (boxes, dims): a rank may have thousands.

    Equal to a tuple of the same boxes.

    >>> Members([Box((5,), (6,)), Box((0,), (2,))])
    Members([Box((0,), (2,)), Box((5,), (6,))])
    """

    __slots__ = ("_key", "start", "stop")

    def __init__(self, boxes: Iterable[Box]) -> None:
        """`LayoutError` if the boxes have different dims, or numbers that 64 bits don't count."""
        listed = list(boxes)
        dims = listed[0].ndim if listed else 0
        if any(box.ndim != dims for box in listed):
            raise LayoutError(f"members have one number of dims, these have several: {listed[:8]}")
        try:
            start, stop = (np.array(corners, np.int64).reshape(len(listed), dims) for corners in _corners(listed))
        except OverflowError:
            raise LayoutError(f"a member's number has more than 64 bits: {max(listed)}") from None
        self._set(start, stop)

    @classmethod
    def of(cls, start: IntRows, stop: IntRows) -> Members:
        """From arrays, (boxes, dims) each."""
        made = cls.__new__(cls)
        made._set(start, stop)
        return made

    def _set(self, start: IntRows, stop: IntRows) -> None:
        if start.shape[1] and len(start) > 1:
            order = np.lexsort((*stop.T[::-1], *start.T[::-1]))
            start, stop = start[order], stop[order]
        self.start, self.stop = start, stop
        self._key = (start.shape, start.tobytes(), stop.tobytes())

    @property
    def ndim(self) -> int:
        """How many dims the boxes have; 0 where there is no box."""
        return int(self.start.shape[1])

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Box]:
        return map(Box, self.start.tolist(), self.stop.tolist())

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Box, ...]: ...
    def __getitem__(self, index: int | slice) -> Box | tuple[Box, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Members):
            return self._key == other._key
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Members({list(self)})"


def _corners(boxes: list[Box]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [box.start for box in boxes], [box.stop for box in boxes]


def _in_order(boxes: Iterable[Box]) -> Members:
    return boxes if isinstance(boxes, Members) else Members(boxes)


@frozen
class TensorSpec:
    """A logical tensor: name with a `{}` per stacked dim, shape of one member, and which members there are.

    `members` are disjoint boxes of index tuples (for a name without `{}`: the one 0-D box). Members of different shape
    belong to different families, which may share a name.
    """

    name: str
    shape: tuple[int, ...] = field(converter=coordinates)
    members: Members = field(converter=_in_order)

    def __attrs_post_init__(self) -> None:
        if len(self.members) and self.members.ndim != self.num_stacked:
            raise LayoutError(f"{self.name!r} has {self.num_stacked} stacked dims, its members are {self.members}")
        if any(extent < 0 for extent in self.shape):
            raise LayoutError(f"{self.name!r} has a negative extent in its shape {self.shape}")

    @property
    def num_stacked(self) -> int:
        """How many stacked dims come before the tensor's own."""
        return self.name.count("{}")

    @property
    def ndim(self) -> int:
        """Stacked dims and own dims together: the dims of a family's boxes."""
        return self.num_stacked + len(self.shape)

    @property
    def num_members(self) -> int:
        """How many checkpoint tensors the family has."""
        return sum(box.size for box in self.members)

    def member_name(self, index: tuple[int, ...]) -> str:
        """The checkpoint name of one member.

        >>> TensorSpec("layers.{}.w", (2,), [Box((0,), (4,))]).member_name((3,))
        'layers.3.w'
        """
        return self.name.format(*index)

    def names(self) -> Iterator[str]:
        """The checkpoint names of all members."""
        for box in self.members:
            for index in box.points():
                yield self.member_name(index)
