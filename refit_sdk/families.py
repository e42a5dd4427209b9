"""Both sides as arrays: the families that either has, and who holds, or needs, which of their boxes.

1. Resolve aliases (`refit_sdk.aliases`); from here on a tensor has one name, that under which it travels.
2. Families are the union of both sides' (name, shape); their order is that of names, whatever order ranks came in.
3. On each side, count equal boxes once, with the list of processes that have them; a source's boxes are grouped by
   family, a target's by family and engine.
4. Make overlapping boxes of a group disjoint (`refit_sdk.overlap.atoms`): an element that a rank stores twice is needed
   once, and replicas that are cut in different ways are each a holder of what they share.

A *row* of a side is a disjoint box in one dtype, with the processes that have it. An empty box is nowhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import lcm
from operator import lt

import numpy as np
from attrs import define, field, frozen

from refit_sdk.aliases import Naming, manifests_of, member, resolve
from refit_sdk.box import Box
from refit_sdk.overlap import Boxes, atoms, disjoint, pad, subtract
from refit_sdk.transport import Ints
from refit_sdk.world import Manifest, Part, Side, World

Key = tuple[str, tuple[int, ...]]
"""A family: name, and shape of a member."""
Processes = tuple[int, ...]


@frozen(eq=False)
class Rows:
    """One side. `boxes` are disjoint in their group; row r is box `box[r]` in dtype number `dtype[r]`, at the processes
    `sets[who[r]]`, cut only at multiples of `granule[r]`.
    """

    boxes: Boxes
    box: Ints
    dtype: Ints
    granule: Ints
    who: Ints
    sets: tuple[Processes, ...]


@frozen(eq=False)
class Sides:
    """What the planner starts from. A target's group is `family * len(engines) + engine`.

    `wanted` and `held`: the members of each family that targets, and sources, know of (`held` without aliases).
    `offered` are the members that sources have under second names, `declared` the wanted ones by engine.
    """

    world: World
    naming: Naming
    keys: tuple[Key, ...]
    dtypes: tuple[str, ...]
    engines: tuple[str, ...]
    sources: Rows
    targets: Rows
    wanted: dict[Key, tuple[Box, ...]]
    held: dict[Key, tuple[Box, ...]]
    offered: dict[Key, tuple[Box, ...]]
    declared: dict[Key, dict[str, tuple[Box, ...]]]

    @property
    def ndim(self) -> Ints:
        """Dims of each family's boxes, stacked dims included."""
        return np.array([name.count("{}") + len(shape) for name, shape in self.keys], np.int64)


_Place = tuple[tuple[int, ...], tuple[int, ...], str]
"""Start and stop of a box, and a dtype."""


@define(eq=False)
class _Entry:
    """What is known of one box in one dtype."""

    granule: tuple[int, ...]
    processes: list[int]


@define(eq=False)
class _Gathered:
    """One side while it is collected: entries by (family, engine) and (start, stop, dtype), and members by family."""

    entries: dict[tuple[Key, str], dict[_Place, _Entry]] = field(factory=lambda: defaultdict(dict))
    members: dict[Key, set[Box]] = field(factory=lambda: defaultdict(set))
    declared: dict[Key, dict[str, set[Box]]] = field(factory=lambda: defaultdict(lambda: defaultdict(set)))
    second: dict[Key, set[Box]] = field(factory=lambda: defaultdict(set))

    def add(self, part: _NamedPart, at: Mapping[str, list[int]]) -> None:
        """Note that the processes in `at`, by engine, have what is in a part."""
        regions = [
            ((box.start, box.stop, dtype), granule)
            for box, dtype, granule in part.regions
            if all(map(lt, box.start, box.stop))
        ]
        for engine, processes in at.items():
            entries = self.entries[part.key, engine]
            for place, granule in regions:
                whole = (1,) * (len(place[0]) - len(granule)) + granule if granule else ()
                entry = entries.get(place)
                if entry is None:
                    entries[place] = _Entry(whole, list(processes))
                else:
                    entry.processes += processes
                    entry.granule = _lcm(entry.granule, whole)


