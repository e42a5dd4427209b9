"""A plan in figures: a row a family, totals, and what gather-broadcast would have moved."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from refit_sdk.cost import Bounds
from refit_sdk.estimate import Load, NicBounds, loads, nic_bounds
from refit_sdk.families import Sides
from refit_sdk.moves import sizes_of
from refit_sdk.overlap import Boxes, atoms, canonical, spread
from refit_sdk.transport import Ints
from refit_sdk.windows import total

if TYPE_CHECKING:
    from refit_sdk.pieces import Family
    from refit_sdk.plan import Plan


@frozen
class Row:
    """One family: `tensors` checkpoint tensors of `shape`; bytes that go between processes, of which the busiest one
    sends `busiest_nbytes`; and bytes that are copied inside processes. `share` is that of all bytes between processes.
    """

    name: str
    tensors: int
    shape: tuple[int, ...]
    source_dtype: str
    target_dtype: str
    wire_dtype: str
    transport: str
    pattern: str
    moves: int
    nbytes: int
    share: float
    local_nbytes: int
    busiest: str
    busiest_nbytes: int
    rounds: int
    why: str


@frozen
class RuleRow:
    """What a route's rule carries by one transport: `rounds` of steps over `links` (directed pairs of processes inside
    a host or domain, and between), and what it would take by itself, in nanoseconds, and by what."""

    pattern: str
    transport: str
    tensors: int
    nbytes: int
    share: float
    rounds: int
    links: tuple[int, int]
    nanoseconds: int
    slowest: str


@frozen
class Totals:
    """The whole plan, in bytes: what goes between processes, what stays inside one, what gather-broadcast would move;
    the busiest sender and receiver, beside the bounds that no plan can go below; the load of the busiest NIC and what
    else takes time, beside the least for NICs; and what a push would take by the topology's speeds, in nanoseconds.
    """

    tensors: int
    moves: int
    windows: int
    nbytes: int
    local_nbytes: int
    gather_broadcast_nbytes: int
    busiest_sender: str
    sent_nbytes: int
    busiest_receiver: str
    received_nbytes: int
    bounds: Bounds
    load: Load
    nic_bounds: NicBounds
    predicted_ns: int
    bound_ns: int


def gathered(sides: Sides, families: tuple[Family, ...]) -> tuple[int, ...]:
    """Bytes of one member of each family that the rank holding most of it would still have to gather, on average."""
    rows = sides.sources
    count = np.array([len(each) for each in rows.sets], np.int64)[rows.who]
    row, nth = spread(count)
    listed = np.array([process for each in rows.sets for process in each], np.int64)
    first = np.cumsum([0, *(len(each) for each in rows.sets)])
    held = np.zeros((len(sides.keys), sides.world.num_processes), np.int64)
    place = rows.boxes.group[rows.box[row]], listed[first[rows.who[row]] + nth]
    np.add.at(held, place, rows.boxes.volume[rows.box[row]])
    number = {key: i for i, key in enumerate(sides.keys)}
    itemsize = sizes_of(families).itemsize.tolist()
    left = []
    for family, width in zip(families, itemsize, strict=True):
        key = (family.name, family.shape)
        members = max(1, sum(box.size for box in sides.wanted.get(key, ())))
        left.append(max(0, prod(family.shape) - int(held[number[key]].max(initial=0)) // members) * width)
    return tuple(left)


def rows_of(plan: Plan) -> list[Row]:
    """The rows of a plan, in the order of its families."""
    sizes, count = sizes_of(plan.families), len(plan.families)
    nbytes = _by(plan.steps.family, sizes.nbytes(plan.steps), count)
    local = _by(plan.copies.family, sizes.nbytes(plan.copies), count)
    moves, everything = _by(plan.table.family, np.ones(len(plan.table), np.int64), count), max(int(nbytes.sum()), 1)
    tensors, busiest, rounds = _tensors(plan), _busiest(plan, count), _rounds(plan)
    return [
        Row(
            family.name, tensors[i], family.shape, family.source_dtype, family.target_dtype, family.wire,
            family.transport, plan.settings.routes[family.rule][0], int(moves[i]), int(nbytes[i]),
            int(nbytes[i]) / everything, int(local[i]), *busiest[i], rounds[i], plan.whys[i],
        )
        for i, family in enumerate(plan.families)
    ]  # fmt: skip


def _rounds(plan: Plan) -> list[int]:
    """How many rounds each family's steps have."""
    steps, count = plan.steps, len(plan.families)
    known = np.unique(np.stack((steps.family, steps.round)), axis=1)[0]
    rounds: list[int] = np.bincount(known, minlength=count).tolist()
    return rounds


