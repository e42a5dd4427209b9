"""What every round of the rendezvous has: a state, a deadline, an epoch that forms, and one way to end badly.

1. Forming: all participants hear of the world and read it in pieces, one a host; their plans' digests are compared;
   all connect; then the epoch stands.
2. A fault ends a round for all who wait in it, before any byte moved, and says what every engine is.

Pure: messages and the time come in, messages go out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from refit_sdk import manifest as wire
from refit_sdk import messages
from refit_sdk.agreement import Agreement
from refit_sdk.excuses import Excuses
from refit_sdk.gathering import Gathering
from refit_sdk.membership import Membership
from refit_sdk.messages import Door, Fault, Linked, Message, Planned, WorldGet
from refit_sdk.push import PushRound
from refit_sdk.raising import to_do
from refit_sdk.states import SESSION, SessionState, next_state

PIECE: Final = 1 << 17
"""Bytes of the world that a process gets at once: what waits to be sent is one piece a reader."""

Sent = list[tuple[int, Message]]
"""Messages to send, each with the link that it goes to."""


class Rounds(ABC):
    """The state of a rendezvous, and how epochs form. `refit_sdk.coordinator` has what opens and what follows."""

    def __init__(
        self,
        *,
        engines: int | tuple[str, ...],
        deadline: float,
        heartbeat: float,
        now: float,
        hosted_by: str = "the controller",
    ) -> None:
        self.state = SessionState.JOINING
        self.membership = Membership(engines)
        self.epoch = 0
        self.version: int | None = None
        self.push: PushRound | None = None
        self._deadline = deadline
        self._heartbeat = heartbeat
        self._hosted_by = hosted_by
        self._ends: float | None = now + deadline
        self._agreement: Agreement | None = None
        self._gathering = Gathering(self.membership)
        self._excuses = Excuses(self.membership)
        self._standing: frozenset[int] = frozenset()
        self._changed = True
        self._fresh: set[str] = set()
        self._refused: dict[str, str] = {}
        self._number = 0
        self._world = b""
        self._now = now
        self._out: Sent = []

    def _flush(self) -> Sent:
        out, self._out = self._out, []
        return out

    def _send(self, link: int, message: Message) -> None:
        if link in self.membership.members:
            self._out.append((link, message))

    def _tell(self, links: Iterable[int], message: Message) -> None:
        for link in links:
            self._send(link, message)

    def _happen(self, event: str) -> None:
        self.state = next_state(SESSION, self.state, event)

    def _name(self, link: int) -> str:
        return self.membership.members[link].name

    def _form(self, kind: str, engines: list[str]) -> None:
        self.epoch += 1
        # Every group has every source in it: a new source makes all of them new.
        anew = not self._standing.issuperset(self.membership.sources.values())
        self._fresh.update(name for name in engines if anew or not self.membership.engines[name].formed)
        self._changed = False
        links = self.membership.links(engines)
        self._agreement = Agreement(self.epoch, kind, frozenset(links), tuple(engines))
        self._world = wire.encode_world(self.membership.world(self.epoch, engines))
        form = messages.Form(
            epoch=self.epoch,
            nbytes=len(self._world),
            digest=wire.digest(self._world),
            door=None,
            settings=self.membership.settings,
            fresh=tuple(sorted(self._fresh.intersection(engines))),
        )
        for link, door in self._doors(links).items():
            self._send(link, form if door is None else structs.replace(form, door=door))
        self._ends = self._now + self._deadline

    def _doors(self, links: Iterable[int]) -> dict[int, Door | None]:
        """For each process the door at which it gets the world; None for those that read it: one a host."""
        reader: dict[str, Door] = {}
        found: dict[int, Door | None] = {}
        for link in links:
            own = self.membership.members[link].hello.door
            found[link] = reader.get(own.host) if own is not None else None
            if own is not None:
                reader.setdefault(own.host, own)
        return found

    def _piece(self, link: int, asked: WorldGet) -> None:
        """Answer with a piece of the world, if it's still this one."""
        start = max(0, asked.start) if asked.epoch == self.epoch else len(self._world)
        self._send(link, messages.StoreReply(id=asked.id, value=self._world[start : start + PIECE]))

    def _ask(self, engines: Iterable[str]) -> None:
        """The epoch stands: ask for everybody's word. Who hasn't given it knows that no byte moves."""
        links = [link for link in self.membership.links(engines) if link in self._standing]
        self._agreement = Agreement(self.epoch, "push", frozenset(links), tuple(engines), stands=True)
        self._tell(links, messages.Link(epoch=self.epoch))
        self._ends = self._now + self._deadline

    def _is_current(self, epoch: int) -> bool:
        return self._agreement is not None and self._agreement.epoch == epoch

    def _planned(self, link: int, message: Planned) -> None:
        agreement = self._agreement
        assert agreement is not None
        if not agreement.planned(link, message):
            return
        differing = agreement.disagreement()
        if differing is not None:
            names = " and ".join(self._name(link) for link in differing)
            cause = f"{names} made different plans of the same world: see that all run the same code and plug-ins"
            self._fault("PlanError", (cause,))
            return
        self._tell(agreement.links, messages.Link(epoch=agreement.epoch))
        self._ends = self._now + self._deadline

    def _linked(self, link: int, message: Linked) -> None:
        agreement = self._agreement
        assert agreement is not None
        if not agreement.linked(link, message):
            return
        self._agreement = None
        if not agreement.stands:
            self._adopt(agreement)
        self._stand(agreement)

    def _adopt(self, agreement: Agreement) -> None:
        self._standing = agreement.links
        self._fresh.difference_update(agreement.engines)
        for name, engine in self.membership.engines.items():
            engine.formed = name in agreement.engines
            if engine.formed:
                engine.happen("formed")

    @abstractmethod
    def _stand(self, agreement: Agreement) -> None:
        """Go on from an epoch that all have connected."""

    def _causes_gone(self) -> list[str]:
        return [f"{name}: {cause}" for name, cause in sorted(self.membership.gone.items())]

    def _fault_lost(self) -> None:
        causes = [*self._causes_gone(), to_do(sorted(self.membership.gone))]
        self._fault("PushError", causes, failures=self.membership.gone)

    def _fault(
        self, error: str, causes: Iterable[str], *, failures: dict[str, str] | None = None, event: str = "fault"
    ) -> None:
        """End the round for all who wait, untouched."""
        agreement, self._agreement = self._agreement, None
        joining = self.state is SessionState.JOINING or (agreement is not None and agreement.kind == "join")
        told = set(self._gathering.take()) | (agreement.links if agreement else set())
        if joining:
            told = set(self.membership.members)
        if agreement is not None:
            self._fresh.update(agreement.engines)
            self._changed = True
        self._ends = None
        if self.membership.lacks_source and (self.state, "source lost") in SESSION:
            event = "source lost"
        if (self.state, event) in SESSION:
            self._happen(event)
        fault = Fault(error=error, causes=tuple(causes), failures=failures or {}, engines=self.membership.verdicts())
        self._tell(sorted(told), fault)
        if joining and self.state is not SessionState.CLOSED:
            self._happen("closed")

    def _close(self, reason: str, *, normal: bool) -> None:
        if self.state is not SessionState.CLOSED:
            self._happen("closed")
            self._ends = self.push = self._agreement = None
            self._tell(sorted(self.membership.members), messages.Closed(reason=reason, normal=normal))
