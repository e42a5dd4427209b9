"""Moves and their steps: pieces with servers, handed to their transports, and what comes back checked.

1. A process that holds what it needs copies it by itself: it leaves the needs of the piece.
2. Pieces that somebody else needs are balanced over their holders (`refit_sdk.balance`); each share is a move: one
   box, one server, the processes of one engine that need it.
3. Moves of one transport, with as many dims and as wide elements, are handed over together. Moves of transports that
   relay are cut to a quarter of a window first, so that later rounds of one go on beside earlier rounds of the next.
4. The answer is checked: every process that needs a move gets every element of it once, from a process that has it by
   then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from attrs import frozen

from refit_sdk.balance import share
from refit_sdk.box import Box
from refit_sdk.dtypes import itemsize
from refit_sdk.errors import PluginError, RefitError, UnsupportedMoveError
from refit_sdk.families import Processes, Sides, intern
from refit_sdk.overlap import Boxes, meet, pairs, volume
from refit_sdk.pieces import Family, Pieces
from refit_sdk.settings import Settings
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Ints, Moves, Steps, Transport
from refit_sdk.windows import Sizes, StepTable, fit


@frozen
class Move:
    """A box of a family, the processes that hold it, those of `engine` that need it, and the one that serves it.

    >>> Move("layers.{}.w", Box((0, 0), (2, 8)), "e", (0, 1), (2,), 0, 32).nbytes
    32
    """

    name: str
    box: Box
    engine: str
    holders: Processes
    needs: Processes
    server: int
    nbytes: int


@frozen(eq=False)
class MoveTable:
    """Moves as arrays: `holders` and `needs` are numbers in `holder_sets` and `need_sets`."""

    family: Ints
    engine: Ints
    start: Ints
    stop: Ints
    granule: Ints
    server: Ints
    holders: Ints
    needs: Ints
    holder_sets: tuple[Processes, ...]
    need_sets: tuple[Processes, ...]

    def __len__(self) -> int:
        return len(self.family)

    def copies(self, how: str, topology: Topology) -> Ints:
        """How often each move leaves its server: once a process, once a domain, or once."""
        return copies_of(self.need_sets, how, topology)[self.needs]


def copies_of(needs: tuple[Processes, ...], how: str, topology: Topology) -> Ints:
    """How often something that these processes need leaves its holder.

    >>> copies_of(((1,), (1, 2)), "direct", Topology.single(3)).tolist()
    [1, 2]
    >>> copies_of(((1,), (1, 2)), "domain", Topology.single(3)).tolist()
    [1, 1]
    """
    if how == "direct":
        return np.array([len(each) for each in needs], np.int64)
    if how == "domain":
        return np.array([len({topology.domain_of(process) for process in each}) for each in needs], np.int64)
    return np.array([min(len(each), 1) for each in needs], np.int64)


def sizes_of(families: tuple[Family, ...]) -> Sizes:
    """Element sizes and stacked dims by family."""
    return Sizes(
        np.array([itemsize(family.wire) for family in families], np.int64),
        np.array([family.num_stacked for family in families], np.int64),
    )


@frozen(eq=False)
class _Needed:
    """For each piece, the processes that need it from others, and those that have it themselves, as set numbers."""

    remote: Ints
    remote_sets: tuple[Processes, ...]
    local: Ints
    local_sets: tuple[Processes, ...]


def _needed(sides: Sides, pieces: Pieces) -> _Needed:
    holders, needs = sides.sources.who[pieces.source], sides.targets.who[pieces.target]
    count = max(len(sides.targets.sets), 1)
    pair, which = np.unique(holders * count + needs, return_inverse=True)
    both = [(set(sides.sources.sets[key // count]), sides.targets.sets[key % count]) for key in pair.tolist()]
    remote_sets, remote = intern(tuple(p for p in needed if p not in held) for held, needed in both)
    local_sets, local = intern(tuple(p for p in needed if p in held) for held, needed in both)
    which = which.reshape(-1)
    return _Needed(remote[which], remote_sets, local[which], local_sets)


def serve(
    sides: Sides, pieces: Pieces, families: tuple[Family, ...], number: Ints, *,
    settings: Settings, transports: Mapping[str, Transport], topology: Topology,
) -> tuple[MoveTable, StepTable]:  # fmt: skip
    """All moves, and the copies inside processes, as steps from a process to itself.

    `number` is the family of each piece.
    """
    needed = _needed(sides, pieces)
    engine = sides.targets.boxes.group[sides.targets.box[pieces.target]] % max(len(sides.engines), 1)
    granule = np.lcm(sides.sources.granule[pieces.source], sides.targets.granule[pieces.target])
    copies = _copies(families, number, needed, transports, topology)
    nbytes = pieces.volume * sizes_of(families).itemsize[number] if families else pieces.volume
    rows = np.flatnonzero(copies)
    weight = (nbytes * copies)[rows]
    quantum = max(1, min(settings.coalesce_bytes, int(weight.sum()) // (64 * max(1, _num_holders(sides)))))
    line = np.empty(len(rows), np.int64)
    line[np.lexsort((rows, number[rows], needed.remote[rows]))] = np.arange(len(rows))
    shares = share(
        pieces.start[rows], pieces.stop[rows], granule[rows],
        weight=weight, who=sides.sources.who[pieces.source[rows]], sets=sides.sources.sets, line=line, quantum=quantum,
    )  # fmt: skip
    of = rows[shares.piece]
    table = MoveTable(
        number[of], engine[of], shares.start, shares.stop, granule[of], shares.server,
        sides.sources.who[pieces.source[of]], needed.remote[of], sides.sources.sets, needed.remote_sets,
    )  # fmt: skip
    return table, _local(pieces, number, engine, granule, needed)


def _num_holders(sides: Sides) -> int:
    return len({process for each in sides.sources.sets for process in each})


def _copies(
    families: tuple[Family, ...], number: Ints, needed: _Needed, transports: Mapping[str, Transport], topology: Topology
) -> Ints:
    """How often each piece leaves its holder by its transport; 0 if nobody else needs it."""
    names = sorted({family.transport for family in families})
    if not names:
        return np.zeros(0, np.int64)
    table = np.stack([copies_of(needed.remote_sets, transports[name].capabilities.copies, topology) for name in names])
    which = np.array([names.index(family.transport) for family in families], np.int64)
    return table[which[number], needed.remote]


def _local(pieces: Pieces, number: Ints, engine: Ints, granule: Ints, needed: _Needed) -> StepTable:
    """Copies inside processes."""
    count = np.array([len(each) for each in needed.local_sets], np.int64)[needed.local]
    row = np.repeat(np.arange(len(pieces)), count)
    process = np.array([p for i in needed.local[count > 0].tolist() for p in needed.local_sets[i]], np.int64)
    none = np.full(len(row), -1, np.int64)
    return StepTable(
        number[row], engine[row], pieces.start[row], pieces.stop[row], granule[row], process, process, none, none, none
    )


def steps_of(
    table: MoveTable, families: tuple[Family, ...], rows: Ints, sides: Sides, *,
    transport: Transport, settings: Settings, topology: Topology,
) -> tuple[StepTable, Ints]:  # fmt: skip
    """The checked steps of one transport for the moves `rows`, of which parts are numbered as moves of their own; and
    the row in `table` of each of these."""
    sizes = sizes_of(families)
    none = np.full(len(rows), -1, np.int64)
    moves = StepTable(
        table.family[rows], table.engine[rows], table.start[rows], table.stop[rows], table.granule[rows],
        table.server[rows], none, rows, none, none,
    )  # fmt: skip
    if transport.capabilities.copies != "direct":
        moves = fit(moves, sizes, settings, limit=np.full(len(rows), max(1, settings.window_bytes // 4), np.int64))
    ndim = np.array([family.ndim for family in families], np.int64)[moves.family]
    kind = ndim * 64 + sizes.itemsize[moves.family]
    parts = [
        _call(table, moves, np.flatnonzero(kind == each), sides, transport=transport, topology=topology,
              ndim=int(each) // 64, itemsize=int(each) % 64, stacked=sizes.stacked)
        for each in np.unique(kind)
    ]  # fmt: skip
    return concat(parts or [moves]), moves.move


def concat(tables: list[StepTable]) -> StepTable:
    """Tables one after the other."""
    columns = [
        "family", "engine", "start", "stop", "granule", "src", "dst", "move", "round", "window",
    ]  # fmt: skip
    return StepTable(*(np.concatenate([getattr(table, column) for table in tables]) for column in columns))


def _call(
    table: MoveTable, moves: StepTable, rows: Ints, sides: Sides, *,
    transport: Transport, topology: Topology, ndim: int, itemsize: int, stacked: Ints,
) -> StepTable:  # fmt: skip
    """One question to a transport, and its answer as rows of the plan."""
    needs, need_start = _lists(table.need_sets, table.needs[moves.move[rows]])
    holders, holder_start = _lists(table.holder_sets, table.holders[moves.move[rows]])
    asked = Moves(
        moves.start[rows, :ndim],
        moves.stop[rows, :ndim],
        moves.src[rows],
        need_start,
        needs,
        holder_start,
        holders,
        itemsize,
        granule=moves.granule[rows, :ndim],
        family=moves.family[rows],
        stacked=stacked[moves.family[rows]],
        engine=moves.engine[rows],
        ranks=tuple(tuple(sorted({s.process for s in sides.world.seats if s.engine == e})) for e in sides.engines),
    )
    found = _asked(transport, asked, topology)
    engine = moves.engine[rows]
    _check(asked, found, transport.name, _members(sides, engine, found))
    move = rows[found.move]
    start, stop = moves.start[move].copy(), moves.stop[move].copy()
    start[:, :ndim], stop[:, :ndim] = found.start, found.stop
    return StepTable(
        moves.family[move],
        moves.engine[move],
        start,
        stop,
        moves.granule[move],
        found.src,
        found.dst,
        move,
        found.round,
        np.full(len(move), -1, np.int64),
    )


def _asked(transport: Transport, asked: Moves, topology: Topology) -> Steps:
    try:
        return transport.steps(asked, topology)
    except RefitError:
        raise
    except Exception as error:
        raise PluginError(
            f"transport {transport.name!r} failed when asked for the steps of {len(asked)} moves: "
            f"{type(error).__name__}: {error}; route those tensors to another, or mend it",
            plugin=transport.name,
        ) from error


def _lists(sets: tuple[Processes, ...], which: Ints) -> tuple[Ints, Ints]:
    """Set numbers as one list of their members, and where each begins."""
    count = np.array([len(each) for each in sets], np.int64)[which]
    begin = np.zeros(len(which) + 1, np.int64)
    np.cumsum(count, out=begin[1:])
    return np.array([process for i in which.tolist() for process in sets[i]], np.int64), begin


def _members(sides: Sides, engine: Ints, found: Steps) -> bool:
    """Whether both ends of every step are sources or in the engine of its move, as the groups of a fabric are."""
    allowed = np.zeros((max(len(sides.engines), 1), sides.world.num_processes), bool)
    for seat in sides.world.seats:
        allowed[slice(None) if seat.side == "source" else sides.engines.index(seat.engine), seat.process] = True
    ends = np.concatenate((found.src, found.dst))
    within = bool(np.all((ends >= 0) & (ends < sides.world.num_processes)))
    return within and bool(np.all(allowed[np.tile(engine[found.move], 2), ends]))


def _check(moves: Moves, steps: Steps, name: str, members: bool) -> None:
    """`PluginError` unless the steps bring each move to each of its needs once, in rounds that can be."""
    wrong = (
        _wrong(moves, steps) if members else "sends to or from a process that isn't a source or of the move's engine"
    )
    if wrong:
        raise PluginError(f"transport {name!r} {wrong}; it can't be used, tell its authors", plugin=name)


def _wrong(moves: Moves, steps: Steps) -> str:
    """What is wrong with a transport's answer, or nothing."""
    ends = (moves.need, moves.holder, steps.src, steps.dst)
    processes = 1 + max(int(each.max(initial=0)) for each in ends)
    lower, upper = moves.start[steps.move], moves.stop[steps.move]
    if bool(np.any((steps.start < lower) | (steps.stop > upper) | (steps.start >= steps.stop))):
        return "sends what isn't in the move"
    grain = moves.granule[steps.move]
    if bool(np.any((steps.start % grain != 0) | ((steps.stop % grain != 0) & (steps.stop != upper)))):
        return "cuts inside a granule"
    place = Boxes(steps.move * processes + steps.dst, steps.start, steps.stop)
    if len(steps) != len(np.unique(place.group)) and len(pairs(place, place)[0]) != len(steps):
        return "sends an element to a process twice"
    counts = np.diff(moves.need_start)
    due = np.repeat(np.arange(len(moves)), counts) * processes + moves.need
    if bool(np.any(_arriving(place, due) != np.repeat(volume(moves.start, moves.stop), counts))):
        return "doesn't bring all of a move to a process that needs it"
    return _wrong_order(moves, steps, place, processes)


