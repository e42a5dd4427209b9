"""What every rank holds, as values: regions of families, manifests, seats and the world that joined.

>>> spec = TensorSpec("layers.{}.w", (8, 4), [Box((0,), (2,))])
>>> part = Part(spec, (Region(Box((0, 0, 0), (2, 4, 4)), "bfloat16"),))
>>> Manifest((part,)).nbytes
64
>>> str(Seat("target", "rollout-0", 1, process=5))
'rollout-0[1]'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, overload

from attrs import Converter, field, frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import itemsize
from refit_sdk.tensor import Members, TensorSpec

Side = Literal["source", "target"]


@frozen(order=True)
class Region:
    """A box of a family (stacked dims first) that a rank holds in one dtype, `copies` times over.

    `granule` has one number for each of the tensor's own dims; every cut falls on a multiple of it.
    """

    box: Box
    dtype: str
    granule: tuple[int, ...] | None = None
    copies: int = 1


def _region_key(region: Region) -> tuple[Box, str, tuple[int, ...], int]:
    return (region.box, region.dtype, region.granule or (), region.copies)


@frozen
class Group:
    """Regions that differ only in their members: `box` has the tensor's own dims."""

    members: Members
    box: Box
    dtype: str
    granule: tuple[int, ...] | None = None
    copies: int = 1

    def regions(self) -> Iterator[Region]:
        """Each region by itself."""
        return (Region(box.concat(self.box), self.dtype, self.granule, self.copies) for box in self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of all its regions, each copy counted."""
        members = int((self.members.stop - self.members.start).prod(axis=1).sum())
        return members * self.box.size * self.copies * itemsize(self.dtype)


def _group_key(group: Group) -> tuple[Box, str, bool, tuple[int, ...], int]:
    return (group.box, group.dtype, group.granule is not None, group.granule or (), group.copies)


class Regions(Sequence[Region]):
    """Regions in order, kept as few groups, since a rank may have thousands. Equal to a tuple of the same regions."""

    __slots__ = ("groups",)

    def __init__(self, groups: Iterable[Group]) -> None:
        """Groups that differ in more than their members."""
        self.groups = tuple(sorted(groups, key=_group_key))

    @classmethod
    def of(cls, regions: Iterable[Region], *, stacked: int) -> Regions:
        """From regions of a family with that many stacked dims."""
        if isinstance(regions, Regions):
            return regions
        members: dict[tuple[Box, str, tuple[int, ...] | None, int], list[Box]] = defaultdict(list)
        for region in regions:
            which, box = region.box.split_dims(stacked)
            members[box, region.dtype, region.granule, region.copies].append(which)
        return cls(Group(Members(boxes), *kind) for kind, boxes in members.items())

    def __len__(self) -> int:
        return sum(len(group.members) for group in self.groups)

    def __iter__(self) -> Iterator[Region]:
        return iter(sorted((region for group in self.groups for region in group.regions()), key=_region_key))

    @overload
    def __getitem__(self, index: int) -> Region: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Region, ...]: ...
    def __getitem__(self, index: int | slice) -> Region | tuple[Region, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Regions):
            return self.groups == other.groups
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(self.groups)

    def __repr__(self) -> str:
        return repr(tuple(self))


def _grouped(regions: Iterable[Region], part: Any) -> Regions:
    return Regions.of(regions, stacked=part.spec.num_stacked)


@frozen
class Part:
    """What one rank holds of one family. `spec.members` are the members that this rank knows of."""

    spec: TensorSpec
    regions: Regions = field(converter=Converter(_grouped, takes_self=True))  # type: ignore[misc]


def _parts_in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (part.spec.name, part.spec.shape)))


def _pairs_in_order(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(pairs))


@frozen
class Manifest:
    """What one rank holds on one side: parts in order of (name, shape), and aliases as (other name, name) pairs."""

    parts: tuple[Part, ...] = field(converter=_parts_in_order)
    aliases: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs_in_order)

    @property
    def nbytes(self) -> int:
        """Bytes of all regions, each copy counted."""
        return sum(group.nbytes for part in self.parts for group in part.regions.groups)


@frozen(order=True)
class Seat:
    """A rank of a side, and the process (by world number) that sits there. A process may have a seat on both sides."""

    side: Side
    engine: str
    rank: int
    process: int = 0

    def __str__(self) -> str:
        return f"{self.engine or 'source'}[{self.rank}]"


@frozen(order=True)
class Location:
    """Where a process says it is: on processes of one `host` memory can be shared; `domain` is "" where it knows of
    none but its host."""

    process: int
    host: str
    domain: str = ""


@frozen
class World:
    """Everybody who joined, at one epoch: seats in order, and for each the index of its manifest among the unique.

    `places` are the locations of processes, in order, where they were said.
    """

    epoch: int
    seats: tuple[Seat, ...]
    manifests: tuple[Manifest, ...]
    manifest_of: tuple[int, ...]
    places: tuple[Location, ...] = ()

    def manifest(self, seat: Seat) -> Manifest:
        """The manifest of a seat."""
        return self.manifests[self.manifest_of[self.seats.index(seat)]]

    def of_side(self, side: Side) -> tuple[Seat, ...]:
        """The seats of a side, in order."""
        return tuple(seat for seat in self.seats if seat.side == side)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines' names, in order."""
        return tuple(sorted({seat.engine for seat in self.seats if seat.side == "target"}))

    @property
    def num_processes(self) -> int:
        """World numbers run from 0 to this, exclusive; after a reform some may be unused."""
        return 1 + max((seat.process for seat in self.seats), default=-1)
