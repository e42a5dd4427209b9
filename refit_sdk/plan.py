"""A plan: all moves of a push and their steps, for the whole world; a value, the same on every rank.

1. Put both sides into arrays (`refit_sdk.families`), match the rules, intersect (`refit_sdk.pieces`).
2. Check that everything is covered (`refit_sdk.coverage`); every violation there is makes one `PlanError`.
3. Balance what is left over its holders and ask each transport for the steps (`refit_sdk.moves`).
4. Cut the steps and put them into windows, transport by transport in order of the routes (`refit_sdk.windows`). Copies
   inside a process go along, a window's worth in each.
5. Digest the result. A program is derived from it when a process asks for its own (`refit_sdk.program`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import evolve, field, frozen

from refit_sdk import aliases, coverage
from refit_sdk.aliases import TiedCheck
from refit_sdk.box import Box
from refit_sdk.choosing import choose, expanded
from refit_sdk.cost import Bounds, bounds
from refit_sdk.errors import PlanError
from refit_sdk.families import Sides, collect
from refit_sdk.moves import Move, MoveTable, concat, refuse, serve, sizes_of, steps_of
from refit_sdk.overlap import volume
from refit_sdk.pieces import Family, Pieces, families_of, overlap, rule
from refit_sdk.program import Program, Window, lower
from refit_sdk.settings import Settings
from refit_sdk.summary import Row, RuleRow, Totals, gathered, rows_of, rules_of, totals_of
from refit_sdk.topology import Topology
from refit_sdk.transport import Ints, Transport
from refit_sdk.windows import Sizes, StepTable, fit, granule_nbytes, narrowed, schedule, total, unfit
from refit_sdk.world import Manifest, World

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


def _digest_of(plan: Plan) -> str:
    """blake2b of everything that says what travels when, in one byte order."""
    state = blake2b(digest_size=16)
    names = [[f.name, f.shape, f.source_dtype, f.target_dtype, f.transport, f.rule] for f in plan.families]
    ties = [[check.names, [(s.process, s.name, str(s.box)) for s in check.shares]] for check in plan.tied_checks]
    sets = [plan.table.holder_sets, plan.table.need_sets, plan.world.engines]
    state.update(json.dumps([names, ties, sets]).encode())
    for table in (plan.table, plan.steps, plan.copies):
        for array in attrs.astuple(table, recurse=False, filter=lambda _, value: isinstance(value, np.ndarray)):
            state.update(str(array.shape).encode() + np.ascontiguousarray(array, "<i8").tobytes())
    return state.hexdigest()


@frozen(eq=False, repr=False)
class Plan:
    """Moves, steps and windows of a push. Plans are equal if their digests are; printing one gives its table.

    `table` are the moves as arrays, `steps` what goes between processes, `copies` what stays inside one (as steps from
    a process to itself), `tied_checks` what must be compared before a push. By family: `hows` is how often its bytes
    leave their holder (`Capabilities.copies`), `whys` why it has its transport, where that was chosen.
    """

    world: World
    settings: Settings
    topology: Topology
    families: tuple[Family, ...]
    table: MoveTable
    steps: StepTable
    copies: StepTable
    tied_checks: tuple[TiedCheck, ...]
    bounds: Bounds
    gathered: tuple[int, ...]
    hows: tuple[str, ...]
    whys: tuple[str, ...]
    digest: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest_of(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Plan {self.digest}: {len(self.table)} moves, {len(self.steps)} steps, {self.num_windows} windows>"

    @property
    def num_windows(self) -> int:
        """Windows run from 0 to this, exclusive; a process has those in which it does something."""
        return 1 + int(max(self.steps.window.max(initial=-1), self.copies.window.max(initial=-1)))

    @property
    def relays(self) -> bool:
        """Whether anything passes through a process."""
        return bool(np.any(self.steps.round > 0))

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves as values, in order. Made when asked for: a large plan has many."""
        table, nbytes, engines = self.table, self.move_nbytes.tolist(), self.world.engines
        found = []
        for i in range(len(table)):
            family = self.families[int(table.family[i])]
            box = Box(table.start[i, : family.ndim].tolist(), table.stop[i, : family.ndim].tolist())
            holders, needs = table.holder_sets[int(table.holders[i])], table.need_sets[int(table.needs[i])]
            place = engines[int(table.engine[i])]
            found.append(Move(family.name, box, place, holders, needs, int(table.server[i]), nbytes[i]))
        return tuple(found)

    @property
    def move_nbytes(self) -> Ints:
        """Bytes of each move on the wire."""
        return volume(self.table.start, self.table.stop) * sizes_of(self.families).itemsize[self.table.family]

    def program(self, process: int) -> Program:
        """What one process does, by its world number. One that has nothing to do has no windows."""
        return lower(self, process)

    def peak_bytes(self, process: int) -> int:
        """Bytes of buffers that a process has at most: two for sends and two for receives, used in turn, and what it
        keeps of what it passes on (`refit_sdk.relays`).

        Each is as large as the largest window that uses it. Less is used where a message is a contiguous view.
        """
        program = self.program(process)
        return program.relays.nbytes + sum(_largest(program.windows[turn::2]) for turn in range(2))

    def rows(self) -> list[Row]:
        """One row a family, in the order of names, for tables."""
        return rows_of(self)

    def rules(self) -> list[RuleRow]:
        """What each rule carries by each transport, in order of the rules."""
        return rules_of(self)

    def totals(self) -> Totals:
        """The figures of the whole plan."""
        return totals_of(self)

    def to_json(self) -> str:
        """Rows, totals, routes and tied checks as JSON."""
        from refit_sdk.render.plan import to_json

        return to_json(self)

    def draw(self, name: str) -> str:
        """What each rank holds of a tensor, as an SVG picture: sources above, engines below. `name` is a full one."""
        from refit_sdk.render.drawing import draw

        return draw(self, name)

    def __str__(self) -> str:
        from refit_sdk.render.plan import to_text

        return to_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from refit_sdk.render.plan import to_table

        yield to_table(self)