def _lcm(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(lcm, a, b)) if a and b else a or b


def collect(world: World) -> Sides:
    """Both sides of a world, in an order that depends on nothing but what they hold."""
    naming = resolve(world)
    source, target = _gather(world, "source", naming), _gather(world, "target", naming)
    keys = tuple(sorted({*source.members, *target.members, *source.second}))
    dtypes = tuple(sorted({dtype for s in (source, target) for at in s.entries.values() for _, _, dtype in at}))
    engines = world.engines
    dims = max([name.count("{}") + len(shape) for name, shape in keys], default=1) or 1
    number = {key: i for i, key in enumerate(keys)}
    groups = {engine: i for i, engine in enumerate(engines)}
    return Sides(
        world, naming, keys, dtypes, engines,
        sources=_rows(source, dims, dtypes, lambda key, _: number[key]),
        targets=_rows(target, dims, dtypes, lambda key, engine: number[key] * len(engines) + groups[engine]),
        wanted=_members(target.members), held=_members(source.members), offered=_members(source.second),
        declared={key: {e: disjoint(boxes) for e, boxes in at.items()} for key, at in target.declared.items()},
    )  # fmt: skip


def _members(members: dict[Key, set[Box]]) -> dict[Key, tuple[Box, ...]]:
    return {key: disjoint(boxes) for key, boxes in members.items() if boxes}


def _gather(world: World, side: Side, naming: Naming) -> _Gathered:
    gathered = _Gathered()
    for number in manifests_of(world, side):
        at: dict[str, list[int]] = defaultdict(list)
        for seat, its in zip(world.seats, world.manifest_of, strict=True):
            if seat.side == side and its == number:
                at[seat.engine if side == "target" else ""].append(seat.process)
        manifest = world.manifests[number]
        renamed = naming.renamed.get(number, {}) if side == "target" else {}
        for part in _renamed_parts(manifest, renamed):
            _add_part(gathered, part, at)
        if side == "source":
            _add_second_names(gathered, manifest, naming.offered.get(number, ()), at)
    return gathered


class _NamedPart:
    """A part, or a member of one under another name."""

    __slots__ = ("key", "members", "regions")

    def __init__(self, part: Part) -> None:
        self.key: Key = (part.spec.name, part.spec.shape)
        self.members: Iterable[Box] = part.spec.members
        self.regions: Iterable[tuple[Box, str, tuple[int, ...] | None]] = [
            (region.box, region.dtype, region.granule) for region in part.regions
        ]


def _add_part(gathered: _Gathered, part: _NamedPart, at: dict[str, list[int]]) -> None:
    gathered.members[part.key].update(part.members)
    for engine in at:
        gathered.declared[part.key][engine].update(part.members)
    gathered.add(part, at)


def _add_second_names(
    gathered: _Gathered, manifest: Manifest, pairs: Iterable[tuple[str, str]], at: dict[str, list[int]]
) -> None:
    for other, name in pairs:
        for part in _under_name(manifest, name, other):
            gathered.second[part.key].update(part.members)
            gathered.add(part, at)


def _renamed_parts(manifest: Manifest, names: Mapping[str, str]) -> Iterator[_NamedPart]:
    """The parts of a manifest with some members under other names."""
    moved = [member(name) for name in names]
    for part in manifest.parts:
        taken = [box for template, box in moved if template == part.spec.name]
        yield _without_members(part, taken) if taken else _NamedPart(part)
    for name, other in names.items():
        yield from _under_name(manifest, name, other)


def _without_members(part: Part, taken: list[Box]) -> _NamedPart:
    kept = _NamedPart(part)
    count = part.spec.num_stacked
    kept.members = [rest for box in part.spec.members for rest in subtract(box, taken)]
    kept.regions = [
        (rest.concat(region.box.split_dims(count)[1]), region.dtype, region.granule)
        for region in part.regions
        for rest in subtract(region.box.split_dims(count)[0], taken)
    ]
    return kept


