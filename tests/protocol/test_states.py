"""The rendezvous under every order of events that hypothesis finds: the tables hold, nobody waits for ever, and no
engine is said to be complete that is not."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Literal

import pytest
from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refit_sdk import __version__, messages
from refit_sdk import manifest as wire
from refit_sdk.coordinator import Coordinator
from refit_sdk.errors import RendezvousError
from refit_sdk.messages import Claim, Done, EngineDone, Hello, Linked, Message, Planned, Ready, Unable, Unready
from refit_sdk.states import ENGINE, SESSION, EngineState, PushState, SessionState, next_state
from refit_sdk.world import Manifest, World

DEADLINE, HEARTBEAT = 10.0, 2.0
EMPTY = wire.encode(Manifest(()))


@define
class Process:
    """A process that behaves as `refit_sdk.participant` does, one message at a time."""

    link: int
    claims: tuple[Claim, ...]
    doing: str = "new"
    inbox: deque[Message] = field(factory=deque)
    go: messages.Go | None = None
    dropped: set[str] = field(factory=set)
    joined: bool = False
    closed: bool = False
    form: messages.Form | None = None
    world: World | None = None
    groups: dict[str, list[int]] = field(factory=dict)

    @property
    def is_source(self) -> bool:
        return any(claim.side == "source" for claim in self.claims)

    @property
    def engines(self) -> list[str]:
        mine = {claim.engine for claim in self.claims if claim.side == "target"}
        return [name for name in (self.go.engines if self.go else ()) if self.is_source or name in mine]


def world() -> list[tuple[Claim, ...]]:
    """Two sources, the engine `a` of two ranks, one of them a source too, and the engine `b` of one."""
    source = [Claim("source", "", rank, 2) for rank in range(2)]
    return [
        (source[0],),
        (source[1], Claim("target", "a", 0, 2)),
        (Claim("target", "a", 1, 2),),
        (Claim("target", "b", 0, 1),),
    ]


class Rendezvous(RuleBasedStateMachine):
    """Processes join, push, receive, fail, die, come again; messages are late; the clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.hub = Coordinator(engines=("a", "b"), deadline=DEADLINE, heartbeat=HEARTBEAT, now=0.0)
        self.processes: dict[int, Process] = {}
        self.links = 0
        self.version = 0
        self.said: dict[int, dict[tuple[int, str], bool]] = {}
        for claims in world():
            self.spawn(claims)

    def spawn(self, claims: tuple[Claim, ...]) -> None:
        self.links += 1
        self.processes[self.links] = Process(self.links, claims)

    def up(self, process: Process, message: messages.Up) -> None:
        self.post(self.hub.receive(process.link, message, now=self.now))

    def post(self, sent: list[tuple[int, Message]]) -> None:
        for link, message in sent:
            if link in self.processes:
                self.processes[link].inbox.append(message)

    def some(self, data: st.DataObject, *doing: str, source: bool | None = None) -> Process | None:
        found = [
            p for p in self.processes.values() if p.doing in doing and not p.closed and source in (None, p.is_source)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @initialize(joined=st.booleans())
    def start(self, joined: bool) -> None:
        if joined:
            for process in list(self.processes.values()):
                self.say_hello(process)
            self.hear_all()
            assert self.hub.state is SessionState.IDLE

    @rule(data=st.data())
    def hello(self, data: st.DataObject) -> None:
        process = self.some(data, "new")
        if process is not None:
            self.say_hello(process)

    def say_hello(self, process: Process) -> None:
        process.doing = "joining"
        hello = Hello(
            sdk=__version__,
            claims=process.claims,
            manifests=(EMPTY,) * len(process.claims),
            settings="{}" if process.is_source else None,
            plugins={},
            engines=None,
            pid=process.link,
            host="here",
        )
        self.up(process, hello)

    @rule(data=st.data(), require=st.sampled_from([0, 0, 1]))
    def push(self, data: st.DataObject, require: int) -> None:
        process = self.some(data, "idle", source=True)
        if process is not None:
            self.say_push(process, require)

    def say_push(self, process: Process, require: int) -> None:
        process.doing = "round"
        version = (self.hub.version or 0) + 1
        manifests = (None,) * len(process.claims)
        self.up(process, Ready(kind="push", manifests=manifests, version=version, require=require))

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        process = self.some(data, "idle", source=False)
        if process is not None:
            self.say_receive(process)

    def say_receive(self, process: Process) -> None:
        process.doing = "round"
        self.up(process, Ready(kind="push", manifests=(None,)))

    @rule(data=st.data())
    def reform(self, data: st.DataObject) -> None:
        process = self.some(data, "idle")
        if process is not None:
            self.say_reform(process)

    def say_reform(self, process: Process) -> None:
        process.doing = "round"
        self.up(process, Ready(kind="reform", manifests=(None,) * len(process.claims)))

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        found = [p for p in self.processes.values() if p.inbox]
        if found:
            self.handle(data.draw(st.sampled_from(found)))

    @rule()
    def hear_all(self) -> None:
        while any(p.inbox for p in self.processes.values()):
            for process in list(self.processes.values()):
                if process.inbox:
                    self.handle(process)

    @rule(require=st.sampled_from([0, 1]))
    def everybody(self, require: int) -> None:
        """All who are idle go for a push: what happens most."""
        for process in [p for p in self.processes.values() if p.doing == "idle" and not p.closed]:
            if process.is_source:
                self.say_push(process, require)
            else:
                self.say_receive(process)

    @rule(ok=st.sampled_from([True, True, False]), mutated=st.booleans())
    def whole_push(self, ok: bool, mutated: bool) -> None:
        """A push from beginning to end, as far as the others let it."""
        self.hear_all()
        self.everybody(1)
        self.hear_all()
        for process in [p for p in self.processes.values() if p.doing == "moving"]:
            self.finish(process, ok=ok, mutated=mutated)
        self.hear_all()

    @rule(data=st.data(), kind=st.sampled_from(["push", "push", "reform"]))
    def excuse(self, data: st.DataObject, kind: Literal["push", "reform"]) -> None:
        """A process can't enter what it was called to, and goes on."""
        process = self.some(data, "idle")
        if process is not None:
            version = (self.hub.version or 0) + 1 if process.is_source and kind == "push" else None
            self.up(process, Unready(kind=kind, cause="it isn't ready", version=version))

    @precondition(lambda self: self.hub.state is SessionState.JOINING)
    @rule(data=st.data(), really=st.sampled_from([False] * 9 + [True]))
    def unable(self, data: st.DataObject, really: bool) -> None:
        """A process can't even ask for its seats."""
        process = self.some(data, "new")
        if process is not None and really:
            process.doing = "joining"
            self.up(process, Unable(claims=process.claims, reason="no adapter accepts a Foo"))
            assert self.hub.state is SessionState.CLOSED

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """A process dies, and another takes its seats."""
        process = self.some(data, "idle")
        if process is not None:
            self.remove(process)
            self.say_hello(self.processes[self.links])
            self.hear_all()

    @rule()
    def whole_reform(self) -> None:
        """All who are idle re-form, as far as the others let them."""
        for process in [p for p in self.processes.values() if p.doing == "idle" and not p.closed]:
            self.say_reform(process)
        self.hear_all()

    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]), mutated=st.booleans())
    def move(self, data: st.DataObject, ok: bool, mutated: bool) -> None:
        process = self.some(data, "moving")
        if process is not None:
            self.finish(process, ok=ok, mutated=mutated)

    def finish(self, process: Process, *, ok: bool, mutated: bool) -> None:
        assert process.go is not None
        done = {}
        for name in process.engines:
            fine = ok and name not in process.dropped
            done[name] = EngineDone(1, 1, "" if fine else "it failed", mutated)
            self.said.setdefault(process.go.push, {})[(process.link, name)] = fine
        process.doing = "settling"
        self.up(process, Done(push=process.go.push, engines=done))

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        process = self.some(data, "joining", "idle", "round", "moving", "settling")
        if process is not None:
            self.remove(process)

    def remove(self, process: Process) -> None:
        del self.processes[process.link]
        self.post(self.hub.lost(process.link, "it is gone", now=self.now))
        self.spawn(process.claims)

    @rule(seconds=st.sampled_from([0.5, HEARTBEAT, DEADLINE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.post(self.hub.tick(now=self.now))

    @precondition(lambda self: self.hub.state is not SessionState.CLOSED)
    @rule(name=st.sampled_from("ab"), verb=st.sampled_from(["pause", "resume", "admit"]))
    def control(self, name: str, verb: str) -> None:
        with contextlib.suppress(RendezvousError):
            self.post(getattr(self.hub, verb)(name))

    @precondition(lambda self: self.hub.state is not SessionState.CLOSED)
    @rule(name=st.sampled_from("ab"), really=st.sampled_from([False] * 4 + [True]))
    def drop(self, name: str, really: bool) -> None:
        with contextlib.suppress(RendezvousError):
            self.post(self.hub.drop(name, "it burns", now=self.now) if really else [])

    def handle(self, process: Process) -> None:
        message = process.inbox.popleft()
        match message:
            case messages.Welcome(late=late):
                process.doing, process.joined = "idle" if late else "round", late
            case messages.Refused():
                process.doing, process.closed = "refused", True
            case messages.Form(epoch=epoch) if process.doing == "round":
                process.world = self.world_of(process, message)
                if process.world is None:
                    self.up(process, messages.Failed(epoch=epoch, error="RendezvousError", causes=("gone",)))
                else:
                    process.form = message
                    self.up(process, Planned(epoch=epoch, input_digest="i", plan_digest="p"))
            case messages.Link(epoch=epoch) if process.doing == "round":
                self.connect(process)
                self.up(process, Linked(epoch=epoch))
            case messages.Formed():
                assert process.doing == "round"
                process.doing, process.joined = "idle", True
            case messages.Go():
                assert process.doing == "round"
                process.doing, process.go, process.dropped = "moving", message, set()
            case messages.Drop(push=push, engine=engine):
                if process.go is not None and process.go.push == push:
                    process.dropped.add(engine)
            case messages.Outcome():
                self.check_outcome(process, message)
                process.doing = "idle"
            case messages.Fault():
                assert process.doing == "round"
                process.doing, process.closed = "idle", not process.joined
            case messages.Closed():
                process.closed = True

    def world_of(self, process: Process, form: messages.Form) -> World | None:
        """The world that a process was told of, or None if another epoch has begun since, or it's lost."""
        asked = messages.WorldGet(id=7, epoch=form.epoch, start=0)
        replies = [m for _, m in self.hub.receive(process.link, asked, now=self.now)]
        if not replies or not isinstance(replies[0], messages.StoreReply) or not replies[0].value:
            return None
        assert wire.digest(replies[0].value) == form.digest
        return wire.decode_world(replies[0].value)

    def connect(self, process: Process) -> None:
        """Make the fresh groups. The others must have the members that the world says: connecting would never end."""
        assert process.form is not None
        world = process.world
        assert world is not None
        mine = {(claim.side, claim.engine, claim.rank) for claim in process.claims}
        number = next(seat.process for seat in world.seats if (seat.side, seat.engine, seat.rank) in mine)
        groups = {
            engine: sorted({seat.process for seat in world.seats if seat.engine in ("", engine)})
            for engine in world.engines
        }
        found = {engine: members for engine, members in groups.items() if number in members}
        kept = found.keys() - set(process.form.fresh)
        assert {engine: process.groups.get(engine) for engine in kept} == {engine: found[engine] for engine in kept}
        process.groups = found

    def check_outcome(self, process: Process, outcome: messages.Outcome) -> None:
        assert process.doing == "settling"
        assert process.go is not None
        assert outcome.push == process.go.push
        said = self.said[outcome.push]
        for name, verdict in outcome.engines.items():
            words = [fine for (_, engine), fine in said.items() if engine == name]
            if verdict.state == PushState.COMPLETE:
                assert verdict.version == outcome.version
                targets = {link for (link, engine), fine in said.items() if engine == name and fine}
                ranks = 2 if name == "a" else 1
                assert len(targets) >= ranks, "complete without the word of every rank"
            else:
                assert verdict.cause
                assert not all(words) or len(words) < 2 or verdict.cause

    @invariant()
    def versions_go_up(self) -> None:
        assert (self.hub.version or 0) >= self.version
        self.version = self.hub.version or 0

    @invariant()
    def engines_serve_what_was_published(self) -> None:
        for engine in self.hub.membership.engines.values():
            assert (engine.version or 0) <= (self.hub.version or 0)

    def teardown(self) -> None:
        """Nobody waits for ever: give everybody time, and see that only receivers without a push still wait."""
        for _ in range(12):
            self.hear_all()
            for process in self.processes.values():
                if process.doing == "moving" and not process.closed:
                    self.finish(process, ok=True, mutated=True)
            self.now += DEADLINE
            self.post(self.hub.tick(now=self.now))
        for process in self.processes.values():
            if not process.closed and process.doing not in ("new", "refused", "idle"):
                assert process.doing == "round", f"{process} waits in {process.doing}"
                assert not process.is_source, f"{process} waits for a push for ever"
                assert self.hub.state in (SessionState.IDLE, SessionState.BROKEN)


Rendezvous.TestCase.settings = settings(max_examples=150, stateful_step_count=60, derandomize=True, deadline=None)
TestRendezvous = Rendezvous.TestCase


@pytest.mark.parametrize("state", list(SessionState))
def test_every_session_state_can_be_closed(state: SessionState) -> None:
    assert next_state(SESSION, state, "closed") is SessionState.CLOSED


@pytest.mark.parametrize("state", list(EngineState))
def test_every_engine_state_can_lose_a_rank(state: EngineState) -> None:
    assert next_state(ENGINE, state, "rank lost") is EngineState.LOST


def test_an_event_that_the_table_lacks_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="no way out"):
        next_state(SESSION, SessionState.JOINING, "go")