def _largest(windows: tuple[Window, ...]) -> int:
    """Bytes of the two buffers that these windows share."""
    sends = max((sum(message.buffer_nbytes for message in window.sends) for window in windows), default=0)
    return sends + max((sum(message.buffer_nbytes for message in window.recvs) for window in windows), default=0)


def make_plan(world: World, *, settings: Settings, transports: Mapping[str, Transport], topology: Topology) -> Plan:
    """The plan of a world. `transports` are those that are there, by name.

    `PlanError` with every violation; `UnsupportedMoveError` if a transport was routed something it can't do.
    """
    if found := list(coverage.check_world(world)):
        raise PlanError(found)
    sides = collect(world)
    ruled = rule(sides, settings)
    pieces = overlap(sides, ruled)
    checks = (
        coverage.check_names(sides, settings),
        coverage.check_elements(sides, pieces),
        coverage.check_kinds(sides, pieces, settings),
        coverage.check_rules(sides, ruled, settings, transports),
    )
    if found := [line for check in checks for line in check]:
        raise PlanError(found)
    return _lay_out(sides, pieces, settings, transports, topology)


def _lay_out(
    sides: Sides, pieces: Pieces, settings: Settings, transports: Mapping[str, Transport], topology: Topology
) -> Plan:
    """Steps 3 and 4, for sides that fit together."""
    families, number = families_of(sides, pieces, settings)
    chosen = choose(sides, pieces, families, number, settings=settings, transports=transports, topology=topology)
    families = tuple(evolve(f, transport=each.transport) for f, each in zip(families, chosen, strict=True))
    table, local = serve(sides, pieces, families, number, settings=settings, transports=transports, topology=topology)
    refuse(families, table, transports)
    sizes = sizes_of(families)
    if len(found := unfit(_as_steps(table), sizes, settings)):
        raise PlanError(_too_large(families, table, found, settings))
    sent, copied, first = [], [local.take(np.zeros(0, np.int64))], 0
    for name in dict.fromkeys(name for _, transport in settings.routes for name in expanded(transport)):
        its = np.array([family.transport == name for family in families], bool)
        asked, inside = np.flatnonzero(its[table.family]), local.take(np.flatnonzero(its[local.family]))
        limits = _limits(table, asked, sizes, settings, transports[name], topology)
        steps, parts_of = steps_of(
            table, families, asked, sides, transport=transports[name], settings=limits, topology=topology
        )
        placed = schedule(steps, sizes, limits, first=first)
        sent.append(evolve(placed, move=parts_of[placed.move]))
        copied.append(_spread(inside, sizes, settings, first))
        first = 1 + max(first - 1, int(sent[-1].window.max(initial=-1)), int(copied[-1].window.max(initial=-1)))
    nbytes = volume(table.start, table.stop) * sizes.itemsize[table.family]
    copies = _copies(families, table, transports, topology)
    direct = all(transports[family.transport].capabilities.copies == "direct" for family in families)
    return Plan(
        sides.world, settings, topology, families, table, concat(sent), concat(copied),
        aliases.checks(sides.world, sides.naming), bounds(table, nbytes, copies, topology, direct=direct),
        gathered(sides, families), tuple(transports[family.transport].capabilities.copies for family in families),
        tuple(each.why for each in chosen),
    )  # fmt: skip


