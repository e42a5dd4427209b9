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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import lt

import numpy as np
import numpy.typing as npt
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


def examples(members: Mapping[Key, Sequence[Box]]) -> list[str]:
    """A name of each family.

    >>> examples({("layers.{}.w", (4,)): [Box((3,), (9,))]})
    ['layers.3.w']
    """
    return [name.format(*min(boxes).start) for (name, _), boxes in sorted(members.items()) if boxes]


_Row = tuple[Key, str, tuple[int, ...], tuple[int, ...], str, tuple[int, ...] | None, int]
"""Family, engine, start and stop of a box, its dtype and granule, and the number of a list of processes."""


@define(eq=False)
class _Gathered:
    """One side while it is collected: what its manifests say, row by row, equal boxes as often as they come."""

    rows: list[_Row] = field(factory=list)
    processes: list[Processes] = field(factory=list)
    declared: dict[tuple[Key, str], set[Box]] = field(factory=lambda: defaultdict(set))
    second: dict[Key, set[Box]] = field(factory=lambda: defaultdict(set))

    def add(self, part: _NamedPart, at: Mapping[str, int]) -> None:
        """Note that the lists of processes in `at`, by engine, have what is in a part."""
        for box, dtype, granule in part.regions:
            if all(map(lt, box.start, box.stop)):
                for engine, processes in at.items():
                    self.rows.append((part.key, engine, box.start, box.stop, dtype, granule, processes))

    def by_engine(self) -> dict[Key, dict[str, tuple[Box, ...]]]:
        """The members of each family, by engine."""
        found: dict[Key, dict[str, tuple[Box, ...]]] = defaultdict(dict)
        for (key, engine), boxes in self.declared.items():
            found[key][engine] = disjoint(boxes)
        return dict(found)


def collect(world: World) -> Sides:
    """Both sides of a world, in an order that depends on nothing but what they hold."""
    naming = resolve(world)
    source, target = _gather(world, "source", naming), _gather(world, "target", naming)
    wanted, held = target.by_engine(), source.by_engine()
    keys = tuple(sorted({*held, *wanted, *source.second}))
    dtypes = tuple(sorted({row[4] for side in (source, target) for row in side.rows}))
    engines = world.engines
    dims = max([name.count("{}") + len(shape) for name, shape in keys], default=1) or 1
    number = {key: i for i, key in enumerate(keys)}
    groups = {engine: i for i, engine in enumerate(engines)}
    return Sides(
        world, naming, keys, dtypes, engines,
        sources=_rows(source, dims, dtypes, [number[row[0]] for row in source.rows]),
        targets=_rows(target, dims, dtypes, [number[row[0]] * len(engines) + groups[row[1]] for row in target.rows]),
        wanted=_members(wanted), held=_members(held), declared=wanted,
        offered={key: disjoint(boxes) for key, boxes in source.second.items()},
    )  # fmt: skip


def _members(by_engine: dict[Key, dict[str, tuple[Box, ...]]]) -> dict[Key, tuple[Box, ...]]:
    """The members of each family, of all engines together."""
    every = {key: disjoint(chain.from_iterable(at.values())) for key, at in by_engine.items()}
    return {key: boxes for key, boxes in every.items() if boxes}


def _gather(world: World, side: Side, naming: Naming) -> _Gathered:
    gathered = _Gathered()
    seats: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for seat, number in zip(world.seats, world.manifest_of, strict=True):
        if seat.side == side:
            seats[number][seat.engine if side == "target" else ""].append(seat.process)
    for number in manifests_of(world, side):
        at: dict[str, int] = {}
        for engine, processes in seats[number].items():
            at[engine] = len(gathered.processes)
            gathered.processes.append(tuple(sorted(processes)))
        manifest = world.manifests[number]
        for part in _renamed_parts(manifest, naming.renamed.get(number, {}) if side == "target" else {}):
            for engine in at:
                gathered.declared[part.key, engine].update(part.members)
            gathered.add(part, at)
        for part in _second_names(manifest, naming.offered.get(number, ()) if side == "source" else ()):
            gathered.second[part.key].update(part.members)
            gathered.add(part, at)
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


def _second_names(manifest: Manifest, pairs: Iterable[tuple[str, str]]) -> Iterator[_NamedPart]:
    for other, name in pairs:
        yield from _under_name(manifest, name, other)


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


def _rows(side: _Gathered, dims: int, dtypes: tuple[str, ...], groups: list[int]) -> Rows:
    """A side's rows with equal ones joined, and boxes disjoint."""
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    boxes = Boxes(
        np.array(groups, np.int64),
        pad([row[2] for row in side.rows], dims, 0),
        pad([row[3] for row in side.rows], dims, 1),
    )
    dtype = np.array([number[row[4]] for row in side.rows], np.int64)
    order = np.lexsort((dtype, *boxes.stop.T[::-1], *boxes.start.T[::-1], boxes.group))
    boxes, dtype = boxes.take(order), dtype[order]
    new_box = _changes(np.column_stack((boxes.group, boxes.start, boxes.stop)))
    first = np.flatnonzero(new_box | _changes(dtype[:, None]))
    processes = _joined(side, order, first)
    granule = pad([_granule(row) for row in side.rows], dims, 1)[order]
    granule = np.lcm.reduceat(granule, first, axis=0) if len(first) else granule
    box = np.cumsum(new_box)[first] - 1
    alone, atom, of_box = atoms(boxes.take(np.flatnonzero(new_box)))
    if len(atom) == len(alone) == int(new_box.sum()):
        return _listed(alone, box, dtype[first], granule, processes)
    return _merged(alone, (atom, of_box), (box, dtype[first], granule), processes)


def _changes(table: Ints) -> npt.NDArray[np.bool_]:
    """Whether each row differs from the one before it; the first does."""
    new = np.ones(len(table), bool)
    new[1:] = np.any(table[1:] != table[:-1], axis=1)
    return new


def _granule(row: _Row) -> tuple[int, ...]:
    """The granule of a row for all dims of its box."""
    return (1,) * (len(row[2]) - len(row[5])) + row[5] if row[5] else ()


def _joined(side: _Gathered, order: Ints, first: Ints) -> list[Processes]:
    """The processes of each run of equal rows."""
    who = [side.rows[row][6] for row in order.tolist()]
    ends = [*first[1:].tolist(), len(who)]
    return [
        side.processes[who[a]] if b - a == 1 else tuple(p for i in who[a:b] for p in side.processes[i])
        for a, b in zip(first.tolist(), ends, strict=False)
    ]


def _merged(
    boxes: Boxes, covers: tuple[Ints, Ints], kinds: tuple[Ints, Ints, Ints], processes: list[Processes]
) -> Rows:
    """Rows of boxes that were cut up: each takes what all boxes that cover it have."""
    box, dtype, granule = kinds
    first = np.searchsorted(box, np.arange(int(box[-1]) + 2)).tolist()
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for atom, of_box in zip(covers[0].tolist(), covers[1].tolist(), strict=True):
        for entry in range(first[of_box], first[of_box + 1]):
            rows[atom, int(dtype[entry])].append(entry)
    places = np.array(sorted(rows), np.int64)
    entries = [rows[atom, kind] for atom, kind in places.tolist()]
    granules = np.stack([np.lcm.reduce(granule[each], axis=0) for each in entries])
    who = [tuple(p for entry in each for p in processes[entry]) for each in entries]
    return _listed(boxes, places[:, 0], places[:, 1], granules, who)


def _listed(boxes: Boxes, box: Ints, dtype: Ints, granule: Ints, processes: list[Processes]) -> Rows:
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
