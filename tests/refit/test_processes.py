"""Sessions beside what else a process has: torch's groups, interfaces, a controller, threads, descriptors, ports."""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refit_backends.gloo import GlooFabric
from torch.distributed import distributed_c10d

from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.errors import PushError, RendezvousError, SessionClosed
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Shard
from refit_sdk.report import PushReport
from refit_sdk.session import RefitSession
from refit_sdk.testing.crew import Crew, Job, crew, meet
from refit_sdk.testing.models import Held, Model, Ranks, spread
from refit_sdk.testing.ranks import Rank, free_rendezvous

NAME, SHAPE = "layers.0.w", (8, 6)
TOKEN = "of this test"


def cut(size: int, dim: int) -> Ranks:
    return spread(NAME, SHAPE, Layout(Mesh(range(size)), [Shard(dim)]), size=size)


WHOLE: Ranks = ((Held(NAME, SHAPE, Box.whole(SHAPE)),),)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(4) as made:
        yield made


def push(session: RefitSession, model: Model, version: int, **how: Any) -> PushReport:
    model.fill(version=version)
    report = session.push(version=version, **how)
    assert isinstance(report, PushReport)
    return report


def receive(session: RefitSession, model: Model) -> int:
    """Take a push, exactly; its version."""
    model.poison()
    version = session.receive().version
    assert model.faults(version=version) == []
    return version


def give_twice(_: Rank, where: str, held: Ranks, rank: int, **options: Any) -> set[str]:
    """A source that pushes versions 1 and 2; the addresses of this process's sockets."""
    model = Model(held[rank])
    with RefitSession.source(model, rendezvous=where, rank=rank, size=len(held), deadline=20, **options) as session:
        for version in (1, 2):
            push(session, model, version)
        return addresses()


def take_twice(_: Rank, where: str, held: Ranks, rank: int, **options: Any) -> set[str]:
    model, size = Model(held[rank]), len(held)
    with RefitSession.target(
        model, rendezvous=where, engine="a", rank=rank, size=size, deadline=20, **options
    ) as session:
        assert [receive(session, model), receive(session, model)] == [1, 2]
        return addresses()


def sockets() -> list[socket.socket]:
    """Copies of all of this process's internet sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(socket.socket(fileno=os.dup(int(name))))
        except OSError:
            continue
    return [each for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]


def addresses() -> set[str]:
    """The addresses that this process's sockets are bound to."""
    found = sockets()
    names = {each.getsockname()[0] for each in found}
    for each in found:
        each.close()
    return names


def registry() -> dict[str, Any]:
    """Everything that torch knows of groups."""
    world = distributed_c10d._world
    return {
        "default": world.default_pg,
        "map": dict(world.pg_map),
        "names": dict(world.pg_names),
        "ranks": dict(world.pg_group_ranks),
        "tags": dict(world.tags_to_pg),
        "count": world.group_count,
        "is_initialized": dist.is_initialized(),
    }


def trains(_: Rank, where: str, file: str, rank: int) -> bool:
    """A source with a default group, and a group of its own in it, which it uses between pushes."""
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    before = registry()
    model, held = Model(cut(2, 0)[rank]), torch.ones(1)
    with RefitSession.source(model, rendezvous=where, rank=rank, size=2, engines=2, deadline=20) as session:
        for version in (1, 2):
            assert registry() == before
            push(session, model, version)
            for each in (None, group):
                dist.all_reduce(held, group=each)
    assert held.item() == 2**4
    assert registry() == before
    dist.destroy_process_group()
    return before["is_initialized"]


def serves(_: Rank, where: str, engine: str, file: str) -> bool:
    """A target: of an engine that has a default group of its own, or that has none."""
    if file:
        dist.init_process_group("gloo", store=dist.FileStore(file, 1), rank=0, world_size=1)
    before = registry()
    model = Model(WHOLE[0])
    with RefitSession.target(model, rendezvous=where, engine=engine, rank=0, size=1, deadline=20) as session:
        assert [receive(session, model), receive(session, model)] == [1, 2]
        assert registry() == before
    assert registry() == before
    if file:
        dist.destroy_process_group()
    return before["is_initialized"]


def test_torchs_groups_are_the_same_before_and_after(ranks: Crew, tmp_path: Path) -> None:
    where = free_rendezvous()
    jobs: list[Job] = [(trains, (where, str(tmp_path / "trainers"), rank)) for rank in range(2)]
    jobs += [(serves, (where, "a", str(tmp_path / "engine"))), (serves, (where, "b", ""))]
    assert ranks.results(jobs) == [True, True, True, False]


def pinned(me: Rank, body: Any, args: tuple[Any, ...], where: dict[str, str], options: dict[str, Any]) -> set[str]:
    """A body with gloo pinned to a host or an interface; by default, if none is given."""
    given = {"fabric": GlooFabric(**where)} if where else {}
    found: set[str] = body(me, *args, **given, **options)
    return found


