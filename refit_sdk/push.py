"""One push, as the rendezvous follows it: engine by engine, first causes first.

1. Every rank says `Done` once: bytes sent and arrived for each engine, and how it failed, if it did.
2. The first failure of an engine, or the loss of one of its ranks or of a source, fails the engine: the others are told
   to drop it, and its first cause stays. What a rank says of another (it hung up, it sent nothing) is hearsay: the
   rendezvous's own word of a loss, or what the blamed rank says of itself, takes its place.
3. When all living ranks of an engine have spoken, the engine is decided: complete if all confirmed, else torn if any
   rank was written to or is gone or the engine was torn before, else untouched. Where all that is known is hearsay of a
   source that lives, the source is heard first.
4. When all engines are decided and all living sources have spoken, the push has ended.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, evolve, field, frozen

from refit_sdk.messages import Done, EngineDone, Outcome, Verdict
from refit_sdk.raising import to_do
from refit_sdk.states import PushState


@frozen
class Cause:
    """Why an engine failed: what is said, and of which rank. `hearsay`: by another rank."""

    name: str
    text: str
    hearsay: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"

    def is_of(self, process: str) -> bool:
        """Whether this is said of the process with these ranks. Not all of them need be in the push."""
        return not set(self.name.split("+")).isdisjoint(process.split("+"))


@define
class EnginePart:
    """What is known of one engine in this push. `names` maps its processes to their ranks' names.

    `version` is what it served before; `torn` says that it is a mix of versions already. `told` is the cause that the
    ranks were told when they were asked to drop it: a rank that gives it back says nothing of itself.
    """

    name: str
    names: dict[int, str]
    version: int | None
    torn: bool = False
    done: dict[int, EngineDone] = field(factory=dict)
    gone: set[int] = field(factory=set)
    first: Cause | None = None
    told: str = ""
    verdict: Verdict | None = None

    @property
    def cause(self) -> str:
        """The first cause as text, or nothing."""
        return "" if self.first is None else str(self.first)

    @property
    def waiting_for(self) -> set[int]:
        """The living processes that haven't spoken."""
        return self.names.keys() - self.done.keys() - self.gone

    def decide(self, version: int) -> Verdict:
        """The verdict, once nobody is waited for."""
        if self.first is None:
            state = PushState.COMPLETE
        elif self.torn or self.gone or any(done.mutated for done in self.done.values()):
            state = PushState.TORN
        else:
            state = PushState.UNTOUCHED
        serves = {PushState.COMPLETE: version, PushState.UNTOUCHED: self.version}.get(state)
        self.verdict = Verdict(state, serves, self.cause)
        return self.verdict


