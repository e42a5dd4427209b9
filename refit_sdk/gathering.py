"""Who has entered a push or a reform, who is missing, and why a push can't be.

1. A push waits for every source and every rank of the engines that stand. An engine that comes late is in as soon as
   all its ranks are ready; until then nobody waits for it, unless too few engines stand without it.
2. A push that too few engines could take, if all came that are whole and not paused, is refused at once.
3. One call for a reform makes the round a reform, and that waits for every process.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import frozen

from refit_sdk.agreement import Sums, unequal_sums
from refit_sdk.membership import Engine, Membership
from refit_sdk.messages import Ready
from refit_sdk.states import EngineState
from refit_sdk.world import Seat


@frozen
class Shortage:
    """Why too few engines can take a push, and what each rank has to do with it."""

    text: str
    failures: dict[str, str]


class Gathering:
    """The processes that have said `Ready`, by link."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._ready: dict[int, Ready] = {}

    def add(self, link: int, ready: Ready) -> None:
        """A process has entered."""
        self._ready[link] = ready

    def take(self, links: Collection[int] | None = None) -> list[int]:
        """Let some processes go, or all; those that were here."""
        gone = [link for link in sorted(self._ready) if links is None or link in links]
        for link in gone:
            del self._ready[link]
        return gone

    @property
    def links(self) -> set[int]:
        """The processes that are here."""
        return set(self._ready)

    def of_kind(self, kind: str) -> list[int]:
        """The processes that are here for a push, or for a reform."""
        return [link for link, ready in sorted(self._ready.items()) if ready.kind == kind]

    @property
    def opening(self) -> list[Ready]:
        """What opens a round: any source's word, and any call for a reform."""
        words = self._ready.items()
        return [ready for link, ready in words if ready.kind == "reform" or self._membership.is_source(link)]

    @property
    def is_reform(self) -> bool:
        """Whether anybody calls for a reform."""
        return any(ready.kind == "reform" for ready in self._ready.values())

    @property
    def sources(self) -> dict[int, Ready]:
        """The sources that are here, in order of rank."""
        links = [link for _, link in sorted(self._membership.sources.items())]
        return {link: self._ready[link] for link in links if link in self._ready}

    @property
    def require(self) -> int:
        """How many engines the push needs; 0: all."""
        return max(ready.require for ready in self.sources.values())

    def wanted(self) -> list[Engine]:
        """The engines that the push goes to."""
        return [engine for _, engine in sorted(self._membership.engines.items()) if self._is_wanted(engine)]

    def _is_wanted(self, engine: Engine) -> bool:
        if engine.state in (EngineState.READY, EngineState.TORN):
            return True
        return _is_late(engine) and self._ready.keys() >= set(engine.links.values())

    def missing(self) -> list[int]:
        """The processes that the round waits for."""
        if self.is_reform:
            members = self._membership.members
            return [link for link in members if link not in self._ready or self._ready[link].kind != "reform"]
        engines = self.wanted()
        if len(engines) < self._needed:
            engines += [engine for engine in self._late() if engine not in engines]
        links = self._membership.links(engine.name for engine in engines)
        return [link for link in links if link not in self._ready]

    @property
    def _needed(self) -> int:
        return max(1, self.require) if self.sources else 1

    def _late(self) -> list[Engine]:
        return [engine for _, engine in sorted(self._membership.engines.items()) if _is_late(engine)]

    def shortage(self) -> Shortage | None:
        """Why too few engines can take the push, whoever else becomes ready; or None."""
        able = {engine.name for engine in (*self.wanted(), *self._late())}
        return self._shortage_of(able) if len(able) < self._needed else None

    def _shortage_of(self, able: set[str]) -> Shortage:
        reasons, failures = [], {}
        for name in self._membership.names:
            if name in able:
                continue
            reason, ranks = _why_not(self._membership.engines.get(name))
            reasons.append(f"engine {name} {reason}")
            failures.update(dict.fromkeys(ranks, f"engine {name} {reason}"))
        if able:
            count = "1 takes" if len(able) == 1 else f"{len(able)} take"
            said = f"the push requires {self._needed} engines, {count} part"
        else:
            said = "no engine can take the push"
            reasons = reasons or ["none is here"]
        return Shortage(": ".join([said, *filter(None, ["; ".join(reasons)])]), failures)

    def refusal(self, published: int | None) -> str | None:
        """Why the versions that the sources push can't be, or None."""
        versions = {ready.version for ready in self.sources.values()}
        if len(versions) > 1:
            names = {link: self._membership.members[link].name for link in self.sources}
            said = ", ".join(f"{names[link]} pushes {ready.version}" for link, ready in self.sources.items())
            return f"the sources push different versions: {said}"
        version = next(iter(versions))
        if version is None or (published is not None and version <= published):
            return f"version {version} isn't above {published}, which is published: versions only go up"
        return None

    def lacks_engines(self) -> bool:
        """Whether ranks are gone that the push can't do without."""
        return bool(self._membership.gone) and (not self.require or len(self.wanted()) < self.require)


def _is_late(engine: Engine) -> bool:
    return engine.is_complete and engine.state is EngineState.WAITING


def _why_not(engine: Engine | None) -> tuple[str, list[str]]:
    """Why an engine can't take a push, and the ranks that it's said of."""
    if engine is None:
        return "hasn't joined", []
    lacking = list(engine.missing())
    if lacking:
        return f"lacks {', '.join(lacking)}", lacking
    return f"is {engine.state}", [str(Seat("target", engine.name, rank)) for rank in range(engine.size)]


def refused_ties(sums: Sums) -> list[str]:
    """What to say of tied tensors that the sources hold different values of.

    >>> refused_ties((("lm_head.weight", "embed.weight", 3, 3),))
    []
    """
    return [
        f"{name} and {other} are one tensor at a target, and the sources hold different values for them: "
        "tie them in training, or give the target both"
        for name, other in unequal_sums(sums)
    ]