@pytest.mark.parametrize(
    ("host", "fabric"),
    [
        ("127.0.0.1", {"host": "127.0.0.1"}),
        ("127.0.0.1", {"interface": "lo"}),
        ("127.0.0.1", {}),
        ("::1", {"host": "::1"}),
        ("::1", {}),
    ],
    ids=["host", "interface", "loopback", "IPv6 host", "IPv6"],
)
def test_sockets_are_where_they_should_be(ranks: Crew, host: str, fabric: dict[str, str]) -> None:
    found = everywhere(ranks, free_rendezvous(host), fabric, {})
    assert found == [{host}] * 3


def test_gloo_goes_where_the_rendezvous_is(ranks: Crew) -> None:
    host = an_address_of_this_host()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    assert everywhere(ranks, free_rendezvous(host), {}, {"token": TOKEN}) == [{host}] * 3


def test_a_link_local_address_keeps_its_interface(ranks: Crew) -> None:
    host = a_link_local_address()
    if host is None:
        pytest.skip("this machine has no link-local IPv6 address")
    found = everywhere(ranks, free_rendezvous(host), {}, {"token": TOKEN})
    assert found == [{host.partition("%")[0]}] * 3


def a_link_local_address() -> str | None:
    """A link-local IPv6 address of this host, with its interface."""
    try:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return None
    found = [(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])), line[5]) for line in lines if line[3] == "20"]
    return "%".join(found[0]) if found else None


def everywhere(ranks: Crew, where: str, fabric: dict[str, str], options: dict[str, Any]) -> list[set[str]]:
    """Two sources and a target push twice; the addresses of each one's sockets."""
    jobs: list[Job] = [(pinned, (give_twice, (where, cut(2, 0), rank), fabric, options)) for rank in range(2)]
    found: list[set[str]] = ranks.results([*jobs, (pinned, (take_twice, (where, WHOLE, 0), fabric, options))])
    return found


def an_address_of_this_host() -> str | None:
    """An address of the interface that leads elsewhere; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return None
        host = str(probe.getsockname()[0])
    return None if host.startswith("127.") else host


def obeys(me: Rank, where: str, engine: str, engines: Any) -> int:
    """A rank that does what the test says, until it says `leave`. A source if it has no engine."""
    model, times = Model(WHOLE[0]), 0
    given: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "deadline": 20}
    with (
        RefitSession.target(model, engine=engine, **given)
        if engine
        else RefitSession.source(model, engines=engines, **given) as session
    ):
        me.tell("joined")
        while (word := me.pipe.recv()) != "leave":
            times += 1
            me.tell("did", _obey(session, model, word))
    return times


def _obey(session: RefitSession, model: Model, word: Any) -> Any:
    try:
        if word == "receive":
            return receive(session, model)
        version, require = word
        report = push(session, model, version, require=require)
    except (PushError, RendezvousError, SessionClosed) as error:
        return type(error).__name__, str(error)
    return {name: (engine.state, engine.version) for name, engine in report.engines.items()}


def test_a_controller_admits_pauses_resumes_and_drops(ranks: Crew) -> None:
    with RefitController(rendezvous="tcp://127.0.0.1:0", engines=["a"], deadline=20) as controller:
        where = controller.rendezvous
        assert controller.engines == {"a": "waiting"}
        jobs: list[Job] = [(obeys, (where, "", ["a"])), (obeys, (where, "a", None)), (obeys, (where, "b", None))]
        with ranks.at_work([*jobs[:2], (refused_then_obeys, jobs[2][1])]) as (source, a, b):
            assert "admit it" in b.expect("refused")
            source.expect("joined")
            a.expect("joined")
            assert (controller.state, controller.engines) == ("idle", {"a": "ready"})

            def pushed(version: int, *targets: Any, require: Any = "all") -> Any:
                for each in (*targets, source):
                    each.go((version, require) if each is source else "receive")
                assert [each.expect("did") for each in targets] == [version] * len(targets)
                return source.expect("did")

            assert pushed(1, a) == {"a": ("complete", 1)}
            controller.admit("b")
            b.go("again")
            b.expect("joined")
            b.go("receive")
            assert controller.engines["b"] == "waiting"
            a.go("receive")
            source.go((2, "all"))
            found = source.expect("did")
            assert a.expect("did") == 2
            if "b" not in found:
                a.go("receive")
                source.go((3, "all"))
                found = source.expect("did")
                assert a.expect("did") == 3
            assert b.expect("did") == found["a"][1]
            assert found["b"] == found["a"]

            controller.pause("b")
            assert controller.engines == {"a": "ready", "b": "paused"}
            with pytest.raises(RendezvousError, match="engine 'b' is paused, it must be ready"):
                controller.pause("b")
            assert pushed(10, a) == {"a": ("complete", 10)}
            controller.resume("b")
            assert pushed(11, a, b) == {"a": ("complete", 11), "b": ("complete", 11)}
            controller.drop("a", reason="it is too old")
            assert pushed(12, b, require=1) == {"b": ("complete", 12)}
            a.go("receive")
            kind, text = a.expect("did")
            assert "engine a was dropped: it is too old" in text
            assert kind in ("PushError", "RendezvousError")
            assert controller.engines == {"b": "ready"}
            for each in (source, a, b):
                each.go("leave")
            for each in (source, a, b):
                each.result()


def refused_then_obeys(me: Rank, where: str, engine: str, engines: Any) -> int:
    """Refused at first, it comes again when told."""
    with pytest.raises(RendezvousError) as caught:
        RefitSession.target(Model(WHOLE[0]), rendezvous=where, engine=engine, rank=0, size=1, deadline=20)
    me.tell("refused", str(caught.value))
    me.wait("again")
    return obeys(me, where, engine, engines)


def hands_over(me: Rank, where: str) -> tuple[bool, int]:
    """Push without waiting; change the values as soon as they're released."""
    model = Model(WHOLE[0])
    with RefitSession.source(model, rendezvous=where, rank=0, size=1, deadline=20) as session:
        model.fill(version=1)
        handle = session.push(version=1, wait=False)
        me.meet("pushing")
        early = handle.released.is_set()  # type: ignore[union-attr]
        assert handle.released.wait(20)  # type: ignore[union-attr]
        model.poison()
        return early, handle.result(20).version  # type: ignore[union-attr]


