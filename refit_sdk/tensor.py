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

from collections.abc import Iterable, Iterator

from attrs import field, frozen

from refit_sdk.box import Box, coordinates
from refit_sdk.errors import LayoutError


def fold_name(name: str) -> tuple[str, tuple[int, ...]]:
    """A checkpoint name as (template, numbers): each dotted part that is a plain number becomes `{}`.

    `LayoutError` if the name has braces of its own or a part is empty.
    """
    parts = name.split(".")
    if "{" in name or "}" in name or "" in parts:
        raise LayoutError(f"{name!r} is not a checkpoint name: it has braces or an empty part between dots")
    numbers = tuple(int(part) for part in parts if _is_number(part))
    return ".".join("{}" if _is_number(part) else part for part in parts), numbers


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and (part == "0" or part[0] != "0")


def merge_indices(indices: Iterable[tuple[int, ...]]) -> tuple[Box, ...]:
    """Disjoint boxes of exactly these index tuples, in canonical order: runs along the last dim, then equal runs joined.

    The same set gives the same boxes, whatever order it comes in.

    >>> merge_indices([(1, 0), (0, 1), (0, 0), (1, 1), (4, 1)])
    (Box((0, 0), (2, 2)), Box((4, 1), (5, 2)))
    """
    boxes = sorted({Box(index, (i + 1 for i in index)) for index in indices})
    ndim = boxes[0].ndim if boxes else 0
    for dim in reversed(range(ndim)):
        boxes = _join_runs(boxes, dim)
    return tuple(sorted(boxes))


def _join_runs(boxes: list[Box], dim: int) -> list[Box]:
    def across(box: Box) -> tuple[tuple[int, ...], ...]:
        return (box.start[:dim], box.stop[:dim], box.start[dim + 1 :], box.stop[dim + 1 :])

    joined: list[Box] = []
    for box in sorted(boxes, key=lambda box: (across(box), box.start[dim])):
        last = joined[-1] if joined else None
        if last is not None and across(last) == across(box) and last.stop[dim] == box.start[dim]:
            joined[-1] = Box(last.start, box.stop)
        else:
            joined.append(box)
    return joined


def _in_order(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(sorted(boxes))


@frozen
class TensorSpec:
    """A logical tensor: name with a `{}` per stacked dim, shape of one member, and which members there are.

    `members` are disjoint boxes of index tuples (for a name without `{}`: the one 0-D box). Members of different shape
    belong to different families, which may share a name.
    """

    name: str
    shape: tuple[int, ...] = field(converter=coordinates)
    members: tuple[Box, ...] = field(converter=_in_order)

    def __attrs_post_init__(self) -> None:
        if any(box.ndim != self.num_stacked for box in self.members):
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
