"""Ranks that were called to enter a push or a reform and couldn't, and who has yet to be told of it.

1. A rank excuses itself where its model isn't ready or can't be described any more. Whoever waits for it hears that at
   once, with the cause; whoever comes later to the same round hears it as it comes. Nobody hears it twice.
2. The round of a source's excuse is the push of its version. A target's fails the next push, whatever its version, and
   until that comes only the ranks of its own engine hear of it.
3. An excuse ends when its rank enters after all, or is lost.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define, field

from refit_sdk.membership import Membership
from refit_sdk.messages import Fault, Ready, Unready, Verdict
from refit_sdk.states import EngineState


@define
class Excuse:
    """What a process said, its ranks' names, and the links of those who know. `version`: the push that fails by it."""

    name: str
    said: Unready
    version: int | None
    told: set[int] = field(factory=set)


def fault_of(excuses: Sequence[Excuse], engines: dict[str, Verdict]) -> Fault:
    """What those hear who would wait for the excused. `engines` is what each is."""
    failures = {excuse.name: excuse.said.cause for excuse in excuses}
    verbs = "reform()" if excuses[0].said.kind == "reform" else "push() and receive()"
    causes = [f"{name}: {cause}" for name, cause in failures.items()]
    advice = f"mend it there, then call {verbs} again on every rank"
    return Fault(error="PushError", causes=(*causes, advice), failures=failures, engines=engines)


class Excuses:
    """The excuses that hold, by the link of the process that made them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._made: dict[int, Excuse] = {}

    def make(self, link: int, said: Unready) -> Excuse:
        """A process couldn't enter. Those who excused themselves from the same round know that it has failed."""
        made = Excuse(self._membership.members[link].name, said, said.version)
        for other, excuse in self._made.items():
            if (excuse.said.kind, excuse.said.version) == (said.kind, said.version):
                excuse.told.add(link)
                made.told.add(other)
        self._made[link] = made
        return made

    def end(self, link: int) -> None:
        """A process has entered, or is gone."""
        self._made.pop(link, None)

    def owed(self, link: int, ready: Ready) -> list[Excuse]:
        """The excuses that fail the round which a process wants to enter, and that it hasn't heard. Now it has."""
        found = [
            excuse
            for maker, excuse in self._made.items()
            if link not in excuse.told and excuse.said.kind == ready.kind and self._fails(maker, excuse, link, ready)
        ]
        for excuse in found:
            excuse.told.add(link)
            if excuse.version is None and self._membership.is_source(link):
                excuse.version = ready.version
        return found

    def _fails(self, maker: int, excuse: Excuse, link: int, ready: Ready) -> bool:
        if ready.kind == "reform":
            return True
        if not self._membership.is_source(link):
            return link in self.mates(maker) or (excuse.version is not None and self.is_awaited(link))
        return excuse.version in (None, ready.version) and self.is_awaited(maker)

    def beside(self, excuses: Iterable[Excuse], links: Iterable[int]) -> list[int]:
        """Of some targets that wait, those who haven't heard of a push that has just failed. Now they have."""
        waiting = [link for link in links if not self._membership.is_source(link) and self.is_awaited(link)]
        found: set[int] = set()
        for excuse in excuses:
            found.update(link for link in waiting if link not in excuse.told)
            excuse.told.update(waiting)
        return sorted(found)

    def is_awaited(self, link: int) -> bool:
        """Whether every push waits for this process: a source, or a rank of an engine that stands."""
        stand = (EngineState.READY, EngineState.TORN)
        engines = self._membership.engines_of(link)
        return self._membership.is_source(link) or any(engine.state in stand for engine in engines)

    def mates(self, link: int) -> set[int]:
        """The other processes of this one's engines that aren't sources."""
        found = {other for engine in self._membership.engines_of(link) for other in engine.links.values()}
        return {other for other in found if other != link and not self._membership.is_source(other)}