def takes_when_told(me: Rank, where: str) -> int:
    model = Model(WHOLE[0])
    with RefitSession.target(model, rendezvous=where, engine="a", rank=0, size=1, deadline=20) as session:
        me.meet("joined")
        return receive(session, model)


def test_a_push_that_goes_on_by_itself(ranks: Crew) -> None:
    where = free_rendezvous()
    with ranks.at_work([(hands_over, (where,)), (takes_when_told, (where,))]) as working:
        working[1].expect("joined")
        meet(working[:1], "pushing")
        working[1].go("joined")
        assert [rank.result() for rank in working] == [(False, 1), 1]


def releases(_: Rank, where: str, engine: str) -> list[int]:
    """Push, release, push again; the bytes of window buffers after each. A source if it has no engine."""
    given: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "deadline": 20}
    model = Model([Held(NAME, SHAPE, Box.whole(SHAPE), "bfloat16", strides=(1, 8))]) if engine else Model(WHOLE[0])
    found = []
    with (
        RefitSession.target(model, engine=engine, **given) if engine else RefitSession.source(model, **given) as session
    ):
        for version in (1, 2):
            if engine:
                assert session.receive().version == version
                assert model.faults(version=version, source="float32") == []
            else:
                push(session, model, version)
            found.append(held_bytes(session))
            session.release()
            found.append(held_bytes(session))
    return found


def held_bytes(session: RefitSession) -> int:
    standing = session._participant._mover.standing
    assert standing is not None
    return sum(each.buffer_nbytes for each in standing.executors.values())


def test_released_buffers_are_made_again(ranks: Crew) -> None:
    where = free_rendezvous()
    for found in ranks.results([(releases, (where, "")), (releases, (where, "a"))]):
        assert found[0] == found[2] > 0
        assert found[1] == found[3] == 0


def belongings() -> dict[str, int]:
    """Descriptors, threads and internet sockets of this process."""
    gc.collect()
    found = sockets()
    for each in found:
        each.close()
    end, counted = time.monotonic() + 0.1, []
    while time.monotonic() < end:  # a thread that was joined is still leaving
        counted.append([len(os.listdir(f"/proc/self/{where}")) for where in ("fd", "task")])
    descriptors, tasks = min(counted)
    return {"sockets": len(found), "descriptors": descriptors, "threads": tasks}


def comes_and_goes(me: Rank, wheres: list[str], side: str, rank: int) -> list[dict[str, int]]:
    """Open, push and close, once for each address; what the process has after each."""
    found = []
    for where in wheres:
        body, held = (give_twice, cut(2, 0)) if side == "source" else (take_twice, cut(2, 1))
        body(me, where, held, rank)
        found.append(belongings())
        me.meet("closed")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("refit")] == []
    return found


def test_nothing_is_left_behind_by_five_sessions(ranks: Crew) -> None:
    wheres = [free_rendezvous()] * 5
    jobs: list[Job] = [(comes_and_goes, (wheres, side, rank)) for side in ("source", "target") for rank in range(2)]
    with ranks.at_work(jobs) as working:
        for _ in wheres:
            for rank in working:
                rank.expect("closed")
            assert is_free(wheres[0]), "source rank 0's port"
            for rank in working:
                rank.go("closed")
        for found in [rank.result() for rank in working]:
            assert found[1:] == [found[0]] * (len(wheres) - 1)
            assert found[0]["sockets"] == 0


def is_free(where: str) -> bool:
    """Whether one can listen there."""
    port = int(where.rsplit(":", 1)[1])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
    return True
