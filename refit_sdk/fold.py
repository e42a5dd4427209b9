"""Fragments folded into a manifest by name template and index ranges, and unfolded again. Nothing is lost on the way.

1. Each fragment is checked: its view has the shape of its box, its box lies in its shape, its dtype is known.
2. Fragments are grouped by name template and shape into families, and in a family by (box, dtype, granule).
3. The members of a group that have equally many copies become ranges of the stacked dims: one region each.

>>> from refit_sdk.adapter import Fragment
>>> import numpy as np
>>> rows = Box((0, 0), (4, 4))
>>> manifest = fold(Fragment(f"layers.{i}.w", (8, 4), rows, np.zeros((4, 4), "float32")) for i in range(3))
>>> manifest.parts[0].regions
(Region(box=Box((0, 0, 0), (3, 4, 4)), dtype='float32', granule=None, copies=1),)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import ITEMSIZE, itemsize
from refit_sdk.errors import LayoutError
from refit_sdk.tensor import Members, TensorSpec, fold_name, merge_indices
from refit_sdk.world import Group, Manifest, Part, Regions

if TYPE_CHECKING:
    from refit_sdk.adapter import Fragment

_Kind: TypeAlias = tuple[Box, str, tuple[int, ...] | None]
"""What members must share to be folded into one region: box, dtype, granule."""
_Counts: TypeAlias = dict[tuple[int, ...], int]
"""Copies, by a member's numbers."""

_Ranges: TypeAlias = Callable[[frozenset[tuple[int, ...]]], Members]

MAX_BYTES: Final = (1 << 63) - 1
"""The largest tensor, in bytes: sizes have 64 bits everywhere."""


@frozen
class Held:
    """One place where a weight lives, as data: a `Fragment` without its view."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    granule: tuple[int, ...] | None = None


def dtype_of(view: Any) -> str:
    """The dtype name of a torch tensor (or a NumPy array), without importing either.

    >>> import numpy as np
    >>> dtype_of(np.zeros(2, "float32"))
    'float32'
    """
    return str(view.dtype).removeprefix("torch.")


def fold(fragments: Iterable[Fragment]) -> Manifest:
    """The manifest of one rank's fragments. `LayoutError` names the first fragment that cannot be.

    The same place twice on a rank is one region with two copies. Members of different shape are different families.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    families: dict[tuple[str, tuple[int, ...]], dict[_Kind, _Counts]] = defaultdict(lambda: defaultdict(dict))
    aliases: list[tuple[str, str]] = []
    for fragment in fragments:
        name, shape = fragment.name, fragment.shape
        template, index = fold_name(name)
        if shapes.setdefault(name, shape) != shape:
            raise LayoutError(f"{name!r} has shape {shapes[name]} and shape {shape} on the same rank; it can have one")
        counts = families[template, shape][_kind(fragment)]
        counts[index] = counts.get(index, 0) + 1
        aliases += ((alias, name) for alias in fragment.aliases)
    ranges = cache(_ranges)
    manifest = Manifest((_part(*family, kinds, ranges) for family, kinds in families.items()), set(aliases))
    check_aliases(manifest)
    return manifest


def _kind(fragment: Fragment) -> _Kind:
    view_shape, dtype = tuple(fragment.view.shape), dtype_of(fragment.view)
    if view_shape != fragment.box.shape:
        raise LayoutError(
            f"{fragment.name!r} claims {fragment.box} of {fragment.shape}, which is {fragment.box.shape}, but its view "
            f"has shape {view_shape}; a fragment's view holds exactly its box"
        )
    granule = None if fragment.granule is None else tuple(fragment.granule)
    check_place(fragment.name, fragment.shape, fragment.box, dtype, granule)
    return fragment.box, dtype, granule