def _arriving(place: Boxes, due: Ints) -> Ints:
    """The elements that arrive at each of the places that are due."""
    keys, which = np.unique(due, return_inverse=True)
    at = np.minimum(np.searchsorted(keys, place.group), max(len(keys) - 1, 0))
    known = np.flatnonzero(keys[at] == place.group) if len(keys) else np.zeros(0, np.int64)
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, at[known], place.volume[known])
    found: Ints = sums[which.reshape(-1)]
    return found


def _wrong_order(moves: Moves, steps: Steps, place: Boxes, processes: int) -> str:
    """Whether every sender holds what it sends, or got it in an earlier round."""
    held = np.repeat(np.arange(len(moves)), np.diff(moves.holder_start)) * processes + moves.holder
    relayed = np.flatnonzero(~np.isin(steps.move * processes + steps.src, held))
    if not len(relayed):
        return ""
    sent = Boxes((steps.move * processes + steps.src)[relayed], steps.start[relayed], steps.stop[relayed])
    found = pairs(sent, place)
    earlier = steps.round[found[1]] < steps.round[relayed[found[0]]]
    found = (found[0][earlier], found[1][earlier])
    had = np.zeros(len(relayed), np.int64)
    np.add.at(had, found[0], volume(*meet(sent, place, found)))
    return "relays what hasn't arrived by then" if bool(np.any(had != sent.volume)) else ""


