"""Ranks that obey a test, verb by verb, and that can be held at a stage of a push so that a signal meets them there.

A node is told verbs (`join`, `push`, `receive`, `reform`, `look`, …) and answers each with a `Told`: what was raised,
what the error says of each engine, and what the tensors really are, read by the judge. Stages are met in wrappers
around the adapter's model, the fabric and the control channel; the product knows nothing of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from refit_backends.gloo import GlooFabric
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric
from refit_backends.tcp import TcpFabric

from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.errors import FencedError
from refit_sdk.messages import Done, Linked, Ready
from refit_sdk.session import RefitSession
from refit_sdk.testing import judge, torch_fill
from refit_sdk.testing.models import Held, Model
from refit_sdk.testing.ranks import PATIENCE, Process, Rank, running, start

NAME, SHAPE = "model.layers.0.w", (64, 8)
WINDOW = 256
"""Bytes of a window: a push of the whole tensor takes several."""

AT_STAGE = "at the stage"


@frozen(kw_only=True)
class Place:
    """A rank to be: `held` are its regions, `stage` where it is held (at the `nth` pass), `plain` a torch module."""

    where: str
    engine: str = ""
    rank: int
    size: int
    held: tuple[Held, ...]
    engines: tuple[str, ...] | None = None
    stage: str = ""
    nth: int = 1
    plain: bool = False
    breaks: str = ""
    fabric: str = "gloo"
    host: str = ""
    transport: str = "reshard"
    deadline: float = 10.0
    heartbeat: float = 10.0

    def __str__(self) -> str:
        return f"{self.engine or 'source'}[{self.rank}]"


@frozen(kw_only=True)
class Told:
    """What a verb came to. `raised` is the error's class ("" if none), `engines` what it, or the report, says of each.

    `content` is "poison", a version's number, or "mixed". `at` is the moment, in seconds of the machine's clock.
    """

    raised: str
    text: str
    failures: dict[str, str]
    engines: dict[str, str]
    content: str
    fenced: str | None
    at: float
    value: Any = None


@define(eq=False)
class Stage:
    """Holds the process at the `nth` pass of one stage until the test says to go on."""

    rank: Rank
    name: str
    nth: int

    def __call__(self, name: str) -> None:
        if name and name == self.name:
            self.nth -= 1
            if self.nth == 0:
                self.rank.meet(AT_STAGE)


@define(eq=False)
class StagedModel(Model):
    """A model by hand whose hooks are stages. `breaks`: what installing raises."""

    stage: Callable[[str], None] = field(default=lambda name: None, kw_only=True)
    breaks: str = field(default="", kw_only=True)
    fenced: str | None = field(default=None, init=False)

    def refit_prepare(self) -> None:
        """Called before a source's values are read."""
        self.stage("preparing")

    def refit_fragments(self) -> Any:
        """Called when described, and at each push to see whether anything moved."""
        self.stage("looking")
        return self.fragments

    def refit_install(self, *, version: int) -> None:
        """Called when all bytes have arrived."""
        self.stage("installing")
        if self.breaks:
            raise ValueError(self.breaks)

    def refit_fence(self, reason: str) -> None:
        """Keeps the reason."""
        self.fenced = reason

    def refit_unfence(self) -> None:
        """Forgets it."""
        self.fenced = None


def fabric_of(name: str, *, host: str) -> Any:
    """A fabric by name, on a host where one is stated. `two copies` is `shm` that reads no peer's memory."""
    stated = host or None
    made = {
        "gloo": GlooFabric,
        "tcp": TcpFabric,
        "shm": lambda: ShmFabric(host=stated),
        "two copies": lambda: ShmFabric(host=stated, one_copy=False),
        "mixed": lambda: MixedFabric(shm=ShmFabric(host=stated)),
    }
    return made[name]()


class StagedFabric:
    """Another fabric, with stages at connecting and at every message."""

    name = "staged"

    def __init__(self, fabric: Any, stage: Callable[[str], None]) -> None:
        self._fabric = fabric
        self._stage = stage
        self.host = getattr(fabric, "host", None)

    @classmethod
    def missing(cls) -> str | None:
        """None: tests that start it need what it wraps."""
        return None

    def connect(self, **about: Any) -> Any:
        """Connect, held before it."""
        self._stage("connecting")
        return StagedGroup(self._fabric.connect(**about), self._stage)


