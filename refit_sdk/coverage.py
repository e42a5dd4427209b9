"""Whether the two sides fit together: every reason why not, before anything moves.

1. Names: every member that a target wants is one that sources have, in the same shape; every member that sources have
   is wanted, tied to one that is, or ignored.
2. Elements: what an engine's ranks hold of a tensor makes it whole; sources hold all of it.
3. Kinds: casts are permitted, cuts fall on granules, a rank wants an element in one dtype.
4. Rules: all match something, no tensor is without a route, routes lead to transports that are there.

Each finding is one line, with names, boxes and what to do. Element counts find what is wrong; only then are boxes taken
apart to say where.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from math import prod

import numpy as np

from refit_sdk.aliases import member
from refit_sdk.box import Box
from refit_sdk.dtypes import DEFAULT_CASTS, ITEMSIZE, is_lossless
from refit_sdk.families import Key, Sides, examples
from refit_sdk.overlap import Boxes, atoms, meet, pairs, subtract, volume
from refit_sdk.pieces import Pieces, Ruled
from refit_sdk.routes import Rules, partition
from refit_sdk.settings import AUTO, Settings
from refit_sdk.world import World

Members = Mapping[Key, Sequence[Box]]

HINTS = 20
"""How many unknown names get nearest names: comparing strings is slow, and the first few tell."""


def label(name: str, boxes: Iterable[Box]) -> str:
    """Members of a family by name: the one there is, or the first, the last and how many.

    >>> label("layers.{}.w", [Box((0,), (4,))]), label("head", [Box((), ())])
    ('layers.0.w … layers.3.w (4 tensors)', 'head')
    """
    ordered = sorted(boxes)
    count = sum(box.size for box in ordered)
    first = name.format(*ordered[0].start)
    if count == 1:
        return first
    return f"{first} … {name.format(*(stop - 1 for stop in ordered[-1].stop))} ({count} tensors)"


def missing(wanted: Members, known: Members) -> dict[Key, list[Box]]:
    """Members in `wanted` that aren't in `known`, by family.

    >>> missing({("w.{}", ()): [Box((0,), (4,))]}, {("w.{}", ()): [Box((1,), (9,))]})
    {('w.{}', ()): [Box((0,), (1,))]}
    """
    keys = sorted(wanted)
    dims = max([name.count("{}") for name, _ in keys], default=0) or 1
    need, have = _disjoint(wanted, keys, dims), _disjoint(known, keys, dims)
    found = pairs(need, have)
    covered = np.zeros(len(need), np.int64)
    np.add.at(covered, found[0], volume(*meet(need, have, found)))
    left: dict[Key, list[Box]] = defaultdict(list)
    for row in np.flatnonzero(covered < need.volume).tolist():
        key = keys[int(need.group[row])]
        left[key] += subtract(need.box(row, key[0].count("{}")), known.get(key, ()))
    return dict(left)


def _disjoint(members: Members, keys: Sequence[Key], dims: int) -> Boxes:
    rows = ((i, box) for i, key in enumerate(keys) for box in sorted(set(members.get(key, ()))))
    return atoms(Boxes.of(rows, dims=dims))[0]


def check_world(world: World) -> Iterator[str]:
    """Violations of the seats themselves."""
    for side in ("source", "target"):
        if not any(seat.side == side for seat in world.seats):
            yield f"no {side} has joined: there is nothing to move; start at least one rank of that side"
    places = Counter((seat.side, seat.engine, seat.process) for seat in world.seats)
    for (side, engine, process), count in sorted(places.items()):
        if count > 1:
            place = engine or "the sources"
            yield f"process {process} has {count} ranks of {place}; a process can be one rank of a {side}"
    yield from _empty(world)


def _empty(world: World) -> Iterator[str]:
    """The sources, or an engine, of which no rank holds any tensor."""
    holding = {seat.engine for seat in world.seats if world.manifest(seat).parts}
    for engine in sorted({seat.engine for seat in world.seats} - holding):
        who = f"engine {engine} holds" if engine else "the sources hold"
        never = " that isn't frozen" if engine else ""
        yield (
            f"{who} no tensor{never}: no rank's model has a parameter or a persistent buffer; "
            "see that the right object was given, after its weights were made"
        )


def check_names(sides: Sides, settings: Settings) -> Iterator[str]:
    """Violations of step 1."""
    known = {key: (*sides.held.get(key, ()), *sides.offered.get(key, ())) for key in {*sides.held, *sides.offered}}
    unknown = missing(sides.wanted, known)
    if sides.wanted and sides.held and not {name for name, _ in sides.wanted} & {name for name, _ in known}:
        yield (
            f"no name matches: targets want {_count(sides.wanted)} tensors (as {_example(sides.wanted)}), sources have "
            f"{_count(sides.held)} (as {_example(sides.held)}); check the prefixes of both models' names"
        )
    yield from _unknown(sides, unknown, known)
    yield from _unwanted(sides, settings)


def _count(members: Members) -> int:
    return int(
        _disjoint(members, sorted(members), max((k[0].count("{}") for k in members), default=0) or 1).volume.sum()
    )


def _example(members: Members) -> str:
    key = min(members)
    return label(key[0], [Box(box.start, (a + 1 for a in box.start)) for box in islice(sorted(members[key]), 1)])


def _unknown(sides: Sides, unknown: Members, known: Members) -> Iterator[str]:
    """Wanted members that sources lack: in another shape, or at all."""
    others: dict[str, list[tuple[tuple[int, ...], Box]]] = defaultdict(list)
    for (name, shape), boxes in sorted(known.items()):
        others[name] += ((shape, box) for box in boxes)
    hints = 0
    for (name, shape), boxes in sorted(unknown.items()):
        by_shape: dict[tuple[int, ...], set[Box]] = defaultdict(set)
        for other, held in others[name]:
            by_shape[other].update(shared for box in boxes if (shared := box.intersect(held)) is not None)
        for other in sorted(other for other in by_shape if other != shape and by_shape[other]):
            which = label(name, by_shape[other])
            yield f"{which}: the shapes disagree, {other} at the sources and {shape} at the targets"
        reshaped = [box for other, shared in by_shape.items() if other != shape for box in shared]
        rest = [box for whole in boxes for box in subtract(whole, reshaped)]
        if rest:
            hints += 1
            hint = _hint(name, known, others) if hints <= HINTS else ""
            yield f"{label(name, rest)} {shape}: {_who(sides, (name, shape))} wants it, and no source has it{hint}"


def _hint(name: str, known: Members, others: Mapping[str, list[tuple[tuple[int, ...], Box]]]) -> str:
    if others.get(name):
        return f"; sources have {label(name, {box for _, box in others[name]})}"
    near = get_close_matches(name, sorted({name for name, _ in known}), n=1)
    return f"; the nearest name is {label(near[0], {box for _, box in others[near[0]]})}" if near else ""


def _who(sides: Sides, key: Key) -> str:
    return ", ".join(sorted(sides.declared.get(key, ())))


def _unwanted(sides: Sides, settings: Settings) -> Iterator[str]:
    """Source members that nobody wants, and ignores that ignore nothing."""
    ignores = Rules("ignore", settings.ignore)
    fine: dict[Key, list[Box]] = defaultdict(list)
    shapes: dict[str, list[Box]] = defaultdict(list)
    for (name, _), boxes in sides.wanted.items():
        shapes[name] += boxes
    hits, tied, patterns = [], _tied(sides), ignores.patterns
    for key, boxes in sides.held.items():
        fine[key] += shapes[key[0]] + tied.get(key[0], [])
        for members, rules in partition(patterns, key[0], boxes) if patterns else ():
            hits.append(rules)
            fine[key] += members if rules else ()
    for (name, _), unwanted in sorted(missing(sides.held, fine).items()):
        yield (
            f"{label(name, unwanted)}: sources have it and no target wants it; name it in ignore=, "
            "or check the targets' names"
        )
    yield from ignores.useless(hits, names=examples(sides.held))


def _tied(sides: Sides) -> dict[str, list[Box]]:
    """Members, by the name of their family, that are tied to something wanted."""
    wanted: dict[str, list[Box]] = defaultdict(list)
    for (name, _), boxes in sides.wanted.items() if sides.naming.ties else ():
        wanted[name] += boxes
    tied: dict[str, list[Box]] = defaultdict(list)
    for tie in sides.naming.ties:
        names = [member(name) for name in tie]
        if any(held.contains(box) for name, box in names for held in wanted[name]):
            for name, box in names:
                tied[name].append(box)
    return tied


def check_elements(sides: Sides, pieces: Pieces) -> Iterator[str]:
    """Violations of step 2."""
    yield from _incomplete(sides)
    arriving = np.zeros(len(sides.targets.box), np.int64)
    np.add.at(arriving, pieces.target, pieces.volume)
    known = {key: (*sides.held.get(key, ()), *sides.offered.get(key, ())) for key in {*sides.held, *sides.offered}}
    short = np.flatnonzero(arriving < sides.targets.boxes.volume[sides.targets.box]).tolist()
    for row in short:
        yield from _uncovered(sides, pieces, row, known)


def _uncovered(sides: Sides, pieces: Pieces, row: int, known: Members) -> Iterator[str]:
    """The regions of one target row that no source holds; members that none has at all are named elsewhere."""
    group = int(sides.targets.boxes.group[sides.targets.box[row]])
    name, shape = key = sides.keys[group // len(sides.engines)]
    ndim, stacked = name.count("{}") + len(shape), name.count("{}")
    box = sides.targets.boxes.box(int(sides.targets.box[row]), ndim)
    of_row = Boxes(pieces.family, pieces.start, pieces.stop).take(np.flatnonzero(pieces.target == row))
    rest = subtract(box, [of_row.box(i, ndim) for i in range(len(of_row))])
    ranks = _ranks(sides, sides.engines[group % len(sides.engines)], sides.targets.sets[int(sides.targets.who[row])])
    for left in rest:
        members, region = left.split_dims(stacked)
        for held in known.get(key, ()):
            shared = members.intersect(held)
            if shared is not None:
                yield f"{label(name, [shared])} {shape}: no source holds {region}, which {ranks} needs"


def _ranks(sides: Sides, engine: str, processes: Collection[int]) -> str:
    seats = [str(s) for s in sorted(sides.world.seats) if s.engine == engine and s.process in processes]
    return ", ".join(seats[:4]) + (f" and {len(seats) - 4} more" if len(seats) > 4 else "")


def _incomplete(sides: Sides) -> Iterator[str]:
    """Tensors of which the ranks of an engine together hold less than they say there is."""
    held = np.zeros(len(sides.keys) * max(len(sides.engines), 1), np.int64)
    np.add.at(held, sides.targets.boxes.group, sides.targets.boxes.volume)
    for number, key in enumerate(sides.keys):
        for place, engine in enumerate(sides.engines):
            boxes = sides.declared.get(key, {}).get(engine, ())
            size = prod(key[1]) * sum(box.size for box in boxes)
            elements = int(held[number * len(sides.engines) + place])
            if elements < size:
                yield (
                    f"{label(key[0], boxes)} {key[1]}: the ranks of {engine} hold {elements} of its {size} elements; "
                    "the layout is incomplete, as when a sharded tensor isn't marked as one"
                )


def check_kinds(sides: Sides, pieces: Pieces, settings: Settings) -> Iterator[str]:
    """Violations of step 3."""
    yield from _casts(sides, pieces, settings)
    yield from _granules(sides, pieces)
    yield from _two_dtypes(sides)


def _casts(sides: Sides, pieces: Pieces, settings: Settings) -> Iterator[str]:
    kinds = np.stack(
        (pieces.family, sides.sources.dtype[pieces.source], sides.targets.dtype[pieces.target], pieces.casts), axis=1
    )
    changing = kinds[kinds[:, 1] != kinds[:, 2]]
    for family, a, b, permit in np.unique(changing, axis=0).tolist():
        source, target = sides.dtypes[a], sides.dtypes[b]
        pattern = sides.keys[family][0].replace("{}", "*")
        name = label(sides.keys[family][0], sides.wanted[sides.keys[family]])
        if settings.cast == "never":
            yield f"{name}: {source} at the sources, {target} at the targets, and cast='never' forbids any cast"
        elif not (is_lossless(source, target) or (source, target) in DEFAULT_CASTS or target in pieces.permits[permit]):
            yield f"{name}: {source} → {target} changes values; declare it, as casts=[({pattern!r}, {target!r})]"


def _granules(sides: Sides, pieces: Pieces) -> Iterator[str]:
    """Pieces whose edges aren't on the granules of both sides (the tensor's own edge is always fine)."""
    granule = np.lcm(sides.sources.granule[pieces.source], sides.targets.granule[pieces.target])
    edge = np.zeros((len(sides.keys), pieces.start.shape[1]), np.int64)
    for number, (name, shape) in enumerate(sides.keys):
        edge[number, name.count("{}") : name.count("{}") + len(shape)] = shape
    whole = (pieces.stop % granule == 0) | (pieces.stop == edge[pieces.family])
    wrong = np.flatnonzero(np.any((pieces.start % granule != 0) | ~whole, axis=1))
    seen = set()
    for row in wrong.tolist():
        name, shape = sides.keys[int(pieces.family[row])]
        stacked, ndim = name.count("{}"), name.count("{}") + len(shape)
        box = Box(pieces.start[row, stacked:ndim].tolist(), pieces.stop[row, stacked:ndim].tolist())
        line = f"{name} {shape}: a cut at {box} isn't on the granule {tuple(granule[row, stacked:ndim].tolist())}"
        if line not in seen:
            seen.add(line)
            yield f"{line}; both sides must cut at its multiples"


def _two_dtypes(sides: Sides) -> Iterator[str]:
    rows = np.flatnonzero(np.bincount(sides.targets.box, minlength=1)[sides.targets.box] > 1)
    for box in np.unique(sides.targets.box[rows]).tolist():
        kinds = np.flatnonzero(sides.targets.box == box).tolist()
        count = Counter(p for row in kinds for p in sides.targets.sets[int(sides.targets.who[row])])
        twice = [process for process, times in count.items() if times > 1]
        if twice:
            group = int(sides.targets.boxes.group[box])
            name, shape = sides.keys[group // len(sides.engines)]
            dtypes = ", ".join(sides.dtypes[int(sides.targets.dtype[row])] for row in kinds)
            where = sides.targets.boxes.box(box, name.count("{}") + len(shape))
            ranks = _ranks(sides, sides.engines[group % len(sides.engines)], twice)
            yield f"{name} {where}: {ranks} has it in several dtypes ({dtypes}); let it have one"


def check_rules(sides: Sides, ruled: Ruled, settings: Settings, transports: Collection[str]) -> Iterator[str]:
    """Violations of step 4."""
    yield from ruled.useless
    for row in np.flatnonzero(ruled.route < 0).tolist():
        key = sides.keys[int(ruled.boxes.group[row])]
        members = ruled.boxes.box(row, key[0].count("{}"))
        yield f"{label(key[0], [members])}: no route matches it; end the routes with ('*', a transport)"
    for pattern, transport in settings.routes:
        if transport != AUTO and transport not in transports:
            yield f"route {pattern!r} leads to {transport!r}; the transports are {', '.join(sorted(transports))}"
    for pattern, dtype in settings.casts:
        if dtype not in ITEMSIZE:
            yield f"cast {pattern!r} → {dtype!r}: no such dtype"
