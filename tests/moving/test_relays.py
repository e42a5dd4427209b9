"""Transports that relay, run: everything arrives once and right, over every drawn topology, in no more than is said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as searching
from hypothesis import strategies as st
from moving_support import Table, fragment, run, threads
from refit_backends.broadcast import Broadcast
from refit_backends.fanout import Fanout
from refit_backends.inproc import InprocFabric

from refit_sdk.adapter import Fragment
from refit_sdk.executor import Executor, Moved
from refit_sdk.fabric import Deadline
from refit_sdk.plan import Plan
from refit_sdk.topology import Topology
from refit_sdk.views import Views
from refit_sdk.world import World

sys.path.append(str(Path(__file__).parents[1] / "planning"))

from planning_support import plan_of, rows, settings, whole, world, worlds

TRANSPORTS: dict[str, Any] = {"fanout": Fanout(), "broadcast": Broadcast()}
POISON = 77


@st.composite
def topologies(draw: st.DrawFn, count: int) -> Topology:
    """Any hosts, domains that needn't be hosts, and NICs."""
    several = st.lists(st.integers(0, 2), min_size=count, max_size=count)
    hosts, domains, nics = draw(several), draw(several), draw(several)
    return Topology(
        [f"h{host}" for host in hosts], domains, [3 * host + nic for host, nic in zip(hosts, nics, strict=True)]
    )


def truth(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers, which every dtype holds, other ones at every place and in every tensor."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + sum(name.encode())) % 61).reshape(shape)


def held(sides: World, side: Any, process: int, engine: str) -> list[Fragment]:
    """What a process has on a side: true values at a source, poison at a target."""
    found = []
    for seat in sides.of_side(side):
        if (seat.process, seat.engine) != (process, engine):
            continue
        for part in sides.manifest(seat).parts:
            for region in part.regions:
                members, box = region.box.split_dims(part.spec.num_stacked)
                for index in members.points():
                    name, dtype = part.spec.member_name(index), getattr(torch, region.dtype)
                    right = truth(name, part.spec.shape)[box.slices()].to(dtype)
                    view = right if side == "source" else torch.full_like(right, POISON)
                    found.append(fragment(name, part.spec.shape, box, view))
    return found


def pushed(plan: Plan, *, fabric: Any = None, times: int = 1) -> tuple[dict[int, Executor], dict[int, Moved]]:
    """Run a plan in threads, `times` over, and look at every target's bits each time."""
    sides, table = plan.world, Table()
    count = sides.num_processes
    sources = {process: Views(held(sides, "source", process, "")) for process in range(count)}
    engines = {process: [s.engine for s in sides.of_side("target") if s.process == process] for process in range(count)}
    fragments = {p: [f for engine in engines[p] for f in held(sides, "target", p, engine)] for p in range(count)}
    here = fabric or InprocFabric()

    def made(process: int) -> Executor:
        groups = {}
        for engine in sides.engines:
            members = sorted({s.process for s in sides.seats if s.side == "source" or s.engine == engine})
            if process in members:
                groups[engine] = here.connect(group=engine, members=members, process=process, store=table, timeout=20)
        return Executor(
            plan.program(process), sources=sources[process], targets=Views(fragments[process]), groups=groups
        )

    executors = dict(enumerate(threads(count, made)))
    for _ in range(times):
        for each in (each for listed in fragments.values() for each in listed):
            each.view.fill_(POISON)
        moved = run(executors)
        for listed in fragments.values():
            for each in listed:
                right = truth(each.name, each.shape)[each.box.slices()].to(each.view.dtype)
                assert torch.equal(each.view, right), each.name
    return executors, moved


@pytest.mark.parametrize("name", TRANSPORTS)
def test_any_world_on_any_topology_arrives_once_in_bounded_memory(name: str) -> None:
    @searching(max_examples=25)
    @given(worlds(), settings(), st.data())
    def check(sides: World, limits: dict[str, Any], data: st.DataObject) -> None:
        topology = data.draw(topologies(sides.num_processes))
        plan = plan_of(sides, topology=topology, routes=[("*", name)], transports=TRANSPORTS, **limits)
        executors, moved = pushed(plan)
        for process, executor in executors.items():
            assert not isinstance(moved[process], Exception)
            assert sum(moved[process].arrived.values()) == plan.program(process).bytes_arriving
            assert executor.buffer_nbytes <= plan.peak_bytes(process)

    check()


def test_a_source_that_relays_says_nothing_was_written_and_keeps_little() -> None:
    """Each of two sources has half of every tensor; broadcast gathers them, a buffer's worth at a time."""
    sides = world([[rows("w", (512, 64), 0, 256)], [rows("w", (512, 64), 256, 512)]], e=[[whole("w", 512, 64)]] * 2)
    plan = plan_of(
        sides, topology=Topology.single(4), routes=[("*", "broadcast")], transports=TRANSPORTS, coalesce_bytes=64
    )
    _, moved = pushed(plan, times=3)
    relays = [plan.program(process).relays.nbytes for process in range(4)]
    assert any(relays[:2])
    assert max(relays) <= 512 * 64 * 2 // 4
    assert [bool(moved[process].mutated) for process in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_relay_that_gets_the_same_bytes_for_two_dtypes_sends_them_on(name: str) -> None:
    """Two families with one dtype on the wire: the same box arrives twice in a window, and is sent on twice."""
    engine = [[whole("t0", 8), whole("t1", 4, dtype=dtype)] for dtype in ("bfloat16", "float32")]
    sides = world([[whole("t0", 8), whole("t1", 4)]], e=engine)
    topology = Topology(["x", "y", "y"], [0, 1, 1])
    pushed(plan_of(sides, topology=topology, routes=[("*", name)], transports=TRANSPORTS), times=2)


def test_a_failed_relay_leaves_nobody_waiting() -> None:
    """The target that passes on is dropped in the middle: all that wait for it hear of it, long before the deadline."""
    sides = world([[whole("w", 512, 64)]], e=[[whole("w", 512, 64)]] * 3)
    topology = Topology(["x", "y", "y", "y"], [0, 1, 1, 1])
    plan = plan_of(sides, topology=topology, routes=[("*", "fanout")], transports=TRANSPORTS, coalesce_bytes=64)
    table, fabric = Table(), InprocFabric()

    def made(process: int) -> Executor:
        group = fabric.connect(group="e", members=range(4), process=process, store=table, timeout=20)
        views = Views(held(sides, "target", process, "e"))
        source = Views(held(sides, "source", process, ""))
        executor: Executor

        def after(done: int, total: int) -> None:
            if process == 1 and done == total // 2:
                executor.drop("e", "the test ends it")

        executor = Executor(
            plan.program(process), sources=source, targets=views, groups={"e": group}, after_window=after
        )
        return executor

    executors = dict(enumerate(threads(4, made)))
    moved = threads(4, lambda process: executors[process].run(Deadline.after(30)))
    assert all(each.failed.keys() == {"e"} for each in moved)