class StagedGroup:
    """A group, held before the n-th send or receive."""

    devices = frozenset({"cpu"})

    def __init__(self, group: Any, stage: Callable[[str], None]) -> None:
        self._group = group
        self._stage = stage

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        """Send, held before it."""
        self._stage("moving")
        return self._group.send(buffer, peer=peer)

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        """Receive, held before it."""
        self._stage("moving")
        return self._group.recv(buffer, peer=peer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class Plain(torch.nn.Module):
    """A module whose only parameter is the tensor; the `dtensor` adapter fences its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.model.layers[0].w = torch.nn.Parameter(torch.empty(SHAPE), requires_grad=False)
        torch_fill.fill_poison(self.tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter."""
        found: torch.Tensor = self.model.layers[0].w
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One product."""
        return x @ self.tensor


@define(eq=False)
class Node:
    """A rank's process, obeying."""

    rank: Rank
    place: Place
    session: RefitSession | None = None
    versions: list[int] = field(factory=list)
    stage: Stage = field(init=False)
    model: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.stage = Stage(self.rank, self.place.stage, self.place.nth)
        made = Plain() if self.place.plain else StagedModel(self.place.held, stage=self.stage, breaks=self.place.breaks)
        self.model = made

    def join(self) -> None:
        """Make the session."""
        place = self.place
        common: dict[str, Any] = {
            "rendezvous": place.where,
            "rank": place.rank,
            "size": place.size,
            "fabric": StagedFabric(fabric_of(place.fabric, host=place.host), self.stage),
            "deadline": place.deadline,
            "heartbeat": place.heartbeat,
        }
        self.stage("joining")
        if place.engine:
            self.session = RefitSession.target(self.model, engine=place.engine, **common)
        else:
            common |= {"engines": place.engines, "routes": [("*", place.transport)], "window_bytes": WINDOW}
            self.session = RefitSession.source(self.model, **common)
        self._watch_confirming()

    def _watch_confirming(self) -> None:
        assert self.session is not None
        client = self.session._participant.client
        send = client.send

        def held(message: Any) -> None:
            if isinstance(message, Linked):
                self.stage("agreeing")
            send(message)
            if isinstance(message, Ready) and self.stage.name == "waiting":
                client.check([])  # answered in order: the rendezvous has taken the word
            self.stage({Ready: "waiting", Linked: "agreed", Done: "confirmed"}.get(type(message), ""))

        client.send = held  # type: ignore[method-assign]

    def push(self, version: int, require: Any = "all") -> Any:
        """Fill the source with a version, and push it."""
        assert self.session is not None
        self.model.fill(version=version)
        return self.session.push(version=version, require=require)

    def receive(self) -> Any:
        """Take a push."""
        assert self.session is not None
        return self.session.receive()

    def reform(self) -> None:
        """Go on with the survivors."""
        assert self.session is not None
        self.session.reform()

    def close(self, reason: str = "") -> None:
        """Leave."""
        if self.session is not None:
            self.session.close(reason)

    def move_to(self, where: str) -> None:
        """Join at another rendezvous from now on."""
        self.place = evolve(self.place, where=where)

    def links(self) -> list[tuple[str, str, str]]:
        """What carries this rank's bytes: sender, receiver, and what serves the link."""
        assert self.session is not None
        return sorted((src, dst, by) for (src, dst), by in self.session.links.items())

    def plan_ranks(self) -> list[str]:
        """The seats of the plan's world."""
        assert self.session is not None
        return [str(seat) for seat in self.session.plan.world.seats]

    def mends(self) -> None:
        """From now on installing works."""
        self.model.breaks = ""

    def holds(self, stage: str, nth: int = 1) -> None:
        """From now on, be held at this stage."""
        self.stage.name, self.stage.nth = stage, nth

    def serves(self) -> str:
        """Whether a plain module's forward runs: "" or the refusal."""
        try:
            self.model(torch.ones(1, SHAPE[0]))
        except FencedError as error:
            return str(error)
        return ""

    def counts(self) -> tuple[int, int]:
        """Descriptors and threads of this process."""
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def content(self, versions: Sequence[int]) -> str:
        """What the tensors are."""
        if self.place.plain:
            found = [(self.model.tensor, Held(NAME, SHAPE, Box.whole(SHAPE)))]
        else:
            found = [(f.view, held) for f, held in zip(self.model.fragments, self.place.held, strict=True)]
        if all((torch_fill.read(view) == judge.poison(tuple(view.shape), h.stored)).all() for view, h in found):
            return "poison"
        for version in versions:
            if all((torch_fill.read(view) == h.bits(version=version)).all() for view, h in found):
                damaged = [] if self.place.plain else [b for b in self.model.blocks.values() if b.damage()]
                return "damaged" if damaged else str(version)
        return "mixed"

    def fenced(self) -> str | None:
        """Why it doesn't serve."""
        if self.place.plain:
            return self.serves() or None
        fenced: str | None = self.model.fenced
        return fenced

    def do(self, verb: str, *args: Any) -> Told:
        """Do a verb; what it came to."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = getattr(self, verb)(*args)
        except Exception as raised:  # noqa: BLE001 - a rank's failure is the test's to judge
            error = raised
        at = time.monotonic()
        states = {name: report.state for name, report in getattr(value, "engines", {}).items()}
        return Told(
            raised="" if error is None else type(error).__name__,
            text="" if error is None else str(error),
            failures=getattr(error, "failures", {}),
            engines=getattr(error, "engines", states),
            content=self.content(range(1, 64)) if self.place.engine else "",
            fenced=self.fenced() if self.place.engine else None,
            at=at,
            value=value if isinstance(value, (int, str, list, tuple)) else None,
        )


def node(rank: Rank, place: Place) -> None:
    """The body of a rank: obey until told to go."""
    obeying = Node(rank, place)
    while (said := rank.pipe.recv()) != "go home":
        verb, args = said
        rank.tell("did", obeying.do(verb, *args))
    if obeying.session is not None:
        obeying.session.close()


def controller(rank: Rank, where: str, engines: tuple[str, ...], deadline: float, heartbeat: float) -> None:
    """The body of a process that only hosts the rendezvous."""
    with RefitController(rendezvous=where, engines=engines, deadline=deadline, heartbeat=heartbeat):
        rank.tell("hosts")
        rank.wait("go home")


@define(eq=False)
class Cast:
    """The test's side of several nodes, by the names of their ranks."""

    ranks: dict[str, Process]
    starts: Callable[..., Process]

    def start(self, name: str, verb: str, *args: Any) -> None:
        """Tell a node a verb."""
        self.ranks[name].pipe.send((verb, args))

    def told(self, name: str, *, timeout: float = PATIENCE) -> Told:
        """What the verb that a node was told came to."""
        told: Told = self.ranks[name].expect("did", timeout=timeout)
        return told

    def ask(self, name: str, verb: str, *args: Any) -> Told:
        """Tell one node a verb, and wait."""
        self.start(name, verb, *args)
        return self.told(name)

    def together(self, verbs: dict[str, tuple[Any, ...]]) -> dict[str, Told]:
        """Tell several nodes a verb each, and wait for all."""
        for name, verb in verbs.items():
            self.start(name, *verb)
        return {name: self.told(name) for name in verbs}

    def verbs(self, version: int, *, but: Sequence[str] = (), require: Any = "all") -> dict[str, tuple[Any, ...]]:
        """A push for the sources and a receive for the targets, except some."""
        return {
            name: ("push", version, require) if name.startswith("source") else ("receive",)
            for name in self.ranks
            if name not in but and name != "controller"
        }

    def push(
        self, version: int, *, but: Sequence[str] = (), require: Any = "all", first: Sequence[str] = ()
    ) -> dict[str, Told]:
        """A whole push by all, except some. The `first` ones wait in it before the others begin."""
        verbs = self.verbs(version, but=but, require=require)
        for name in first:
            self.enter(name, *verbs[name])
        for name in verbs.keys() - set(first):
            self.start(name, *verbs[name])
        return {name: self.told(name) for name in verbs}

    def enter(self, name: str, verb: str, *args: Any) -> None:
        """Tell a node a verb, and wait until the rendezvous has been told that it is in."""
        self.ask(name, "holds", "waiting")
        self.start(name, verb, *args)
        self.at_stage(name)
        self.release(name)

    def begin(self, version: int, *, held: Sequence[str], but: Sequence[str] = ()) -> None:
        """A push that some will be held in, by stages of their own. The targets among the others wait in it first."""
        verbs = self.verbs(version, but=but)
        for name in verbs:
            if name not in held and not name.startswith("source"):
                self.enter(name, *verbs[name])
        for name in verbs:
            if name in held or name.startswith("source"):
                self.start(name, *verbs[name])

    def start_process(self, place: Place) -> None:
        """A new process for a place, in the seat of the one that was lost."""
        self.ranks[str(place)] = self.starts(node, (place,))

    def add(self, place: Place) -> Told:
        """A new process that joins."""
        self.start_process(place)
        told = self.ask(str(place), "join")
        assert told.raised == "", told.text
        return told

    def at_stage(self, name: str) -> None:
        """Wait until a node is held at its stage."""
        self.ranks[name].expect(AT_STAGE)

    def release(self, name: str) -> None:
        """Let a held node go on."""
        self.ranks[name].go(AT_STAGE)


@contextmanager
def cast(places: Sequence[Place], *, controlled: bool = False, join: bool = True) -> Iterator[Cast]:
    """Processes for these places; joined, unless a test does it."""
    first = places[0]
    bodies: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(node, (place,)) for place in places]
    if controlled:
        engines = tuple(sorted({place.engine for place in places if place.engine}))
        bodies.append((controller, (first.where, engines, first.deadline, first.heartbeat)))
    with running([]) as processes:
        made = Cast({}, lambda body, args: start(processes, body, args))
        for name, (body, args) in zip([*map(str, places), "controller"], bodies, strict=False):
            made.ranks[name] = made.starts(body, args)
        if controlled:
            made.ranks["controller"].expect("hosts")
        if join:
            joined = made.together({str(place): ("join",) for place in places})
            assert {name: told.text for name, told in joined.items() if told.raised} == {}
        yield made


def rows(rank: int, size: int) -> tuple[Held, ...]:
    """A share of the rows."""
    step = SHAPE[0] // size
    return (Held(NAME, SHAPE, Box((step * rank, 0), (step * rank + step, SHAPE[1]))),)


def columns(rank: int, size: int) -> tuple[Held, ...]:
    """A share of the columns."""
    step = SHAPE[1] // size
    return (Held(NAME, SHAPE, Box((0, step * rank), (SHAPE[0], step * rank + step))),)


def whole() -> tuple[Held, ...]:
    """All of it."""
    return (Held(NAME, SHAPE, Box.whole(SHAPE)),)
