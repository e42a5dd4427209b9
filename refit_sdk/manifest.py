"""What a rank holds, as plain data that travels: manifests and worlds as bytes, and back.

1. `fold` makes a manifest of a rank's fragments; the live views stay behind, in `Views`, found again by name and box.
2. `encode` writes a manifest as canonical JSON: equal manifests have equal bytes, so `digest` of the bytes names them.
   `encode_world` keeps equal manifests once and compresses.
3. `decode` and `decode_world` take bytes from the network. They bound sizes before anything is made of them, check
   the schema, then what every manifest promises, and refuse bytes that aren't canonical. Nothing is executed.

>>> spec = TensorSpec("layers.{}.w", (8, 4), [Box((0,), (3,))])
>>> manifest = Manifest([Part(spec, [Region(Box((0, 0, 0), (3, 4, 4)), "float32")])])
>>> decode(encode(manifest)) == manifest
True
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError, RendezvousError
from refit_sdk.fold import MAX_BYTES, check_aliases, check_place, fold, unfold
from refit_sdk.tensor import TensorSpec, fold_name
from refit_sdk.views import Views, check_storage
from refit_sdk.world import Manifest, Part, Region, Seat, World

__all__ = [
    "MAX_MANIFEST_BYTES", "MAX_WORLD_BYTES", "Views", "check_storage", "decode", "decode_world", "digest", "encode",
    "encode_world", "fold", "unfold", "world_bytes",
]  # fmt: skip

MAX_MANIFEST_BYTES: Final = 16 << 20
"""The largest manifest that is taken, encoded; a model whose names don't fold at all has some 100 bytes a tensor."""
MAX_WORLD_BYTES: Final = 256 << 20
"""The largest world that is taken, before compression."""

_MAX_MEMBERS: Final = 1 << 40
_HEADER: Final = struct.Struct(">8sQ")
_MAGIC: Final = b"refit-w1"

_Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Count = Annotated[int, Meta(ge=1, le=1 << 20)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Dims = Annotated[tuple[_Size, ...], Meta(max_length=64)]
_Corners: TypeAlias = tuple[_Dims, _Dims]


class _WireRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    box: _Corners
    dtype: _Name
    granule: _Dims | None = None
    copies: _Count = 1


class _WirePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    shape: _Dims
    members: Annotated[tuple[_Corners, ...], Meta(max_length=1 << 14)]
    regions: Annotated[tuple[_WireRegion, ...], Meta(max_length=1 << 16)]


class _WireManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parts: tuple[_WirePart, ...]
    aliases: Annotated[tuple[tuple[_Name, _Name], ...], Meta(max_length=1 << 16)]


class _WireSeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    side: Literal["source", "target"]
    engine: Annotated[str, Meta(max_length=1024)]
    rank: _Number
    process: _Number


class _WireWorld(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: _Size
    seats: Annotated[tuple[_WireSeat, ...], Meta(max_length=1 << 20)]
    manifests: tuple[_WireManifest, ...]
    manifest_of: tuple[_Number, ...]


_Wire = TypeVar("_Wire", _WireManifest, _WireWorld)


def digest(data: bytes) -> str:
    """The name of a manifest, a world or any other canonical bytes: 32 hexadecimal digits.

    >>> digest(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """A manifest as canonical JSON: equal manifests have equal bytes, on every machine."""
    return msgspec.json.encode(_to_wire(manifest))


def decode(data: bytes) -> Manifest:
    """The manifest that `encode` wrote. `RendezvousError` for anything else, whatever it is."""
    manifest = _from_wire(_parse(data, _WireManifest, "manifest", MAX_MANIFEST_BYTES))
    _check_canonical(data, encode(manifest), "manifest")
    return manifest


def world_bytes(world: World) -> bytes:
    """A world as canonical JSON: seats in order, equal manifests once. The bytes to digest: compression may vary."""
    _check_world(world)
    placed = sorted(zip(world.seats, world.manifest_of, strict=True))
    number: dict[Manifest, int] = {}
    manifest_of = tuple(number.setdefault(world.manifests[i], len(number)) for _, i in placed)
    seats = tuple(_WireSeat(seat.side, seat.engine, seat.rank, seat.process) for seat, _ in placed)
    return msgspec.json.encode(_WireWorld(world.epoch, seats, tuple(map(_to_wire, number)), manifest_of))


def encode_world(world: World) -> bytes:
    """A world, compressed: what the rendezvous gives every rank."""
    data = world_bytes(world)
    return _HEADER.pack(_MAGIC, len(data)) + zlib.compress(data, 6)


def decode_world(data: bytes) -> World:
    """The world that `encode_world` wrote. `RendezvousError` for anything else, whatever it is.

    No more is inflated than the header announces, and nothing if that is over `MAX_WORLD_BYTES`.
    """
    raw = _inflate(data)
    wire = _parse(raw, _WireWorld, "world", MAX_WORLD_BYTES)
    seats = tuple(Seat(seat.side, seat.engine, seat.rank, seat.process) for seat in wire.seats)
    world = World(wire.epoch, seats, tuple(map(_from_wire, wire.manifests)), wire.manifest_of)
    _check_canonical(raw, world_bytes(world), "world")
    return world


def _inflate(data: bytes) -> bytes:
    magic, nbytes = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0)
    if magic != _MAGIC or nbytes > MAX_WORLD_BYTES:
        raise RendezvousError(
            f"{len(data)} bytes were received as a world: they begin with {bytes(data[:8])!r} and announce {nbytes} "
            f"bytes; a world begins with {_MAGIC!r} and has at most {MAX_WORLD_BYTES} bytes"
        )
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data[_HEADER.size :], nbytes + 1)
    except zlib.error as error:
        raise RendezvousError(f"a world was received damaged: {error}") from error
    if len(raw) != nbytes or not inflater.eof or inflater.unused_data:
        found = "more" if len(raw) > nbytes or inflater.unused_data else f"{len(raw)}, cut off"
        raise RendezvousError(f"a world was received that announces {nbytes} bytes and has {found}")
    return raw


def _parse(data: bytes, kind: type[_Wire], what: str, limit: int) -> _Wire:
    if len(data) > limit:
        raise RendezvousError(f"a {what} of {len(data)} bytes was received; at most {limit} are taken")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RendezvousError(f"{len(data)} bytes were received as a {what}, and aren't one: {error}") from error


def _check_canonical(data: bytes, again: bytes, what: str) -> None:
    if again != data:
        raise RendezvousError(
            f"a {what} was received that isn't canonical (an order, a space, a field given twice): its digest is "
            f"{digest(data)}, encoded again {digest(again)}; both sides need the same version of refit_sdk"
        )


def _to_wire(manifest: Manifest) -> _WireManifest:
    return _WireManifest(tuple(map(_part_to_wire, manifest.parts)), manifest.aliases)


def _part_to_wire(part: Part) -> _WirePart:
    regions = (_WireRegion((r.box.start, r.box.stop), r.dtype, r.granule, r.copies) for r in part.regions)
    members = ((box.start, box.stop) for box in part.spec.members)
    return _WirePart(part.spec.name, part.spec.shape, tuple(members), tuple(regions))


def _from_wire(wire: _WireManifest) -> Manifest:
    try:
        manifest = Manifest(map(_part_from_wire, wire.parts), wire.aliases)
        _check_families(manifest)
        check_aliases(manifest)
    except LayoutError as error:
        raise RendezvousError(f"a manifest was received that no rank can have: {error}") from error
    return manifest


def _part_from_wire(wire: _WirePart) -> Part:
    spec = _spec_from_wire(wire.name, wire.shape, wire.members)
    regions = [Region(Box(*region.box), region.dtype, region.granule, region.copies) for region in wire.regions]
    if len({(region.box, region.dtype, region.granule) for region in regions}) < len(regions):
        raise LayoutError(f"{spec.name!r} has the same region twice; a region states its copies")
    _check_regions(spec, regions)
    return Part(spec, regions)


@lru_cache(maxsize=1024)
def _spec_from_wire(name: str, shape: tuple[int, ...], members: tuple[_Corners, ...]) -> TensorSpec:
    """Cached, since most ranks of a world know the same families."""
    if fold_name(name.replace("{}", "0")) != (name, (0,) * name.count("{}")):
        raise LayoutError(f"{name!r} is not a family's name: its numbers have to be {{}}, as whole parts")
    spec = TensorSpec(name, shape, (Box(*corners) for corners in members))
    if not 0 < spec.num_members <= _MAX_MEMBERS or any(box.is_empty for box in spec.members):
        raise LayoutError(f"{name!r} lists {spec.num_members} members; it can have 1 to {_MAX_MEMBERS}")
    _check_distinct(name, spec.members)
    return spec


def _check_regions(spec: TensorSpec, regions: Iterable[Region]) -> None:
    ranges: list[Box] = []
    for region in regions:
        members, box = region.box.split_dims(spec.num_stacked)
        check_place(spec.name, spec.shape, box, region.dtype, region.granule)
        if region.box.ndim != spec.ndim or not 0 < members.size <= spec.num_members:
            raise LayoutError(f"{spec.name!r} has a region {region.box}, which doesn't fit its {spec.ndim} dims")
        ranges.append(members)
    if _num_shared(ranges, spec.members) != [box.size for box in ranges]:
        raise LayoutError(f"{spec.name!r} has a region of members that it doesn't list")


def _check_families(manifest: Manifest) -> None:
    """Families of the same name and different shape have different members."""
    members: dict[str, list[tuple[Box, ...]]] = defaultdict(list)
    for part in manifest.parts:
        members[part.spec.name].append(part.spec.members)
    for name, of_family in members.items():
        if len(of_family) > 1:
            _check_distinct(name, [box for boxes in of_family for box in boxes])


def _check_distinct(name: str, members: Sequence[Box]) -> None:
    if _num_shared(members, members) != [box.size for box in members]:
        raise LayoutError(f"{name!r} lists a member twice")


def _num_shared(boxes: Sequence[Box], others: Sequence[Box]) -> list[int]:
    """For each box, how many of its points the others have, counted as often as they have them."""
    if len(others) == 1:
        return [common.size if (common := box.intersect(others[0])) else 0 for box in boxes]
    start, stop = (np.array(corners, np.int64) for corners in zip(*((o.start, o.stop) for o in others), strict=True))
    extents = (np.minimum(stop, box.stop) - np.maximum(start, box.start) for box in boxes)
    return [int(extent.clip(min=0).prod(axis=1).sum()) for extent in extents]


def _check_world(world: World) -> None:
    if len(world.manifest_of) != len(world.seats):
        raise RendezvousError(f"a world of {len(world.seats)} seats has manifests for {len(world.manifest_of)}")
    if any(not 0 <= number < len(world.manifests) for number in world.manifest_of):
        raise RendezvousError(f"a world has {len(world.manifests)} manifests, and a seat with one that isn't there")
    wrong = next((seat for seat in world.seats if bool(seat.engine) != (seat.side == "target")), None)
    if wrong is not None:
        raise RendezvousError(f"seat {wrong.rank} of side {wrong.side} has engine {wrong.engine!r}; targets have one")
    twice = Counter((seat.side, seat.engine, seat.rank) for seat in world.seats).most_common(1)
    if twice and twice[0][1] > 1:
        raise RendezvousError(f"{twice[0][1]} processes take the seat {twice[0][0]}; a rank is one process")