def refuse(
    families: tuple[Family, ...], table: MoveTable, transports: Mapping[str, Transport], *, first: int = 0
) -> None:
    """`UnsupportedMoveError` for the first transport that was routed something outside its capabilities. The families
    have numbers from `first` on.
    """
    for number, family in enumerate(families, first):
        able = transports[family.transport].capabilities
        for need in _beyond(able, family, table, number):
            raise UnsupportedMoveError(
                f"{family.name} {family.shape} is routed to {family.transport!r}, which can't do {need}; route it to "
                "another transport, or change the layout",
                transport=family.transport,
                need=need,
            )


def _beyond(able: Capabilities, family: Family, table: MoveTable, number: int) -> Iterator[str]:
    """What a family needs that a transport isn't able to do."""
    if able.max_ndim is not None and family.ndim > able.max_ndim:
        yield f"{family.ndim} dims (at most {able.max_ndim})"
    if able.dtypes is not None and family.wire not in able.dtypes:
        yield f"dtype {family.wire} (only {', '.join(sorted(able.dtypes))})"
    if not able.casts and family.source_dtype != family.target_dtype:
        yield f"a cast {family.source_dtype} → {family.target_dtype}"
    for most, sets, which, side in (
        (able.max_sources, table.holder_sets, table.holders, "sources"),
        (able.max_targets, table.need_sets, table.needs, "targets"),
    ):
        if most is not None:
            used = np.unique(which[table.family == number]).tolist()
            count = len({process for i in used for process in sets[i]})
            if count > most:
                yield f"{count} {side} (at most {most})"