class PushRound:
    """A push under way. `sources` maps source processes to names; `parts` are the engines that it goes to."""

    def __init__(
        self,
        number: int,
        *,
        version: int,
        require: int,
        sources: Mapping[int, str],
        parts: Iterable[EnginePart],
    ) -> None:
        self.number = number
        self.version = version
        self.require = require
        self.sources = dict(sources)
        self.parts = {part.name: part for part in parts}
        self.expired = False
        self.source_lost = False
        self._source_done: dict[int, Done] = {}
        self._gone: set[int] = set()
        self._dropped: set[int] = set()

    def name(self, link: int) -> str:
        """The names of a process's ranks in this push."""
        names = [self.sources[link]] if link in self.sources else []
        names += [part.names[link] for part in self.parts.values() if link in part.names]
        return "+".join(names)

    def done(self, link: int, message: Done) -> list[EnginePart]:
        """Take a rank's word; the engines that it makes fail."""
        if link in self.sources:
            self._source_done[link] = message
        failed = []
        for name, said in message.engines.items():
            part = self.parts.get(name)
            if part is None:
                continue
            if link in part.names:
                part.done[link] = said
            speaker = self.name(link)
            cause = Cause(said.lost or speaker, said.cause, hearsay=bool(said.lost))
            echo = said.cause == part.told
            knows = part.first is not None and part.first.is_of(speaker) and not echo
            if said.cause and self._fail(part, cause, knows=knows):
                failed.append(part)
        return failed

    def lost(self, link: int, cause: str, *, dropped: bool = False) -> list[EnginePart]:
        """Take word that a process is gone; the engines that it makes fail. Nobody wants a `dropped` one back."""
        name = self.name(link)
        self._gone.add(link)
        self._dropped |= {link} if dropped else set()
        self.source_lost = self.source_lost or link in self.sources
        hit = [part for part in self.parts.values() if link in self.sources or link in part.names]
        for part in hit:
            if link in part.names:
                part.gone.add(link)
        return [part for part in hit if self._fail(part, Cause(name, cause), knows=True)]

    def expire(self, seconds: float) -> list[EnginePart]:
        """Take word that the deadline has passed; the engines that it makes fail."""
        self.expired = True
        failed = []
        for part in self.undecided:
            late = [self.name(link) for link in sorted(self.silent)] or sorted(part.names.values())
            cause = f"no word from {', '.join(late)} in {seconds:g} s"
            if self._fail(part, Cause(late[0], cause)):
                failed.append(part)
        return failed

    def _fail(self, part: EnginePart, cause: Cause, *, knows: bool = False) -> bool:
        """Keep the first cause; whether it is the first. Who `knows` replaces hearsay."""
        first = part.first is None
        if part.verdict is None and (first or (knows and part.first is not None and part.first.hearsay)):
            part.first, part.told = cause, part.told or str(cause)
            return first
        return False

    @property
    def failures(self) -> dict[str, str]:
        """The first cause of every engine that failed, by the rank that it's said of."""
        causes = [part.first for part in self.parts.values() if part.first is not None]
        return {cause.name: cause.text for cause in reversed(causes)}

    def decide(self) -> list[EnginePart]:
        """Decide the engines that nobody is waited for; those newly decided."""
        ripe = [part for part in self.undecided if not part.waiting_for and not self._hears_out(part)]
        for part in ripe:
            if part.first is not None and part.first.hearsay and self.silent:
                silent = ", ".join(self.name(link) for link in sorted(self.silent))
                part.first = evolve(part.first, text=f"{part.first.text}; no word yet from {silent}")
            part.decide(self.version)
        return ripe

    def _hears_out(self, part: EnginePart) -> bool:
        """Whether a source has yet to say of itself what others say of it. The end of the deadline makes it a loss."""
        first, silent = part.first, self._silent_sources
        return first is not None and first.hearsay and any(first.is_of(self.name(link)) for link in silent)

    @property
    def undecided(self) -> list[EnginePart]:
        """The engines without a verdict."""
        return [part for part in self.parts.values() if part.verdict is None]

    @property
    def silent(self) -> set[int]:
        """The living processes that haven't spoken."""
        return self._silent_sources.union(*(part.waiting_for for part in self.undecided))

    @property
    def _silent_sources(self) -> set[int]:
        return self.sources.keys() - self._source_done.keys() - self._gone

    @property
    def ended(self) -> bool:
        """Whether all engines are decided and all living sources have spoken."""
        return not self.undecided and not self.silent

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdicts so far."""
        return {part.name: part.verdict for part in self.parts.values() if part.verdict is not None}

    @property
    def committed(self) -> bool:
        """Whether as many engines committed as the push requires."""
        return self._complete >= (self.require or len(self.parts)) and self._complete > 0

    @property
    def _complete(self) -> int:
        return sum(verdict.state == PushState.COMPLETE for verdict in self.verdicts.values())

    def outcome(self, engine: str | None = None) -> Outcome:
        """What the ranks of a decided engine are told, of that engine alone; or, once it ended, the sources of all."""
        verdicts = self.verdicts if engine is None else {engine: self.verdicts[engine]}
        committed = self.committed if engine is None else verdicts[engine].state == PushState.COMPLETE
        return Outcome(
            push=self.number,
            version=self.version,
            committed=committed,
            engines=verdicts,
            failures=self.failures,
            ranks=self.ranks(None if engine is None else [engine]),
            causes=() if committed else self._causes(engine),
        )

    def _causes(self, engine: str | None) -> tuple[str, ...]:
        """What to say of a push that didn't commit: first causes, what was required, and what to do."""
        parts = [part for _, part in sorted(self.parts.items()) if engine in (None, part.name)]
        causes = list(dict.fromkeys(part.cause for part in parts if part.cause))
        if engine is None and self.require > self._complete:
            causes.append(f"{self._complete} of {self.require} required engines committed")
        gone = [self.name(link) for link in sorted(self._gone - self._dropped) if self._concerns(link, engine)]
        return (*causes, to_do(gone) if gone else "push again once that is mended")

    def _concerns(self, link: int, engine: str | None) -> bool:
        """Whether an engine (None: any) can't go on without this process."""
        return engine is None or link in self.sources or link in self.parts[engine].names

    def ranks(self, only: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
        """(bytes sent, bytes arrived) by rank: of all, or of the ranks of some engines."""
        parts = [self.parts[name] for name in (self.parts if only is None else only)]
        found = {
            part.names[link]: (0 if link in self.sources else done.sent, done.arrived)
            for part in parts
            for link, done in part.done.items()
        }
        for link, said in self._source_done.items() if only is None else ():
            found[self.sources[link]] = (sum(done.sent for done in said.engines.values()), 0)
        return found
