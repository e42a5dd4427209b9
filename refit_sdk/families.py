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

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from refit_sdk.aliases import Naming, manifests_of, member, resolve
from refit_sdk.box import Box
from refit_sdk.overlap import Boxes, atoms, disjoint, pad, spread, subtract
from refit_sdk.tensor import Members
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


@frozen(eq=False)
class _Kind:
    """Boxes (n, dims) that a part has in one dtype, with one granule. None is empty."""

    start: Ints
    stop: Ints
    dtype: str
    granule: tuple[int, ...] | None


@frozen(eq=False)
class _Chunk:
    """Rows of a side: the boxes of a kind, of a family, at an engine, at the processes of a list with that number."""

    key: Key
    engine: str
    kind: _Kind
    processes: int

    def __len__(self) -> int:
        return len(self.kind.start)


@define(eq=False)
class _Gathered:
    """One side while it is collected: what its manifests say, equal boxes as often as they come."""

    chunks: list[_Chunk] = field(factory=list)
    processes: list[Processes] = field(factory=list)
    declared: dict[tuple[Key, str], set[Members]] = field(factory=lambda: defaultdict(set))
    second: dict[Key, set[Box]] = field(factory=lambda: defaultdict(set))

    def add(self, part: _NamedPart, at: Mapping[str, int]) -> None:
        """Note that the lists of processes in `at`, by engine, have what is in a part."""
        for kind in part.kinds:
            if len(kind.start):
                self.chunks += (_Chunk(part.key, engine, kind, processes) for engine, processes in at.items())

    def by_engine(self) -> dict[Key, dict[str, tuple[Box, ...]]]:
        """The members of each family, by engine."""
        found: dict[Key, dict[str, tuple[Box, ...]]] = defaultdict(dict)
        alike: dict[frozenset[Members], tuple[Box, ...]] = {}
        for (key, engine), several in self.declared.items():
            each = frozenset(several)
            if each not in alike:
                alike[each] = _disjoint(each)
            found[key][engine] = alike[each]
        return dict(found)


def collect(world: World) -> Sides:
    """Both sides of a world, in an order that depends on nothing but what they hold."""
    naming = resolve(world)
    source, target = _gather(world, "source", naming), _gather(world, "target", naming)
    wanted, held = target.by_engine(), source.by_engine()
    keys = tuple(sorted({*held, *wanted, *source.second}))
    dtypes = tuple(sorted({chunk.kind.dtype for side in (source, target) for chunk in side.chunks}))
    engines = world.engines
    dims = max([name.count("{}") + len(shape) for name, shape in keys], default=1) or 1
    number = {key: i for i, key in enumerate(keys)}
    groups = {engine: i for i, engine in enumerate(engines)}
    return Sides(
        world, naming, keys, dtypes, engines,
        sources=_rows(source, dims, dtypes, [number[chunk.key] for chunk in source.chunks]),
        targets=_rows(target, dims, dtypes, [number[c.key] * len(engines) + groups[c.engine] for c in target.chunks]),
        wanted=_members(wanted), held=_members(held), declared=wanted,
        offered={key: disjoint(boxes) for key, boxes in source.second.items()},
    )  # fmt: skip


def _members(by_engine: dict[Key, dict[str, tuple[Box, ...]]]) -> dict[Key, tuple[Box, ...]]:
    """The members of each family, of all engines together."""
    alike: dict[frozenset[tuple[Box, ...]], tuple[Box, ...]] = {}
    for at in by_engine.values():
        each = frozenset(at.values())
        if each not in alike:
            alike[each] = disjoint(chain.from_iterable(each))
    every = {key: alike[frozenset(at.values())] for key, at in by_engine.items()}
    return {key: boxes for key, boxes in every.items() if boxes}


def _disjoint(several: Iterable[Members]) -> tuple[Box, ...]:
    """Disjoint boxes of the same members, in order."""
    listed = [members for members in several if len(members)]
    if sum(map(len, listed)) < 2 or not listed[0].ndim:
        return disjoint(chain.from_iterable(listed))
    corners = np.concatenate([np.hstack((members.start, members.stop)) for members in listed])
    corners = corners[np.lexsort(corners.T[::-1])]
    start, stop = np.hsplit(corners[_changes(corners)], 2)
    found = atoms(Boxes(np.zeros(len(start), np.int64), start, stop))[0]
    return tuple(map(Box, found.start.tolist(), found.stop.tolist()))


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
                gathered.declared[part.key, engine].add(part.members)
            gathered.add(part, at)
        for part in _second_names(manifest, naming.offered.get(number, ()) if side == "source" else ()):
            gathered.second[part.key].update(part.members)
            gathered.add(part, at)
    return gathered


class _NamedPart:
    """A part, or a member of one under another name."""

    __slots__ = ("key", "kinds", "members")

    def __init__(self, part: Part) -> None:
        self.key: Key = (part.spec.name, part.spec.shape)
        self.members = part.spec.members
        self.kinds = [_kind(g.members, g.box, g.dtype, g.granule) for g in part.regions.groups]


