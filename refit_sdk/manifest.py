"""What a rank holds, as plain data that travels: manifests and worlds as bytes, and back.

1. `fold` makes a manifest of a rank's fragments; the live views stay behind, in `Views`, found again by name and box.
2. `encode` writes a manifest as canonical JSON: equal manifests have equal bytes, so `digest` of the bytes names them.
   Members are written as columns (`refit_sdk.columns`), equal ones once.
   `encode_world` keeps equal manifests once, and of different ones equal parts once, and compresses.
3. `decode` and `decode_world` take bytes from the network. They bound sizes before anything is made of them, check
   the schema, then what every manifest promises, and refuse bytes that aren't canonical. Nothing is executed.

>>> from refit_sdk.world import Region
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
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from refit_sdk.box import Box
from refit_sdk.columns import MAX_MEMBERS, Columns, are_among, are_distinct, count, pack, unpack
from refit_sdk.errors import LayoutError, RendezvousError
from refit_sdk.fold import MAX_BYTES, check_aliases, check_place, fold, unfold
from refit_sdk.tensor import Members, TensorSpec, fold_name
from refit_sdk.views import Views, check_storage
from refit_sdk.world import Group, Location, Manifest, Part, Regions, Seat, World

__all__ = [
    "MAX_MANIFEST_BYTES", "MAX_WORLD_BYTES", "Views", "check_storage", "decode", "decode_world", "digest", "encode",
    "encode_world", "fold", "unfold", "world_bytes",
]  # fmt: skip

MAX_MANIFEST_BYTES: Final = 16 << 20
"""The largest manifest that is taken, encoded; a model whose names don't fold at all has some 100 bytes a tensor."""
MAX_WORLD_BYTES: Final = 256 << 20
"""The largest world that is taken, before compression."""

_HEADER: Final = struct.Struct(">8sQ")
_MAGIC: Final = b"refit-w1"

_Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Count = Annotated[int, Meta(ge=1, le=1 << 20)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Dims = Annotated[tuple[_Size, ...], Meta(max_length=64)]
_Corners: TypeAlias = tuple[_Dims, _Dims]
_Columns = Annotated[tuple[Annotated[tuple[_Size, ...], Meta(max_length=1 << 20)], ...], Meta(max_length=128)]
_Aliases = Annotated[tuple[tuple[_Name, _Name], ...], Meta(max_length=1 << 16)]


class _WireRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Regions of some members of a part, or of all that it lists."""

    box: _Corners
    dtype: _Name
    members: _Number | None = None
    granule: _Dims | None = None
    copies: _Count = 1


class _WirePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    shape: _Dims
    members: _Number
    regions: Annotated[tuple[_WireRegion, ...], Meta(max_length=1 << 16)]


class _WireManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    members: tuple[_Columns, ...]
    parts: tuple[_WirePart, ...]
    aliases: _Aliases


class _WireHeld(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest in a world: the numbers of its parts."""

    parts: tuple[_Number, ...]
    aliases: _Aliases


class _WireSeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    side: Literal["source", "target"]
    engine: Annotated[str, Meta(max_length=1024)]
    rank: _Number
    process: _Number


class _WirePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    process: _Number
    host: Annotated[str, Meta(max_length=1024)]
    domain: Annotated[str, Meta(max_length=1024)]


class _WireWorld(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: _Size
    seats: Annotated[tuple[_WireSeat, ...], Meta(max_length=1 << 20)]
    members: tuple[_Columns, ...]
    parts: tuple[_WirePart, ...]
    manifests: tuple[_WireHeld, ...]
    manifest_of: tuple[_Number, ...]
    places: Annotated[tuple[_WirePlace, ...], Meta(max_length=1 << 20)]


_Wire = TypeVar("_Wire", _WireManifest, _WireWorld)
_Value = TypeVar("_Value")


class _Numbered(dict[_Value, int]):
    """Different values, numbered in order of their first coming."""

    def number(self, value: _Value) -> int:
        return self.setdefault(value, len(self))


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
    manifests: _Numbered[Manifest] = _Numbered()
    manifest_of = tuple(manifests.number(world.manifests[i]) for _, i in placed)
    seats = tuple(_WireSeat(seat.side, seat.engine, seat.rank, seat.process) for seat, _ in placed)
    parts: _Numbered[Part] = _Numbered()
    held = tuple(_WireHeld(tuple(map(parts.number, each.parts)), each.aliases) for each in manifests)
    members, listed = _parts_to_wire(parts)
    places = tuple(_WirePlace(place.process, place.host, place.domain) for place in sorted(world.places))
    return msgspec.json.encode(_WireWorld(world.epoch, seats, members, listed, held, manifest_of, places))


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
    places = tuple(Location(place.process, place.host, place.domain) for place in wire.places)
    world = World(wire.epoch, seats, _manifests_from_wire(wire), wire.manifest_of, places)
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
    return _WireManifest(*_parts_to_wire(manifest.parts), manifest.aliases)


def _parts_to_wire(parts: Iterable[Part]) -> tuple[tuple[Columns, ...], tuple[_WirePart, ...]]:
    """The different members that the parts have, as columns, and the parts."""
    members: _Numbered[Members] = _Numbered()
    listed = tuple(_part_to_wire(part, members) for part in parts)
    return tuple(map(pack, members)), listed


def _part_to_wire(part: Part, members: _Numbered[Members]) -> _WirePart:
    every = members.number(part.spec.members)
    regions = []
    for group in part.regions.groups:
        which = None if group.members == part.spec.members else members.number(group.members)
        corners = (group.box.start, group.box.stop)
        regions.append(_WireRegion(corners, group.dtype, which, group.granule, group.copies))
    return _WirePart(part.spec.name, part.spec.shape, every, tuple(regions))


def _from_wire(wire: _WireManifest) -> Manifest:
    try:
        return _checked(_parts_from_wire(wire), wire.aliases)
    except LayoutError as error:
        raise RendezvousError(f"a manifest was received that no rank can have: {error}") from error


def _manifests_from_wire(wire: _WireWorld) -> tuple[Manifest, ...]:
    try:
        part = _at(_parts_from_wire(wire), "part")
        return tuple(_checked(map(part, held.parts), held.aliases) for held in wire.manifests)
    except LayoutError as error:
        raise RendezvousError(f"a manifest was received that no rank can have: {error}") from error


def _checked(parts: Iterable[Part], aliases: tuple[tuple[str, str], ...]) -> Manifest:
    manifest = Manifest(parts, aliases)
    _check_families(manifest)
    check_aliases(manifest)
    return manifest


def _at(values: list[_Value], what: str) -> Callable[[int], _Value]:
    def at(number: int) -> _Value:
        if number >= len(values):
            raise LayoutError(f"{what} {number} is named where there are {len(values)}")
        return values[number]

    return at


def _members(columns: Columns) -> Members:
    members = unpack(columns, dims=len(columns) // 2)
    if not 0 < (number := count(members)) <= MAX_MEMBERS or (members.start == members.stop).any():
        most = f"{MAX_MEMBERS} members or more" if number > MAX_MEMBERS else "no member, or an empty range of them"
        raise LayoutError(f"a list has {most}")
    if not are_distinct([members]):
        raise LayoutError(f"{members} lists a member twice")
    return members


def _parts_from_wire(wire: _WireManifest | _WireWorld) -> list[Part]:
    """The parts. Each list of members is looked at once, however many parts have it."""
    members, among = _at(list(map(_members, wire.members)), "a list of members"), cache(are_among)
    return [_part_from_wire(part, members, among) for part in wire.parts]


def _part_from_wire(
    wire: _WirePart, members: Callable[[int], Members], among: Callable[[Members, Members], bool]
) -> Part:
    spec = TensorSpec(_family_name(wire.name), wire.shape, members(wire.members))
    groups = []
    for region in wire.regions:
        which = spec.members if region.members is None else members(region.members)
        if which.ndim != spec.num_stacked or not among(which, spec.members):
            raise LayoutError(f"{spec.name!r} has a region of members that it doesn't list")
        groups.append(Group(which, Box(*region.box), region.dtype, region.granule, region.copies))
    _check_groups(spec, groups)
    return Part(spec, Regions(groups))


@lru_cache(maxsize=1024)
def _family_name(name: str) -> str:
    if fold_name(name.replace("{}", "0")) != (name, (0,) * name.count("{}")):
        raise LayoutError(f"{name!r} is not a family's name: its numbers have to be {{}}, as whole parts")
    return name


def _check_groups(spec: TensorSpec, groups: Iterable[Group]) -> None:
    of_kind: dict[object, list[Members]] = defaultdict(list)
    for group in groups:
        check_place(spec.name, spec.shape, group.box, group.dtype, group.granule)
        of_kind[group.box, group.dtype, group.granule].append(group.members)
    if not all(len(members) < 2 or are_distinct(members) for members in of_kind.values()):
        raise LayoutError(f"{spec.name!r} has the same region twice; a region states its copies")


def _check_families(manifest: Manifest) -> None:
    """Families of the same name and different shape have different members."""
    members: dict[str, list[Members]] = defaultdict(list)
    for part in manifest.parts:
        members[part.spec.name].append(part.spec.members)
    for name, of_family in members.items():
        if len(of_family) > 1 and not are_distinct(of_family):
            raise LayoutError(f"{name!r} lists a member twice")


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
