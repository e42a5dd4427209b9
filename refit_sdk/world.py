"""What every rank holds, as values: regions of families, manifests, seats and the world that joined.

>>> spec = TensorSpec("layers.{}.w", (8, 4), [Box((0,), (2,))])
>>> part = Part(spec, (Region(Box((0, 0, 0), (2, 4, 4)), "bfloat16"),))
>>> Manifest((part,)).nbytes
64
>>> str(Seat("target", "rollout-0", 1, process=5))
'rollout-0[1]'
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import field, frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import itemsize
from refit_sdk.tensor import TensorSpec

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


def _regions_in_order(regions: Iterable[Region]) -> tuple[Region, ...]:
    return tuple(sorted(regions, key=_region_key))


@frozen
class Part:
    """What one rank holds of one family. `spec.members` are the members that this rank knows of."""

    spec: TensorSpec
    regions: tuple[Region, ...] = field(converter=_regions_in_order)


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
        return sum(r.box.size * r.copies * itemsize(r.dtype) for part in self.parts for r in part.regions)


@frozen(order=True)
class Seat:
    """A rank of a side, and the process (by world number) that sits there. A process may have a seat on both sides."""

    side: Side
    engine: str
    rank: int
    process: int = 0

    def __str__(self) -> str:
        return f"{self.engine or 'source'}[{self.rank}]"


@frozen
class World:
    """Everybody who joined, at one epoch: seats in order, and for each the index of its manifest among the unique."""

    epoch: int
    seats: tuple[Seat, ...]
    manifests: tuple[Manifest, ...]
    manifest_of: tuple[int, ...]

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
