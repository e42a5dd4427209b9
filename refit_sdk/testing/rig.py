"""A case played: planned with one transport, moved over one fabric, judged, and counted by the kit itself.

1. The case's world is planned here, in the test. What the transport refuses, it refuses now: no rank has been told.
2. Every rank of the case gets its program and what it holds; it connects its groups, through a wrapper that counts.
3. Two versions are moved. Nobody waits between them: a fabric that reads or writes after it has said that it is done
   meets the next version's bytes.
4. Sources must be as they were, targets right bit by bit, guard bytes whole; what arrived is what was planned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from refit_sdk.choosing import expanded
from refit_sdk.executor import Executor
from refit_sdk.fabric import Deadline, Fabric, Group, check_collectives, within_process
from refit_sdk.fold import fold
from refit_sdk.plan import Plan, make_plan
from refit_sdk.plugins import registry
from refit_sdk.program import Program
from refit_sdk.testing.cases import Case
from refit_sdk.testing.meeting import PATIENCE, Players, Processes, Table, Threads, host_table
from refit_sdk.testing.models import Model, Rank
from refit_sdk.testing.ranks import Failure
from refit_sdk.topology import Topology
from refit_sdk.transport import Transport
from refit_sdk.views import Views
from refit_sdk.world import Seat, World

VERSIONS = (3, 4)
MOURNS = "mourns"
"""What a process does that is not faulty itself, where others are: it meets nobody at the end."""
MOST_PROCESSES = 7
"""Processes of the largest case."""
_plans: dict[str, tuple[Any, Plan]] = {}

Links = dict[tuple[str, int, int], int]
"""Bytes by engine, sender and receiver."""


class Counted:
    """A group, and the bytes that its works said were carried, by sender and receiver."""

    def __init__(self, group: Group, *, engine: str, process: int, links: Links) -> None:
        self._group, self._engine, self._process, self._links = group, engine, process, links

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        """Send, and count once it is waited for."""
        return _CountedWork(self._group.send(buffer, peer=peer), self._links, (self._engine, self._process, peer))

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        """Receive, and count once it is waited for."""
        return _CountedWork(self._group.recv(buffer, peer=peer), self._links, (self._engine, peer, self._process))


@frozen(eq=False)
class _CountedWork:
    _work: Any
    _links: Links
    _link: tuple[str, int, int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, timeout: float) -> int:
        nbytes: int = self._work.wait(timeout)
        self._links[self._link] = self._links.get(self._link, 0) + nbytes
        return nbytes


FabricLike = str | Fabric | type[Any]


def made(fabric: FabricLike) -> Any:
    """A fabric: of a name, that of a plug-in; of a class, one made without arguments; else itself."""
    found = registry().get("fabric", fabric) if isinstance(fabric, str) else fabric
    return found() if isinstance(found, type) else found


@frozen(kw_only=True)
class Part:
    """What one process of a case is told. `engines` are the members of the groups that it is in.

    At `faulty_at`, after that many windows, it does what `fault` says: `"dies"` or `"stalls"`. `deadline` in seconds.
    """

    source: Rank | None
    target: Rank | None
    program: Program
    engines: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    fabric: FabricLike
    port: int
    prefix: str
    processes: int
    device: str = "cpu"
    deadline: float = PATIENCE
    fault: str = ""
    faulty_at: int = 0


@frozen(kw_only=True)
class Outcome:
    """What one process found: what is wrong with its bytes, what failed by engine, who was lost, and what it counted.

    `links` are of one push, the last.
    """

    faults: list[str]
    failed: dict[str, str] = field(factory=dict)
    lost: dict[str, int] = field(factory=dict)
    mutated: frozenset[str] = frozenset()
    sent: int = 0
    arrived: int = 0
    links: Links = field(factory=dict)


def take_part(_: Any, part: Part) -> Outcome:
    """One process of a case: every version moved, and judged."""
    table = Table.at(part.port, prefix=part.prefix)
    source = Model(part.source, device=part.device) if part.source is not None else None
    target = Model(part.target, device=part.device) if part.target is not None else None
    links: Links = {}
    process, groups = part.program.process, {}
    try:
        for engine, members in sorted(part.engines.items()):
            group = made(part.fabric).connect(
                group=engine, members=members, process=process, store=table, timeout=PATIENCE
            )
            groups[engine] = Counted(group, engine=engine, process=process, links=links)
        outcome = _moved(part, source, target, groups, links, table)
    finally:
        if part.fault:
            table.set("seen", b"")
        else:
            table.meet("moved", part.processes)
        for each in groups.values():
            each.close()
    return outcome


def _moved(
    part: Part, source: Model | None, target: Model | None, groups: Any, links: Links, table: Table
) -> Outcome:  # fmt: skip
    models = [model for model in (source, target) if model is not None]
    before, faults = [model.addresses() for model in models], []
    executor = Executor(
        part.program,
        sources=Views(source.fragments) if source is not None else None,
        targets=Views(target.fragments) if target is not None else None,
        groups=groups,
        after_window=_fault(part, groups, table) if part.fault else lambda done, total: None,
    )
    for version in VERSIONS:
        links.clear()
        if source is not None:
            source.fill(version=version)
        if target is not None:
            target.poison()
        moved = executor.run(Deadline.after(part.deadline))
        faults += source.faults(version=version) if source is not None else []
        if target is not None and not moved.failed:
            faults += target.faults(version=version, source=part.dtypes)
        if moved.failed:
            break
    faults += [] if before == [model.addresses() for model in models] else ["addresses, shapes or strides changed"]
    sent, arrived = (sum(each.values()) for each in (moved.sent, moved.arrived))
    return Outcome(
        faults=faults, failed=dict(moved.failed), lost=dict(moved.lost), mutated=moved.mutated,
        sent=sent, arrived=arrived, links=links,
    )  # fmt: skip


def _fault(part: Part, groups: Mapping[str, Any], table: Table) -> Callable[[int, int], None]:
    from refit_sdk.testing.member import fall_silent, leave

    def after_window(done: int, total: int) -> None:
        if part.fault == MOURNS or done != part.faulty_at:
            return
        if part.fault == "dies":
            leave(list(groups.values()), within_process(made(part.fabric)))
        fall_silent(table, within_process(made(part.fabric)))

    return after_window


@frozen(kw_only=True)
class Played:
    """A case that was moved: its plan and every process's outcome."""

    case: Case
    plan: Plan
    outcomes: Sequence[Any]

    def arrived(self) -> Links:
        """Bytes that arrived, as the kit counted them at receivers."""
        found: Links = {}
        for process, outcome in enumerate(self.outcomes):
            found |= {link: nbytes for link, nbytes in outcome.links.items() if link[2] == process}
        return found

    def sent(self) -> Links:
        """Bytes that were sent, as the kit counted them at senders."""
        found: Links = {}
        for process, outcome in enumerate(self.outcomes):
            found |= {link: nbytes for link, nbytes in outcome.links.items() if link[1] == process}
        return found

    def planned(self) -> Links:
        """Bytes by link, by the programs of the receivers."""
        found: Counter[tuple[str, int, int]] = Counter()
        for process in range(self.plan.world.num_processes):
            for window in self.plan.program(process).windows:
                for message in window.recvs:
                    found[message.engine, message.peer, process] += message.nbytes
        return {link: nbytes for link, nbytes in found.items() if nbytes}


