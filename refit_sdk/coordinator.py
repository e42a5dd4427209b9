"""The rendezvous's mind: one state for the session, one for each engine, and what every message changes.

1. Processes say `Hello` until the world is complete; then an epoch is formed: plan, compare, connect.
2. A push gathers `Ready` from every source and every rank of the engines that it waits for. If anybody's manifest or
   the membership changed, or a group was aborted, an epoch is formed first. Then `Go`.
3. A loss or a deadline before `Go` is a `Fault` for all who wait; after it, the push decides engine by engine.
4. A lost source breaks the session until all survivors say `reform`.

Pure: messages and the time come in, messages go out; no I/O, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from refit_sdk import messages
from refit_sdk.agreement import Agreement, Sums
from refit_sdk.errors import RefitError
from refit_sdk.excuses import fault_of
from refit_sdk.gathering import refused_ties
from refit_sdk.membership import Engine
from refit_sdk.messages import Done, Failed, Fault, Hello, Leave, Linked, Planned, Ready, Unable, Unready, Up
from refit_sdk.push import EnginePart, PushRound
from refit_sdk.raising import to_do
from refit_sdk.rounds import Sent
from refit_sdk.states import EngineState, PushState, SessionState
from refit_sdk.steering import Steering
from refit_sdk.world import Seat

LONGER: Final = "see what keeps them, or give a longer deadline="
"""What to do about ranks that were waited for in vain."""


class Coordinator(Steering):
    """Everything that the rendezvous knows. A link is a number that its caller gives each connection."""

    def receive(self, link: int, message: Up, *, now: float) -> Sent:
        """Take a message from a process; the messages to send, as (link, message)."""
        self._now = now
        known = link in self.membership.members
        match message:
            case Hello() if not known:
                self._hello(link, message)
            case Unable() if not known:
                self._unable(link, message)
            case Ready() | Unready() if known and self.state is SessionState.CLOSED:
                self._send(link, messages.Closed(reason="this session is over", normal=False))
            case Ready() if known:
                self._take_ready(link, message)
            case Unready() if known:
                self._take_unready(link, message)
            case Planned() if self._is_current(message.epoch):
                self._planned(link, message)
            case Failed() if self._is_current(message.epoch):
                self._fault(message.error, message.causes, failures={self._name(link): "; ".join(message.causes)})
            case Linked() if self._is_current(message.epoch):
                self._linked(link, message)
            case messages.WorldGet() if known:
                self._piece(link, message)
            case Done() if self.push is not None and message.push == self.push.number and known:
                self._drop(self.push.done(link, message))
                self._advance()
            case Leave() if known:
                self._leave(link, message.reason)
        return self._flush()

    def lost(self, link: int, cause: str, *, now: float) -> Sent:
        """Take word that a process is gone; the messages to send."""
        self._now = now
        if link in self.membership.members and self.state is not SessionState.CLOSED:
            self._lose(link, cause, left=False)
        return self._flush()

    def tick(self, *, now: float) -> Sent:
        """Look at the deadline; the messages to send."""
        self._now = now
        if self._ends is not None and now >= self._ends:
            self._expire()
        return self._flush()

    def close(self, reason: str, *, normal: bool) -> Sent:
        """End the session for everybody; the messages to send."""
        self._close(reason, normal=normal)
        return self._flush()

    def _stand(self, agreement: Agreement) -> None:
        if agreement.kind == "push":
            if not self._refuse_ties(agreement.sums):
                self._go(agreement.engines)
            return
        self._happen("formed")
        self._ends = None
        waiting = sorted(set(self._gathering.take()) - agreement.links)
        self._tell(agreement.links, messages.Formed(epoch=agreement.epoch))
        self._formed_without(waiting)

    def _formed_without(self, links: Iterable[int]) -> None:
        """The epoch stands without some processes: each hears which ranks its engine lacks."""
        for link in links:
            lacks = tuple(name for engine in self.membership.engines_of(link) for name in engine.missing())
            self._send(link, messages.Formed(epoch=self.epoch, waiting=True, lacks=lacks))

    def _take_ready(self, link: int, message: Ready) -> None:
        member = self.membership.members[link]
        for index, body in enumerate(message.manifests):
            if body is not None:
                try:
                    manifest = self.membership.decoded(body)
                except RefitError as error:
                    self._gathering.add(link, message)
                    self._fault("RendezvousError", (f"{member.name}: {error}",))
                    return
                member.manifests[index] = manifest
                self._changed = True
        lost = self.membership.lost_beside(link)
        if message.kind == "push" and lost and not self.membership.is_source(link):
            self._fault_beside(link, lost)
            return
        self._excuses.end(link)
        owed = self._excuses.owed(link, message)
        if owed:
            waiting = (
                self._excuses.beside(owed, self._gathering.of_kind(message.kind))
                if self.membership.is_source(link)
                else []
            )
            told = [link, *self._gathering.take(waiting)]
            self._tell(told, fault_of(owed, self.membership.verdicts()))
            return
        self._gathering.add(link, message)
        self._open()

    def _take_unready(self, link: int, message: Unready) -> None:
        """Whoever waits for this process hears at once why it doesn't come; who comes later, then."""
        excuse = self._excuses.make(link, message)
        told = self._who_waits_for(link, message.kind)
        versions = [ready.version for source, ready in self._gathering.sources.items() if source in told]
        excuse.version = versions[0] if versions and excuse.version is None else excuse.version
        excuse.told |= told
        fault = fault_of([excuse], self.membership.verdicts())
        self._tell(self._gathering.take(told), fault)
        if self.state is SessionState.GATHERING and not self._gathering.opening:
            self._fault(fault.error, fault.causes, failures=fault.failures)

    def _who_waits_for(self, link: int, kind: str) -> set[int]:
        """Who is here for a push or a reform that can't be without this process."""
        gathering, settled = self._gathering, self.state in (SessionState.FORMING, SessionState.MOVING)
        same = set(gathering.of_kind(kind))
        if kind == "reform":
            return set() if settled else same
        mates = self._excuses.mates(link) & same
        if settled:
            return mates
        awaited = self.membership.is_source(link) or (gathering.sources and self._excuses.is_awaited(link))
        return same if awaited else mates

    def _fault_beside(self, link: int, lost: dict[str, str]) -> None:
        """Nobody waits, unknowing, for ranks that are gone."""
        causes = (*(f"{name}: {cause}" for name, cause in sorted(lost.items())), to_do(sorted(lost)))
        engines = {engine.name: engine.verdict() for engine in self.membership.engines_of(link)}
        self._send(link, Fault(error="PushError", causes=causes, failures=lost, engines=engines))

    def _open(self) -> None:
        """Open a round if anybody who is ready may: a source, or who calls for a reform."""
        opening = self._gathering.opening
        if opening and self.state in (SessionState.IDLE, SessionState.BROKEN):
            if self.membership.lacks_source and all(ready.kind == "push" for ready in opening):
                self._fault_lost()
                return
            self._happen("opened")
            self._ends = self._now + self._deadline
        self._gather()

    def _gather(self) -> None:
        if self.state is not SessionState.GATHERING:
            return
        if self._gathering.is_reform:
            self._call_to_reform()
            if not self._gathering.missing():
                self._reform()
        elif not self._refuse_push() and not self._gathering.missing():
            self._start()

    def _call_to_reform(self) -> None:
        """Whoever waits in a push while others re-form would be waited for: it is told."""
        callers = ", ".join(self._name(link) for link in self._gathering.of_kind("reform"))
        waiting = self._gathering.take(self._gathering.of_kind("push"))
        causes = (*self._causes_gone(), f"{callers} called reform(): call it too")
        gone, engines = self.membership.gone, self.membership.verdicts()
        self._tell(waiting, Fault(error="PushError", causes=causes, failures=gone, engines=engines))

    def _reform(self) -> None:
        self.membership.forget_lost()
        if not self.membership.sources:
            self._close("no source is left", normal=False)
            return
        whole = [name for name, engine in sorted(self.membership.engines.items()) if engine.is_complete]
        if self._refuse_frozen(whole):
            return
        self._fresh.update(self.membership.engines)
        self._happen("changed")
        if whole:
            self._form("reform", whole)
        else:
            self._form_nothing()

    def _form_nothing(self) -> None:
        """No engine is whole, so there is nothing to plan: all wait for the next push that finds one."""
        self._happen("formed")
        self._changed, self._ends = True, None
        self._formed_without(self._gathering.take())

    def _refuse_push(self) -> bool:
        if not self._gathering.sources:
            return True
        refusal = self._gathering.refusal(self.version)
        if refusal is not None:
            self._fault("PushError", (refusal,))
        elif self._gathering.lacks_engines():
            self._fault_lost()
        else:
            self._refuse_short()
        return self.state is not SessionState.GATHERING

    def _refuse_short(self) -> None:
        short = self._gathering.shortage()
        if short is not None:
            advice = "push again when enough engines are whole and not paused"
            self._fault("PushError", (short.text, advice), failures=short.failures)

    def _start(self) -> None:
        wanted = self._gathering.wanted()
        names = [engine.name for engine in wanted]
        if self._refuse_frozen(names):
            return
        if self._changed or self._fresh.intersection(names) or any(not engine.formed for engine in wanted):
            self._happen("changed")
            self._form("push", names)
        else:
            self._happen("unchanged")
            self._ask(names)

    def _refuse_ties(self, sums: Sums) -> bool:
        causes = refused_ties(sums)
        if causes:
            self._fault("PlanError", causes)
        return bool(causes)

    def _go(self, engines: Iterable[str]) -> None:
        going = [self.membership.engines[name] for name in engines]
        self._happen("go")
        self._number += 1
        ready = [ready for link, ready in self._gathering.sources.items() if link in self._standing]
        version = ready[0].version
        assert version is not None
        seats = {link: Seat("source", "", rank) for rank, link in self.membership.sources.items()}
        self.push = PushRound(
            self._number,
            version=version,
            require=max(r.require for r in ready),
            sources={link: str(seat) for link, seat in seats.items() if link in self._standing},
            parts=[self._part(engine) for engine in going],
        )
        for engine in going:
            engine.happen("go")
        names = tuple(engine.name for engine in going)
        links = [link for link in self.membership.links(names) if link in self._standing]
        self._gathering.take(links)
        self._tell(links, messages.Go(epoch=self.epoch, push=self._number, version=version, engines=names))
        self._ends = self._now + self._deadline

    def _part(self, engine: Engine) -> EnginePart:
        names = {link: str(Seat("target", engine.name, rank)) for rank, link in engine.links.items()}
        return EnginePart(engine.name, names, engine.version, torn=engine.torn)

    def _drop(self, parts: list[EnginePart]) -> None:
        assert self.push is not None
        for part in parts:
            self._fresh.add(part.name)
            told = {*self.push.sources, *part.names}
            self._tell(sorted(told), messages.Drop(push=self.push.number, engine=part.name, cause=part.cause))

    def _advance(self) -> None:
        push = self.push
        assert push is not None
        for part in push.decide():
            self._settle(part)
        if push.ended:
            self._end_push(push)

    def _settle(self, part: EnginePart) -> None:
        push, verdict, engine = self.push, part.verdict, self.membership.engines.get(part.name)
        assert push is not None
        assert verdict is not None
        if engine is not None and engine.state is EngineState.MOVING:
            engine.happen(_EVENT[PushState(verdict.state)])
        if engine is not None:
            engine.settle(verdict)
        if verdict.state == PushState.COMPLETE:
            self.version = push.version
        only = [link for link in part.names if link not in push.sources]
        self._tell(only, push.outcome(part.name))

    def _end_push(self, push: PushRound) -> None:
        self._happen("ended without a source" if push.source_lost else "ended")
        self._tell(sorted(push.sources), push.outcome())
        self.push, self._ends = None, None
        if push.source_lost:
            self._fresh.update(self.membership.engines)
        self._open()

    def _leave(self, link: int, reason: str) -> None:
        normal = not reason
        if self.state is SessionState.MOVING or not normal:
            self._lose(link, reason or "it closed its session", left=False)
            return
        self._lose(link, "it closed its session", left=True)

    def _lose(self, link: int, cause: str, *, left: bool, dropped: bool = False) -> None:
        source = self.membership.is_source(link)
        in_epoch = self._agreement is not None and link in self._agreement.links
        engines = self.membership.engines_of(link)
        failed = self.push.lost(link, cause, dropped=dropped) if self.push is not None else []
        member = self.membership.remove(link, cause, left=left)
        self._gathering.take([link])
        self._excuses.end(link)
        self._changed = True
        if self.state is SessionState.CLOSED or (dropped and not source and self.state is SessionState.JOINING):
            return
        advice = "push again, without it" if dropped else to_do([member.name])
        if source and not self.membership.sources and self.push is None:
            self._close(f"all sources have closed: {member.name}: {cause}", normal=left)
        elif self.push is not None:
            self._drop(failed)
            self._advance()
        elif self.state is SessionState.GATHERING and self._gathering.is_reform:
            self._gather()  # who re-forms goes on with whoever is left
        elif source and left and self.state in (SessionState.IDLE, SessionState.BROKEN):
            self._happen("source lost")
        elif source or in_epoch or self.state is SessionState.JOINING:
            self._fault_gone(member.name, cause, event="source lost" if source else "fault", advice=advice)
        else:
            self._engine_lost(engines, member.name, cause, advice=advice)

    def _fault_gone(self, name: str, cause: str, *, event: str, advice: str) -> None:
        joining = self.state is SessionState.JOINING
        advice = "joining has failed: start every rank again" if joining else advice
        causes = (f"{name}: {cause}", advice)
        self._fault("PushError", causes, failures={name: cause}, event="fault" if joining else event)

    def _engine_lost(self, engines: list[Engine], name: str, cause: str, *, advice: str) -> None:
        links = self._gathering.take({link for engine in engines for link in engine.links.values()})
        fault = Fault(
            error="PushError",
            causes=(f"{name}: {cause}", advice),
            failures={name: cause},
            engines=self.membership.verdicts(),
        )
        self._tell(links, fault)
        self._gather()

    def _expire(self) -> None:
        self._ends = None
        seconds = f"in {self._deadline:g} s"
        if self.push is not None:
            self._expire_push(self.push)
        elif self._agreement is not None:
            names = [self._name(link) for link in self._agreement.waiting_for()]
            cause = f"{', '.join(names)} didn't {self._agreement.step()} {seconds}"
            self._fault("PushError", (cause, LONGER), failures=dict.fromkeys(names, cause))
        elif self.state is SessionState.JOINING:
            missing = self.membership.missing()
            refused = [f"{name} was refused: {reason}" for name, reason in self._refused.items()]
            self._fault("RendezvousError", (f"{', '.join(missing)} didn't join {seconds}", *refused, LONGER))
        elif self.state is SessionState.GATHERING:
            names = [self._name(link) for link in self._gathering.missing()]
            verb = "reform()" if self._gathering.is_reform else "push() or receive()"
            cause = f"{', '.join(names)} didn't call {verb} {seconds}"
            self._fault("PushError", (cause, LONGER), failures=dict.fromkeys("+".join(names).split("+"), cause))

    def _expire_push(self, push: PushRound) -> None:
        if not push.expired:
            self._drop(push.expire(self._deadline))
            self._ends = self._now + min(self._heartbeat, self._deadline)
            return
        silence = f"no word of the push in {self._deadline:g} s"
        for link in sorted(push.silent):
            reason = f"{silence}, so this rank was given up"
            self._send(link, messages.Closed(reason=reason, normal=False))
            self._lose(link, silence, left=False)


_EVENT = {
    PushState.COMPLETE: "confirmed",
    PushState.UNTOUCHED: "failed untouched",
    PushState.TORN: "failed",
}
