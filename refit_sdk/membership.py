"""Who is here: the seats of both sides, the engines and what state each is in, and who was lost.

1. A process claims seats; a claim that contradicts what is known is refused, and only the claimer hears of it.
2. The world is complete when every source rank and every rank of the expected engines has a seat.
3. A lost process empties its seats. A lost source needs a reform; an engine with an empty seat is lost until the rank
   comes again or a reform accepts the loss.

Pure: no I/O and no clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Final
from weakref import WeakValueDictionary

from attrs import define, field
from msgspec import structs

from refit_sdk import manifest as wire
from refit_sdk.errors import RendezvousError
from refit_sdk.messages import Claim, Hello, Verdict
from refit_sdk.stated import Stated
from refit_sdk.states import ENGINE, EngineState, PushState, next_state
from refit_sdk.world import Location, Manifest, Seat, Side, World

ENGINE_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")
"""What an engine may be called, but for `source`: ranks' names, `rollout-0[1]+source[0]`, then say who is meant."""


@define
class Member:
    """A process that has seats. `process` is its world number, from the first epoch that it is in.

    `hello` is without its manifests' bodies.
    """

    link: int
    hello: Hello
    manifests: list[Manifest]
    process: int | None = None

    @property
    def name(self) -> str:
        """All its ranks, for messages."""
        return "+".join(str(claim) for claim in self.hello.claims)


@define
class Engine:
    """The target ranks that serve together. `version` is what all of them hold, if they do (None: nothing published).

    `torn` outlives the loss and the return of a rank: only a full push ends it.
    """

    name: str
    size: int
    state: EngineState = EngineState.WAITING
    version: int | None = None
    torn: bool = False
    links: dict[int, int] = field(factory=dict)
    formed: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether every rank has a seat."""
        return len(self.links) == self.size

    def happen(self, event: str) -> None:
        """Go to the state that an event leads to."""
        self.state = next_state(ENGINE, self.state, event)

    def missing(self) -> Iterator[str]:
        """The names of ranks without a seat."""
        return (str(Seat("target", self.name, rank)) for rank in range(self.size) if rank not in self.links)

    def verdict(self, *, cause: str = "") -> Verdict:
        """What the engine is when no push touched it."""
        return Verdict(PushState.TORN if self.torn else PushState.UNTOUCHED, self.version, cause)

    def settle(self, verdict: Verdict) -> None:
        """Take what a push left it as."""
        self.version, self.torn = verdict.version, verdict.state == PushState.TORN


_ADVICE: Final = {
    EngineState.WAITING: "it is in from the next push on",
    EngineState.READY: "it takes part already",
    EngineState.MOVING: "ask again when the push has ended",
    EngineState.TORN: "mend it by a push first, or drop it",
    EngineState.LOST: "start its ranks again, or drop it",
    EngineState.PAUSED: "it is left out already",
}
"""What to do where an engine isn't in the state that a verb of the controller needs."""