def world_of(case: Case) -> World:
    """The world of a case: processes in the case's order."""
    seats, manifests = [], []
    for process, (rank, seat) in enumerate(case.processes):
        if rank is not None:
            seats.append(Seat("source", "", rank, process))
            manifests.append(fold(held.on_paper() for held in case.sources[rank] if not held.box.is_empty))
        if seat is not None:
            seats.append(Seat("target", seat[0], seat[1], process))
            held = case.engines[seat[0]][seat[1]]
            manifests.append(fold(each.on_paper() for each in held if not each.box.is_empty))
    return World(0, tuple(seats), tuple(manifests), tuple(range(len(manifests))))


def asked(transport: str | Transport) -> list[Transport]:
    """The transports that a route may use: of `"auto"` several, else the one of that name, or itself."""
    if not isinstance(transport, str):
        return [transport]
    return [registry().get("transport", name)() for name in expanded(transport)]


def plan_of(case: Case, transport: str | Transport) -> Plan:
    """The plan of a case with one transport, hosts and domains being pairs of processes."""
    name = transport if isinstance(transport, str) else transport.name
    transports = {each.name: each for each in asked(transport)}
    settings = evolve(case.settings, routes=[("*", name)])
    domains = tuple(process // 2 for process in range(len(case.processes)))
    topology = Topology(host=tuple(f"host{domain}" for domain in domains), domain=domains)
    return make_plan(world_of(case), settings=settings, transports=transports, topology=topology)


@define(eq=False)
class Rig:
    """One transport, one fabric and the ranks that play cases with them. `device`: where the tensors are."""

    transport: str | Transport
    fabric: FabricLike
    device: str = "cpu"
    players: Players = field(init=False)
    _server: Any = field(init=False, factory=host_table)
    _turns: Any = field(init=False, factory=itertools.count)

    def __attrs_post_init__(self) -> None:
        self.players = Threads() if within_process(made(self.fabric)) else Processes(MOST_PROCESSES)

    def plan(self, case: Case) -> Plan:
        """The plan of a case. Those of a named transport are kept: fabrics come after each other."""
        if not isinstance(self.transport, str):
            return plan_of(case, self.transport)
        key = (self.transport, case)
        if _plans.get(case.id, (None, None))[0] != key:
            _plans[case.id] = (key, plan_of(case, self.transport))
        return _plans[case.id][1]

    @property
    def label(self) -> str:
        """The names of both."""
        name = self.transport if isinstance(self.transport, str) else self.transport.name
        return f"{name} over {self.fabric if isinstance(self.fabric, str) else made(self.fabric).name}"

    def missing(self) -> str | None:
        """Why one of the two can't be used here, or None."""
        names = expanded(self.transport) if isinstance(self.transport, str) else ()
        reasons = (registry().offer("transport", name).missing() for name in names)
        return next(filter(None, reasons), None) or made(self.fabric).missing()

    def play(self, case: Case, *, faulty: Mapping[int, str] | None = None, **how: Any) -> Played:
        """Plan and move a case. `UnsupportedMoveError` if the transport refuses it; what a rank raises fails the test.

        `faulty`: which processes die, or stall, after `faulty_at` windows.
        """
        check_collectives(made(self.fabric), asked(self.transport))
        plan, prefix, seats = self.plan(case), f"{next(self._turns)}/", case.processes
        jobs = []
        for process, (rank, seat) in enumerate(seats):
            part = Part(
                source=None if rank is None else case.sources[rank],
                target=None if seat is None else case.engines[seat[0]][seat[1]],
                program=plan.program(process), engines=members_of(case, process), dtypes=case.dtypes,
                fabric=self.fabric, port=self._server.port, prefix=prefix, processes=len(seats), device=self.device,
                fault=(faulty or {}).get(process, MOURNS if faulty else ""), **how,
            )  # fmt: skip
            jobs.append((take_part, (part,)))
        outcomes = self.players.outcomes(jobs, lost=tuple(faulty or ()))
        raise_first(outcomes)
        return Played(case=case, plan=plan, outcomes=outcomes)

    def talk(self, body: Callable[..., Any], members: Sequence[int], *args: Any, lost: Sequence[int] = ()) -> list[Any]:
        """`body(seat, *args)` in every member of a group to be; what each returned. What one raises fails the test."""
        from refit_sdk.testing.member import Member, converse

        prefix = f"{next(self._turns)}/"
        about = [Member(number, tuple(members), self.fabric, self._server.port, prefix) for number in members]
        outcomes = self.players.outcomes(
            [(converse, (member, body, args)) for member in about], lost=[members.index(number) for number in lost]
        )
        raise_first(outcomes)
        return outcomes

    def close(self) -> None:
        """End the ranks."""
        self.players.close()


def raise_first(outcomes: Sequence[Any]) -> None:
    """Fail with the traceback of the first rank that raised."""
    failures = [f"rank {number}: {each.trace}" for number, each in enumerate(outcomes) if isinstance(each, Failure)]
    assert failures == [], "\n".join(failures)


def members_of(case: Case, process: int) -> dict[str, tuple[int, ...]]:
    """The groups that a process is in, by engine: all sources and the engine's ranks."""
    found = {}
    for engine in case.engines:
        inside = [
            p for p, (rank, seat) in enumerate(case.processes) if rank is not None or (seat or ("",))[0] == engine
        ]
        if process in inside:
            found[engine] = tuple(inside)
    return found