def rules_of(plan: Plan) -> list[RuleRow]:
    """What each rule carries, in order of the rules, by each of its transports."""
    kinds = sorted({(family.rule, family.transport) for family in plan.families})
    kind = [kinds.index((family.rule, family.transport)) for family in plan.families]
    found, rows, speeds = _loads(plan, np.array(kind, np.int64), len(kinds)), plan.rows(), plan.topology.speeds
    made = []
    for number, (rule, transport) in enumerate(kinds):
        mine = [row for row, of in zip(rows, kind, strict=True) if of == number]
        slowest, nanoseconds = found[number].slowest(speeds)
        made.append(
            RuleRow(
                plan.settings.routes[rule][0], transport, sum(row.tensors for row in mine),
                sum(row.nbytes for row in mine), sum(row.share for row in mine), max(row.rounds for row in mine),
                found[number].links, nanoseconds, slowest,
            )
        )  # fmt: skip
    return made


def _loads(plan: Plan, kind: Ints, count: int) -> list[Load]:
    """The loads by a number that each family has."""
    sizes, steps, copies = sizes_of(plan.families), plan.steps, plan.copies
    return loads(
        steps, copies, plan.topology, nbytes=(sizes.nbytes(steps), sizes.nbytes(copies)),
        key=(kind[steps.family], kind[copies.family]), count=count,
    )  # fmt: skip


def _predicted(plan: Plan) -> int:
    """What a push takes, in nanoseconds: one transport after the other."""
    names = sorted({family.transport for family in plan.families})
    kind = np.array([names.index(family.transport) for family in plan.families], np.int64)
    found, taken = _loads(plan, kind, len(names)), 0
    for number, load in enumerate(found):
        mine = kind[plan.steps.family] == number
        windows = len(np.unique(plan.steps.window[mine]))
        rounds = 1 + int(plan.steps.round[mine].max(initial=-1))
        taken += load.nanoseconds(plan.topology.speeds, windows=windows, rounds=rounds)
    return taken


def _by(key: Ints, amount: Ints, count: int) -> Ints:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, key, amount)
    return sums


def _tensors(plan: Plan) -> list[int]:
    """How many members of each family travel or are copied."""
    tables = (plan.steps, plan.copies)
    family = np.concatenate([table.family for table in tables])
    stacked = np.array([family.num_stacked for family in plan.families], np.int64)[family][:, None]
    start, stop = (np.concatenate([getattr(table, end) for table in tables]) for end in ("start", "stop"))
    inner = np.arange(start.shape[1]) >= stacked
    boxes = Boxes(family, np.where(inner, 0, start), np.where(inner, 1, stop))
    boxes = boxes.take(canonical(boxes))
    rows = np.column_stack((boxes.group, boxes.start, boxes.stop))
    new = np.ones(len(boxes), bool)
    new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
    found = atoms(boxes.take(np.flatnonzero(new)))[0]
    counts: list[int] = _by(found.group, found.volume, len(plan.families)).tolist()
    return counts


def _busiest(plan: Plan, count: int) -> list[tuple[str, int]]:
    """Of each family, the process that sends most of it (the lowest number, if several do)."""
    nbytes, processes = sizes_of(plan.families).nbytes(plan.steps), max(plan.world.num_processes, 1)
    key, which = np.unique(plan.steps.family * processes + plan.steps.src, return_inverse=True)
    sent = total(which.reshape(-1), nbytes)
    best = [("", 0)] * count
    for place, amount in zip(key.tolist(), sent.tolist(), strict=True):
        if amount > best[place // processes][1]:
            best[place // processes] = (place_name(plan, place % processes, "source"), amount)
    return best


def place_name(plan: Plan, process: int, side: str) -> str:
    """A process by its seat, of the given side if it has two."""
    seats = sorted(
        (seat for seat in plan.world.seats if seat.process == process), key=lambda seat: (seat.side != side, seat)
    )
    return str(seats[0]) if seats else f"process {process}"


def totals_of(plan: Plan) -> Totals:
    """The totals of a plan."""
    rows = plan.rows()
    sizes = sizes_of(plan.families)
    targets = len(plan.world.of_side("target"))
    whole = [row.tensors * prod(row.shape) * int(width) for row, width in zip(rows, sizes.itemsize, strict=True)]
    gather = [row.tensors * left for row, left in zip(rows, plan.gathered, strict=True)]
    everything = _loads(plan, np.zeros(len(plan.families), np.int64), 1)
    load = everything[0]
    least = nic_bounds(plan.table, plan.move_nbytes, plan.hows, plan.world, plan.topology)
    sender, sent = _most(plan, plan.steps.src, "source")
    receiver, received = _most(plan, plan.steps.dst, "target")
    return Totals(
        sum(row.tensors for row in rows), len(plan.table), plan.num_windows,
        sum(row.nbytes for row in rows), sum(row.local_nbytes for row in rows), sum(whole) * targets + sum(gather),
        sender, sent, receiver, received, plan.bounds, load, least, _predicted(plan),
        least.nanoseconds(plan.topology.speeds),
    )  # fmt: skip


def _most(plan: Plan, process: Ints, side: str) -> tuple[str, int]:
    if not len(process):
        return "", 0
    amount = total(process, sizes_of(plan.families).nbytes(plan.steps))
    most = int(np.argmax(amount))
    return place_name(plan, most, side), int(amount[most])