class Membership:
    """The seats, by side and rank. `expected` are the engines to wait for: a number of any name, or names."""

    def __init__(self, expected: int | tuple[str, ...]) -> None:
        self.expected = expected
        self._stated = expected
        self.num_sources: int | None = None
        self.sources: dict[int, int] = {}
        self.engines: dict[str, Engine] = {}
        self.members: dict[int, Member] = {}
        self.lost: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._source_names: set[str] = set()
        self._processes = 0
        self._stated_alike = Stated()
        self._known: WeakValueDictionary[str, Manifest] = WeakValueDictionary()

    def admit(self, link: int, hello: Hello) -> Member:
        """Seat a process. `RendezvousError` (nothing changed) if it can't have what it claims."""
        if not hello.claims or len(hello.claims) != len(hello.manifests):
            raise RendezvousError(
                f"{len(hello.claims)} seats were claimed with {len(hello.manifests)} manifests: one each"
            )
        for claim in hello.claims:
            self._check(claim)
        self._check_engines(hello)
        self._stated_alike.check(hello)
        manifests = [self.decoded(body) for body in hello.manifests]
        for claim in hello.claims:
            self._seat(claim, link)
        member = self.members[link] = Member(link, structs.replace(hello, manifests=()), manifests)
        self._stated_alike.add(link, member.hello)
        return member

    def decoded(self, body: bytes) -> Manifest:
        """A manifest; equal bodies are one, and looked at once. `RendezvousError` if it is none."""
        name = wire.digest(body)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = wire.decode(body)
        return found

    def may_have(self, claims: Iterable[Claim]) -> bool:
        """Whether a process could be given these seats."""
        try:
            for claim in claims:
                self._check(claim)
        except RendezvousError:
            return False
        return True

    def note(self, claim: Claim) -> None:
        """Know of the seats beside this one, whose process won't come."""
        if claim.side == "source":
            self.num_sources = self.num_sources or claim.size
        else:
            self.engines.setdefault(claim.engine, Engine(claim.engine, claim.size))

    def _check(self, claim: Claim) -> None:
        _check_name(claim)
        if claim.side == "source":
            self._check_source(claim)
        else:
            self._check_target(claim)
        if not 0 <= claim.rank < claim.size:
            raise RendezvousError(
                f"{claim} can't be: its size is {claim.size}, ranks are 0 to {claim.size - 1}: see rank= and size="
            )

    def _check_source(self, claim: Claim) -> None:
        if self.num_sources not in (None, claim.size):
            raise RendezvousError(
                f"{claim} says there are {claim.size} source ranks, the others {self.num_sources}: give all one size"
            )
        self._check_free(claim, self.sources)

    def _check_engines(self, hello: Hello) -> None:
        if hello.engines is not None and hello.engines != self._stated:
            raise RendezvousError(
                f"{hello.claims[0]} waits for engines={hello.engines!r}, the rendezvous for {self._stated!r}: "
                "give all the same"
            )

    def _check_target(self, claim: Claim) -> None:
        engine = self.engines.get(claim.engine)
        if engine is None:
            if not self.admits(claim.engine):
                raise RendezvousError(
                    f"{claim} is not of an engine that is waited for ({self._expected()}): see the name, or admit it"
                )
            return
        if engine.size != claim.size:
            raise RendezvousError(
                f"{claim} says its engine has {claim.size} ranks, the others say {engine.size}: give all one size"
            )
        self._check_free(claim, engine.links)

    def _check_free(self, claim: Claim, taken: dict[int, int]) -> None:
        if claim.rank in taken:
            other = self.members[taken[claim.rank]].hello
            raise RendezvousError(
                f"{claim} is taken, by process {other.pid} on {other.host}: every process needs a rank of its own"
            )

    def expect(self, engine: str) -> None:
        """Let an engine of this name join. While any name may, there is nothing to do."""
        if isinstance(self.expected, int):
            if len(self.engines) < self.expected:
                return
            self.expected = tuple(sorted(self.engines))
        if engine not in self.expected:
            self.expected = (*self.expected, engine)

    def forget(self, engine: str) -> None:
        """Neither wait for this engine any more, nor miss it."""
        found = self.engines.pop(engine, None)
        for rank in range(found.size) if found is not None else ():
            self.lost.pop(str(Seat("target", engine, rank)), None)
        if isinstance(self.expected, int):
            self.expected = max(0, self.expected - 1)
        else:
            self.expected = tuple(name for name in self.expected if name != engine)

    @property
    def names(self) -> list[str]:
        """The engines that are here, or expected by name, in order."""
        return sorted({*self.engines, *(() if isinstance(self.expected, int) else self.expected)})

    def find(self, name: str) -> Engine | None:
        """The engine of that name; None if it's expected and hasn't come. `RendezvousError` if it isn't known."""
        if name not in self.names:
            near = get_close_matches(name, self.names, n=1)
            hint = f", the nearest is {near[0]}" if near else ""
            raise RendezvousError(
                f"engine {name!r} is not known here; known are: {', '.join(self.names) or 'none'}{hint}: "
                "see the name, or admit it"
            )
        return self.engines.get(name)

    def engine_that_is(self, state: EngineState, name: str) -> Engine:
        """The engine of that name. `RendezvousError` unless it is in that state."""
        engine = self.find(name)
        if engine is None:
            raise RendezvousError(f"engine {name!r} hasn't joined, it must be {state}: start its ranks, or drop it")
        if engine.state is not state:
            raise RendezvousError(f"engine {name!r} is {engine.state}, it must be {state}: {_ADVICE[engine.state]}")
        return engine

    def admits(self, engine: str) -> bool:
        """Whether an engine of this name may join."""
        if isinstance(self.expected, int):
            return bool(self.lost) or len(self.engines) < self.expected or engine in self.engines
        return engine in self.expected

    def _expected(self) -> str:
        return f"{self.expected} of any name" if isinstance(self.expected, int) else ", ".join(self.expected)

    def _seat(self, claim: Claim, link: int) -> None:
        self.lost.pop(str(claim), None)
        self.left.pop(str(claim), None)
        if claim.side == "source":
            self.num_sources = claim.size
            self.sources[claim.rank] = link
            self._source_names.add(str(claim))
            return
        engine = self.engines.setdefault(claim.engine, Engine(claim.engine, claim.size))
        engine.torn = engine.torn and bool(engine.links)
        engine.links[claim.rank] = link
        if engine.state is EngineState.LOST:
            engine.happen("rejoined")

    def remove(self, link: int, cause: str, *, left: bool = False) -> Member:
        """Empty a process's seats."""
        member = self.members.pop(link)
        self._stated_alike.remove(link, member.hello)
        for claim in member.hello.claims:
            (self.left if left else self.lost)[str(claim)] = cause
            if claim.side == "source":
                del self.sources[claim.rank]
            elif claim.engine in self.engines:
                self._vacate(self.engines[claim.engine], claim.rank)
        return member

    def _vacate(self, engine: Engine, rank: int) -> None:
        del engine.links[rank]
        engine.version = None
        engine.happen("rank lost")
        engine.formed = False

    def forget_lost(self) -> None:
        """Accept every loss: the world is the survivors now. An engine without any rank is gone."""
        self.lost.clear()
        self.left.clear()
        self.engines = {name: engine for name, engine in self.engines.items() if engine.links}

    @property
    def gone(self) -> dict[str, str]:
        """Every rank that isn't here any more, and why."""
        return {**self.lost, **self.left}

    def lost_beside(self, link: int) -> dict[str, str]:
        """The ranks that a target can't receive without and that were lost, and why: sources, and its engine's."""
        names = {name for engine in self.engines_of(link) for name in engine.missing()}
        return {n: cause for n, cause in self.lost.items() if n in names or n in self._source_names}

    @property
    def lacks_source(self) -> bool:
        """Whether a source is gone."""
        return not self._source_names.isdisjoint(self.gone)

    @property
    def is_complete(self) -> bool:
        """Whether the world needs nobody more."""
        if self.num_sources is None or len(self.sources) < self.num_sources or not (self.expected or self.engines):
            return False
        return all(engine.is_complete for engine in self.engines.values()) and not self._engines_missing()

    def _engines_missing(self) -> list[str]:
        if isinstance(self.expected, int):
            return ["any rank of one more engine"] * (self.expected - len(self.engines))
        return [f"any rank of {name}" for name in self.expected if name not in self.engines]

    def missing(self) -> list[str]:
        """The names of the ranks that the world is not complete without."""
        size = self.num_sources
        names = [str(Seat("source", "", r)) for r in range(size or 1) if r not in self.sources]
        names += [name for engine in self.engines.values() for name in engine.missing()]
        names += self._engines_missing()
        return names if self.expected or self.engines else [*names, "any rank of any engine (admit one)"]

    def links(self, engines: Iterable[str]) -> list[int]:
        """The living processes of the sources and of these engines, each once."""
        found = [*self.sources.values(), *(link for name in engines for link in self.engines[name].links.values())]
        return sorted(set(found))

    def engines_of(self, link: int) -> list[Engine]:
        """The engines that a process has seats in."""
        return [engine for engine in self.engines.values() if link in engine.links.values()]

    def is_source(self, link: int) -> bool:
        """Whether a process has a seat on the source side."""
        return link in self.sources.values()

    def useless_frozen(self, engines: Iterable[str]) -> list[str]:
        """What to say of patterns of frozen tensors that match nothing on any rank of their engine that states them."""
        said = []
        for name in engines:
            links = sorted(set(self.engines[name].links.values()))
            stated = [pair for link in links for pair in self.members[link].hello.frozen.items()]
            used = {pattern for pattern, near in stated if near is None}
            for pattern in dict.fromkeys(pattern for pattern, _ in stated if pattern not in used):
                near = next((near for other, near in stated if other == pattern and near), None)
                said.append(_useless(name, pattern, near))
        return said

    @property
    def settings(self) -> str:
        """The sources' settings, as canonical JSON."""
        return next(m.hello.settings for m in self.members.values() if self.is_source(m.link) and m.hello.settings)

    def world(self, epoch: int, engines: Iterable[str]) -> World:
        """The world of the sources and these engines. New processes get world numbers, in order of their seats."""
        names = set(engines)
        claims: list[tuple[Side, str, int, Member, Manifest]] = []
        for link in self.links(names):
            member = self.members[link]
            for claim, manifest in zip(member.hello.claims, member.manifests, strict=True):
                if claim.side == "source" or claim.engine in names:
                    claims.append((claim.side, claim.engine, claim.rank, member, manifest))
        claims.sort(key=lambda claim: claim[:3])
        seats = [Seat(side, engine, rank, self._number(member)) for side, engine, rank, member, _ in claims]
        number: dict[Manifest, int] = {}
        manifest_of = tuple(number.setdefault(claim[4], len(number)) for claim in claims)
        said = {(self._number(claim[3]), claim[3].hello.where) for claim in claims}
        places = sorted(Location(process, where.host, where.domain) for process, where in said)
        return World(epoch, tuple(seats), tuple(number), manifest_of, tuple(places))

    def _number(self, member: Member) -> int:
        if member.process is None:
            member.process = self._processes
            self._processes += 1
        return member.process

    def verdicts(self) -> dict[str, Verdict]:
        """What every engine is, when no push touched it."""
        return {name: engine.verdict() for name, engine in sorted(self.engines.items())}


def _useless(engine: str, pattern: str, near: str | None) -> str:
    hint = f"; the nearest name is {near}" if near else ""
    return f"frozen {pattern!r} matches no tensor of engine {engine}{hint}: see the pattern, or leave it out"


def _check_name(claim: Claim) -> None:
    if claim.side == "source":
        if claim.engine:
            raise RendezvousError(f"a source rank claims a seat of engine {claim.engine!r}: leave engine= out")
    elif claim.engine == "source" or not ENGINE_NAME.fullmatch(claim.engine):
        raise RendezvousError(
            f"an engine can't be called {claim.engine!r}: use letters, digits, '_', '.', ':' and '-', and not 'source'"
        )