def check_place(name: str, shape: tuple[int, ...], box: Box, dtype: str, granule: tuple[int, ...] | None) -> None:
    """`LayoutError`, naming the tensor, unless `box` is a region of a tensor of this shape, in a dtype that is known.

    >>> check_place("w", (4,), Box((2,), (5,)), "float32", None)
    Traceback (most recent call last):
        ...
    refit_sdk.errors.LayoutError: 'w' claims [2:5], which isn't a region of its shape (4,); give a box inside it
    """
    if box.ndim != len(shape) or any(stop > extent for stop, extent in zip(box.stop, shape, strict=True)):
        raise LayoutError(f"{name!r} claims {box}, which isn't a region of its shape {shape}; give a box inside it")
    if dtype not in ITEMSIZE:
        raise LayoutError(f"{name!r} has dtype {dtype!r}; known are {', '.join(sorted(ITEMSIZE))}")
    if Box.whole(shape).size * itemsize(dtype) > MAX_BYTES:
        raise LayoutError(f"{name!r} of shape {shape} in {dtype} has more bytes than 64 bits count")
    if granule is not None:
        _check_granule(name, shape, box, granule)


def _check_granule(name: str, shape: tuple[int, ...], box: Box, granule: tuple[int, ...]) -> None:
    if len(granule) != len(shape) or any(step < 1 for step in granule):
        raise LayoutError(f"{name!r} of shape {shape} has granule {granule}; it needs a positive number for each dim")
    cuts = (cut for corner in (box.start, box.stop) for cut in zip(corner, granule, shape, strict=True))
    if any(at % step and at != extent for at, step, extent in cuts):
        raise LayoutError(f"{name!r} holds {box} of {shape}, which cuts through its granule {granule}")


def _ranges(indices: frozenset[tuple[int, ...]]) -> Members:
    return Members(merge_indices(indices))


def _part(template: str, shape: tuple[int, ...], kinds: Mapping[_Kind, _Counts], ranges: _Ranges) -> Part:
    groups: list[Group] = []
    for (box, dtype, granule), counts in kinds.items():
        for copies in set(counts.values()):
            indices = frozenset(index for index, count in counts.items() if count == copies)
            groups.append(Group(ranges(indices), box, dtype, granule, copies))
    members = ranges(frozenset(index for counts in kinds.values() for index in counts))
    return Part(TensorSpec(template, shape, members), Regions(groups))


def check_aliases(manifest: Manifest) -> None:
    """`LayoutError` unless each alias is a second name of one tensor that the manifest has, and of nothing else."""
    if not manifest.aliases:
        return
    members: dict[str, list[Box]] = defaultdict(list)
    for part in manifest.parts:
        members[part.spec.name] += part.spec.members
    taken: dict[str, str] = {}
    for alias, name in manifest.aliases:
        if _is_member(alias, members):
            raise LayoutError(f"{alias!r} is an alias of {name!r} and a tensor of its own on the same rank; drop one")
        if not _is_member(name, members):
            raise LayoutError(f"{alias!r} is an alias of {name!r}, which this rank doesn't hold")
        if taken.setdefault(alias, name) != name:
            raise LayoutError(f"{alias!r} is an alias of {taken[alias]!r} and of {name!r}; it can be one tensor's")


def _is_member(name: str, members: Mapping[str, list[Box]]) -> bool:
    template, index = fold_name(name)
    point = Box(index, (i + 1 for i in index))
    return any(box.contains(point) for box in members.get(template, ()))


def unfold(manifest: Manifest) -> Iterator[Held]:
    """Every place of a manifest, each copy by itself: the undoing of `fold`.

    >>> from refit_sdk.world import Region
    >>> part = Part(TensorSpec("layers.{}.w", (4,), [Box((2,), (4,))]), [Region(Box((2, 0), (4, 2)), "int8")])
    >>> [(held.name, held.box) for held in unfold(Manifest([part]))]
    [('layers.2.w', Box((0,), (2,))), ('layers.3.w', Box((0,), (2,)))]
    """
    for part in manifest.parts:
        for region in part.regions:
            members, box = region.box.split_dims(part.spec.num_stacked)
            for index in members.points():
                held = Held(part.spec.member_name(index), part.spec.shape, box, region.dtype, region.granule)
                yield from (held for _ in range(region.copies))