def _limits(
    table: MoveTable, rows: Ints, sizes: Sizes, settings: Settings, transport: Transport, topology: Topology
) -> Settings:
    """The settings for the moves `rows` of a transport: one that relays has smaller windows."""
    how = transport.capabilities.copies
    if how == "direct" or not len(rows):
        return settings
    moves = _as_steps(table).take(rows)
    nbytes = sizes.nbytes(moves)
    sent = total(moves.src, nbytes * table.copies(how, topology)[rows])
    received = np.zeros(len(topology.domain), np.int64)
    for needs, amount in zip(table.need_sets, total(table.needs[rows], nbytes).tolist(), strict=False):
        received[list(needs)] += amount
    largest = int(np.max(granule_nbytes(moves, sizes)))
    return narrowed(settings, busiest=max(int(sent.max()), int(received.max())), granule=largest)


def _as_steps(table: MoveTable) -> StepTable:
    """Moves in the shape of steps, for what both have in common."""
    none = np.full(len(table), -1, np.int64)
    return StepTable(
        table.family, table.engine, table.start, table.stop, table.granule, table.server, none, none, none, none
    )


def _too_large(families: tuple[Family, ...], table: MoveTable, rows: Ints, settings: Settings) -> list[str]:
    kinds = sorted({(int(table.family[row]), tuple(table.granule[row].tolist())) for row in rows.tolist()})
    return [
        f"{families[family].name} {families[family].shape}: one granule {granule} of {families[family].wire} is larger "
        f"than a window of {settings.window_bytes} bytes; give a larger window_bytes="
        for family, granule in kinds
    ]


def _spread(local: StepTable, sizes: Sizes, settings: Settings, first: int) -> StepTable:
    """Copies inside processes, a window's worth in each window from `first` on."""
    if not len(local):
        return local
    cut = fit(local, sizes, settings, limit=np.full(len(local), settings.window_bytes, np.int64))
    cut = cut.take(np.argsort(cut.src, kind="stable"))
    nbytes = sizes.nbytes(cut)
    ends = np.cumsum(nbytes)
    begin = np.searchsorted(cut.src, cut.src)
    return evolve(cut, window=first + (ends - nbytes - (ends - nbytes)[begin]) // settings.window_bytes)


def _copies(
    families: tuple[Family, ...], table: MoveTable, transports: Mapping[str, Transport], topology: Topology
) -> Ints:
    """How often each move leaves its server."""
    copies = np.zeros(len(table), np.int64)
    for name in {family.transport for family in families}:
        rows = np.array([family.transport == name for family in families], bool)[table.family]
        copies[rows] = table.copies(transports[name].capabilities.copies, topology)[rows]
    return copies


def input_digest(world: World, *, settings: Settings, topology: Topology, plugins: Mapping[str, str]) -> str:
    """The key of a plan before it is made: what goes into it, whatever order the ranks are listed in.

    `plugins` are names and versions. Equal manifests count as one, as they do for the plan.

    >>> world = World(0, (), (), ())
    >>> asked = {"settings": Settings(), "topology": Topology.single(1)}
    >>> one = input_digest(world, **asked, plugins={"reshard": "1"})
    >>> one == input_digest(world, **asked, plugins={"reshard": "2"})
    False
    """
    bodies = [_digest_of_manifest(manifest) for manifest in world.manifests]
    seats = sorted((seat, bodies[number]) for seat, number in zip(world.seats, world.manifest_of, strict=True))
    state = blake2b(digest_size=16)
    state.update(repr((world.epoch, seats, settings, topology, sorted(plugins.items()))).encode())
    return state.hexdigest()


def _digest_of_manifest(manifest: Manifest) -> str:
    state = blake2b(repr(manifest.aliases).encode(), digest_size=16)
    for part in manifest.parts:
        state.update(repr((part.spec.name, part.spec.shape, len(part.regions.groups))).encode())
        kinds = [(g.members, (g.box, g.dtype, g.granule, g.copies)) for g in part.regions.groups]
        for members, kind in ((part.spec.members, ()), *kinds):
            state.update(repr((kind, members.start.shape)).encode())
            for corners in (members.start, members.stop):
                state.update(np.ascontiguousarray(corners, "<i8").tobytes())
    return state.hexdigest()


class PlanCache:
    """The last few plans by input digest.

    >>> cache = PlanCache(capacity=1)
    >>> cache.get("key", lambda: "made once"), cache.get("key", lambda: "not made")
    ('made once', 'made once')
    """

    def __init__(self, *, capacity: int = 4) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def get(self, key: str, make: Callable[[], Plan]) -> Plan:
        """The plan of a key, made now if it isn't there. One that can't be made isn't kept."""
        if key not in self._plans:
            self._plans[key] = make()
        self._plans.move_to_end(key)
        while len(self._plans) > self._capacity:
            self._plans.popitem(last=False)
        return self._plans[key]
