"""A state machine of pushes: sessions of real ranks, and what trainers, engines and networks do to them, in any order.

Two sources and two engines, of two ranks and of one. Hypothesis chooses what comes next: a push, a push in which one
rank's link is cut at some message, storage that moves or is cut another way, window buffers that are freed. After each,
what every rank was told must be true of its bytes and its fence.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from refit_sdk.errors import PushError
from refit_sdk.fabric import FabricError
from refit_sdk.placement import Shard
from refit_sdk.session import RefitSession
from refit_sdk.testing.cases import cut
from refit_sdk.testing.models import Model, Ranks, beside
from refit_sdk.testing.ranks import free_rendezvous
from refit_sdk.testing.rig import FabricLike, Rig, made, raise_first

PLACES = (("", 0), ("", 1), ("a", 0), ("a", 1), ("b", 0))
"""Engine (none: a source) and rank of each process."""
_numbers = itertools.count()


class Cut:
    """A fabric of which one end breaks at a message, once, when it is told to."""

    def __init__(self, inner: Any) -> None:
        self.name, self.inner, self.left = inner.name, inner, -1

    def missing(self) -> str | None:
        """What the fabric says."""
        said: str | None = self.inner.missing()
        return said

    def connect(self, **about: Any) -> Any:
        """A group whose receives are counted down."""
        return _CutGroup(self.inner.connect(**about), self)


class _CutGroup:
    def __init__(self, group: Any, fabric: Cut) -> None:
        self._group, self._fabric = group, fabric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv(self, buffer: Any, *, peer: int) -> Any:
        self._fabric.left -= 1
        if self._fabric.left == 0:
            raise FabricError("this link was cut by the test", peer=None)
        return self._group.recv(buffer, peer=peer)


@define(eq=False)
class Serving(Model):
    """A model that knows whether it may serve."""

    fenced: str = ""

    def refit_fence(self, reason: str) -> None:
        """May not."""
        self.fenced = reason

    def refit_unfence(self) -> None:
        """May."""
        self.fenced = ""


@define(eq=False)
class Actor:
    """A process: its session, what it holds, and its end of the fabric."""

    engine: str
    model: Serving
    fabric: Cut
    session: RefitSession = field(init=False)


_actors: dict[tuple[int, int], Actor] = {}
"""Those of this process, by machine and number."""


def holdings(side: str, turn: int) -> Ranks:
    """What a side holds, cut along another dim each time."""
    size = {"": 2, "a": 2, "b": 1}[side]
    names = ("layers.0.w", "layers.1.w", "head.w")
    return beside(*(cut((12, 10), size, Shard(turn % 2), name=name) for name in names))


def enter(_: Any, key: tuple[int, int], where: str, transport: str, fabric: FabricLike, device: str) -> None:
    """Join."""
    engine, rank = PLACES[key[1]]
    model = Serving(holdings(engine, 1 if engine else 0)[rank], device=device)
    actor = Actor(engine, model, Cut(made(fabric)))
    common: dict[str, Any] = {"rendezvous": where, "rank": rank, "fabric": actor.fabric, "deadline": 20.0}
    if engine:
        actor.session = RefitSession.target(model, engine=engine, size=1 + (engine == "a"), **common)
    else:
        routes = [("*", transport)]
        actor.session = RefitSession.source(
            model, size=2, engines=["a", "b"], routes=routes, window_bytes=128, **common
        )
    _actors[key] = actor


def push(_: Any, key: tuple[int, int], version: int, cut_at: int) -> tuple[dict[str, str], list[str], str]:
    """A push: the states that were told, what is wrong with the bytes, and the fence. `cut_at`: 0 for no trouble."""
    actor = _actors[key]
    actor.fabric.left = cut_at
    if not actor.engine:
        actor.model.fill(version=version)
    try:
        verb: Any = actor.session.receive if actor.engine else partial(actor.session.push, version=version)
        states = {name: told.state for name, told in verb().engines.items()}
    except PushError as error:
        states = error.engines
    actor.fabric.left = -1
    return states, actor.model.faults(version=version), actor.model.fenced


def move(_: Any, key: tuple[int, int], side: str, turn: int) -> None:
    """Hold the same elsewhere, or something else, if of that side."""
    actor = _actors[key]
    if actor.engine == side:
        actor.model.rebind(holdings(side, turn)[PLACES[key[1]][1]])


def free(_: Any, key: tuple[int, int]) -> None:
    """Free window buffers."""
    _actors[key].session.release()


def depart(_: Any, key: tuple[int, int]) -> None:
    """Leave."""
    _actors.pop(key).session.close()


class PushMachine(RuleBasedStateMachine):
    """The rules. `rig` is set by a subclass."""

    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.version = 0
        self.told: list[tuple[dict[str, str], list[str], str]] = []
        self.entered = False

    def everybody(self, body: Any, *args: Any, each: Any = lambda number: ()) -> list[Any]:
        """Have all ranks do something at once."""
        jobs = [(body, ((self.number, number), *args, *each(number))) for number in range(len(PLACES))]
        outcomes = self.rig.players.outcomes(jobs)
        raise_first(outcomes)
        return outcomes

    @initialize()
    def enter(self) -> None:
        """All join."""
        self.everybody(enter, free_rendezvous(), self.rig.transport, self.rig.fabric, self.rig.device)
        self.entered = True

    @rule()
    def push(self) -> None:
        """Nothing goes wrong."""
        self.version += 1
        self.told = self.everybody(push, self.version, 0)
        assert [states for states, _, _ in self.told[:2]] == [{"a": "complete", "b": "complete"}] * 2

    @rule(victim=st.integers(2, 4), message=st.integers(1, 4))
    def push_over_a_cut_link(self, victim: int, message: int) -> None:
        """One rank's link is cut at a message: its engine isn't complete, the other is."""
        self.version += 1
        self.told = self.everybody(push, self.version, each=lambda number: (message if number == victim else 0,))
        engine = PLACES[victim][0]
        for states, _, _ in self.told[:2]:
            assert states[engine] in ("untouched", "torn"), states
            assert [state for name, state in states.items() if name != engine] == ["complete"]

    @rule(side=st.sampled_from(["", "a", "b"]), turn=st.integers(0, 1))
    def hold_elsewhere(self, side: str, turn: int) -> None:
        """Storage moves, or is cut another way."""
        self.everybody(move, side, turn)
        self.told = []

    @rule()
    def release(self) -> None:
        """Window buffers are freed."""
        self.everybody(free)

    @invariant()
    def what_was_told_is_true(self) -> None:
        """Complete: right, and serving. Torn: not serving. Sources are never written."""
        for number, (states, faults, fenced) in enumerate(self.told):
            engine = PLACES[number][0]
            if not engine or states.get(engine) == "complete":
                assert faults == [], f"process {number} was told {states}"
                assert not fenced
            elif states.get(engine) == "torn":
                assert fenced, f"process {number} serves, and was told {states}"

    def teardown(self) -> None:
        """All leave."""
        if self.entered:
            self.everybody(depart)


def check_pushes(rig: Rig, *, examples: int = 6, steps: int = 8) -> None:
    """Let hypothesis look for an order of things in which what was told isn't true."""
    made_for = type("PushMachineOfRig", (PushMachine,), {"rig": rig})
    about = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(made_for, settings=about)