def _kind(members: Members, box: Box, dtype: str, granule: tuple[int, ...] | None) -> _Kind:
    """The regions of these members that aren't empty."""
    own = [np.tile(np.array(corner, np.int64), (len(members), 1)) for corner in (box.start, box.stop)]
    start, stop = np.hstack((members.start, own[0])), np.hstack((members.stop, own[1]))
    some = np.all(start < stop, axis=1)
    return _Kind(start[some], stop[some], dtype, granule)


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
    kept.members = _rest(part.spec.members, taken)
    kept.kinds = [_kind(_rest(g.members, taken), g.box, g.dtype, g.granule) for g in part.regions.groups]
    return kept


def _rest(members: Members, taken: list[Box]) -> Members:
    return Members(rest for box in members for rest in subtract(box, taken))


def _under_name(manifest: Manifest, name: str, other: str) -> Iterator[_NamedPart]:
    """One member of a manifest as a part of its own, under its other name."""
    (template, index), (other_template, other_index) = member(name), member(other)
    for part in manifest.parts:
        if part.spec.name == template and any(box.contains(index) for box in part.spec.members):
            found = _NamedPart(part)
            found.key = (other_template, part.spec.shape)
            found.members = Members([other_index])
            found.kinds = [
                _kind(found.members, group.box, group.dtype, group.granule)
                for group in part.regions.groups
                if any(box.contains(index) for box in group.members)
            ]
            yield found


def _rows(side: _Gathered, dims: int, dtypes: tuple[str, ...], groups: list[int]) -> Rows:
    """A side's rows with equal ones joined, and boxes disjoint."""
    number = {dtype: i for i, dtype in enumerate(dtypes)}
    counts = [len(chunk) for chunk in side.chunks]
    boxes = Boxes(
        np.repeat(np.array(groups, np.int64), counts),
        _padded([chunk.kind.start for chunk in side.chunks], dims, 0),
        _padded([chunk.kind.stop for chunk in side.chunks], dims, 1),
    )
    dtype = np.repeat(np.array([number[chunk.kind.dtype] for chunk in side.chunks], np.int64), counts)
    order = np.lexsort((dtype, *boxes.stop.T[::-1], *boxes.start.T[::-1], boxes.group))
    boxes, dtype = boxes.take(order), dtype[order]
    new_box = _changes(np.column_stack((boxes.group, boxes.start, boxes.stop)))
    first = np.flatnonzero(new_box | _changes(dtype[:, None]))
    who = np.repeat(np.array([chunk.processes for chunk in side.chunks], np.int64), counts)[order]
    processes = _joined(side, who, first)
    granule = np.repeat(pad([_granule(chunk) for chunk in side.chunks], dims, 1), counts, axis=0)[order]
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


def _padded(corners: list[Ints], dims: int, value: int) -> Ints:
    """Arrays of at most `dims` columns under each other, filled up with `value`."""
    full = [np.full((len(each), dims), value, np.int64) for each in corners]
    for wide, each in zip(full, corners, strict=True):
        wide[:, : each.shape[1]] = each
    return np.concatenate(full) if full else np.zeros((0, dims), np.int64)


def _granule(chunk: _Chunk) -> tuple[int, ...]:
    """The granule of a chunk for all dims of its boxes."""
    granule = chunk.kind.granule
    return (1,) * (chunk.kind.start.shape[1] - len(granule)) + granule if granule else ()


def _joined(side: _Gathered, who: Ints, first: Ints) -> list[Processes]:
    """The processes of each run of equal rows; a run begins at each of `first`."""
    numbers = who.tolist()
    ends = [*first[1:].tolist(), len(numbers)]
    return [
        side.processes[numbers[a]] if b - a == 1 else tuple(p for i in numbers[a:b] for p in side.processes[i])
        for a, b in zip(first.tolist(), ends, strict=False)
    ]


def _merged(
    boxes: Boxes, covers: tuple[Ints, Ints], kinds: tuple[Ints, Ints, Ints], processes: list[Processes]
) -> Rows:
    """Rows of boxes that were cut up: each takes what all boxes that cover it have."""
    box, dtype, granule = kinds
    begin = np.searchsorted(box, np.arange(int(box[-1]) + 2))
    pair, nth = spread(np.diff(begin)[covers[1]])
    atom, entry = covers[0][pair], begin[covers[1][pair]] + nth
    order = np.lexsort((entry, dtype[entry], atom))
    atom, entry = atom[order], entry[order]
    first = np.flatnonzero(_changes(np.column_stack((atom, dtype[entry]))))
    ends, entries = [*first[1:].tolist(), len(entry)], entry.tolist()
    who = [
        processes[entries[a]] if b - a == 1 else tuple(p for i in entries[a:b] for p in processes[i])
        for a, b in zip(first.tolist(), ends, strict=True)
    ]
    granules = np.lcm.reduceat(granule[entry], first, axis=0)
    return _listed(boxes, atom[first], dtype[entry][first], granules, who)


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