def _under_name(manifest: Manifest, name: str, other: str) -> Iterator[_NamedPart]:
    """One member of a manifest as a part of its own, under its other name."""
    (template, index), (other_template, other_index) = member(name), member(other)
    for part in manifest.parts:
        if part.spec.name == template and any(box.contains(index) for box in part.spec.members):
            split = [(region.box.split_dims(part.spec.num_stacked), region) for region in part.regions]
            found = _NamedPart(part)
            found.key = (other_template, part.spec.shape)
            found.members = [other_index]
            found.regions = [
                (other_index.concat(inner), region.dtype, region.granule)
                for (members, inner), region in split
                if members.contains(index)
            ]
            yield found


def _rows(side: _Gathered, dims: int, dtypes: tuple[str, ...], group_of: Callable[[Key, str], int]) -> Rows:
    """A side's entries as arrays, with disjoint boxes."""
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    group = [group_of(*place) for place, at in side.entries.items() for _ in at]
    places = [place for at in side.entries.values() for place in at]
    found = [entry for at in side.entries.values() for entry in at.values()]
    boxes = Boxes(
        np.array(group, np.int64),
        pad([start for start, _, _ in places], dims, 0),
        pad([stop for _, stop, _ in places], dims, 1),
    )
    dtype = np.array([number[dtype] for _, _, dtype in places], np.int64)
    order = np.lexsort((dtype, *boxes.stop.T[::-1], *boxes.start.T[::-1], boxes.group))
    boxes, dtype = boxes.take(order), dtype[order]
    entries = [found[i] for i in order.tolist()]
    granule = pad([entry.granule for entry in entries], dims, 1)
    table = np.column_stack((boxes.group, boxes.start, boxes.stop))
    new = np.ones(len(boxes), bool)
    new[1:] = np.any(table[1:] != table[:-1], axis=1)
    box = np.cumsum(new) - 1
    alone, atom, of_box = atoms(boxes.take(np.flatnonzero(new)))
    if len(atom) == len(alone) == int(new.sum()):
        return _listed(alone, box, dtype, granule, [entry.processes for entry in entries])
    return _merged(alone, (atom, of_box), (box, dtype, granule), entries)


def _merged(boxes: Boxes, covers: tuple[Ints, Ints], kinds: tuple[Ints, Ints, Ints], entries: list[_Entry]) -> Rows:
    """Rows of boxes that were cut up: each takes the entries of all boxes that cover it."""
    box, dtype, granule = kinds
    first = np.searchsorted(box, np.arange(int(box[-1]) + 2)).tolist()
    rows: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for atom, of_box in zip(covers[0].tolist(), covers[1].tolist(), strict=True):
        for entry in range(first[of_box], first[of_box + 1]):
            into = rows.setdefault((atom, int(dtype[entry])), ([], []))
            into[0].append(entry)
            into[1].extend(entries[entry].processes)
    places = np.array(sorted(rows), np.int64)
    granules = np.stack([np.lcm.reduce(granule[rows[atom, kind][0]], axis=0) for atom, kind in places.tolist()])
    who = [rows[atom, kind][1] for atom, kind in places.tolist()]
    return _listed(boxes, places[:, 0], places[:, 1], granules, who)


def _listed(boxes: Boxes, box: Ints, dtype: Ints, granule: Ints, processes: list[list[int]]) -> Rows:
    sets, who = intern(tuple(sorted(set(each))) for each in processes)
    return Rows(boxes, box, dtype, granule, who, sets)


def intern(each: Iterable[Processes]) -> tuple[tuple[Processes, ...], Ints]:
    """Different sets once, smallest first, and for each set given its number among them.

    >>> intern([(3,), (1, 2), (3,)])
    (((3,), (1, 2)), array([0, 1, 0]))
    """
    listed = list(each)
    sets = sorted(set(listed), key=lambda processes: (len(processes), processes))
    number = {processes: i for i, processes in enumerate(sets)}
    return tuple(sets), np.array([number[processes] for processes in listed], np.int64)
