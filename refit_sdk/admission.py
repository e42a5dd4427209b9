"""Joining: who is let in, when the world is complete, and how it ends early for all where one can't join.

1. A process claims seats. One that can't have them is refused, and only it hears of that: the right one may still come.
2. A process that can't even ask, as its model can't be described, says so. Nobody waits for it then: joining fails at
   once for all, with its ranks' names and its reason, and whoever comes later hears the same.
3. Once every seat is taken, patterns of frozen tensors must match something in their engine, and the first epoch forms.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from refit_sdk import __version__, messages
from refit_sdk.errors import RefitError
from refit_sdk.messages import Hello, Unable
from refit_sdk.rounds import Rounds, Sent
from refit_sdk.states import SessionState


class Admission(Rounds):
    """How the seats are taken. `refit_sdk.coordinator` has what follows."""

    _over = "this session is over; start a new rendezvous"
    _told: frozenset[str] = frozenset()

    def wait_anew(self, *, now: float) -> Sent:
        """Give everybody the whole deadline from now on, if they still join: the host was busy until now."""
        if self.state is SessionState.JOINING:
            self._ends = now + self._deadline
        return []

    @property
    def untold(self) -> list[str]:
        """Ranks that haven't come yet, and are to hear why joining failed at once."""
        return [name for name in self.membership.missing() if name not in self._told] if self._told else []

    def _hello(self, link: int, hello: Hello) -> None:
        try:
            if self.state is SessionState.CLOSED:
                self._hear_out(hello.claims)
                raise RefitError(self._over)
            if hello.sdk != __version__:
                raise RefitError(f"refit_sdk is {hello.sdk} here and {__version__} at the rendezvous: install the same")
            self.membership.admit(link, hello)
        except RefitError as error:
            self._out.append((link, messages.Refused(reason=str(error))))
            self._refused[_names(hello.claims)] = str(error)
            return
        late = self.state is not SessionState.JOINING
        self._send(
            link,
            messages.Welcome(late=late, hosted_by=self._hosted_by, heartbeat=self._heartbeat, deadline=self._deadline),
        )
        self._changed = True
        self._complete()

    def _hear_out(self, claims: Iterable[messages.Claim]) -> None:
        """Whoever comes after joining failed is told, and need not be waited for."""
        for claim in claims if self._told else ():
            self.membership.note(claim)
            self._told |= {str(claim)}

    def _unable(self, link: int, message: Unable) -> None:
        names, reason = _names(message.claims), message.reason
        self._out.append((link, messages.Refused(reason=reason)))
        self._refused[names] = reason
        if self.state is not SessionState.JOINING or not self.membership.may_have(message.claims):
            return
        self._over = f"{names} can't join: {reason}; mend that, and start every rank again"
        here = (claim for member in self.membership.members.values() for claim in member.hello.claims)
        self._told = frozenset(map(str, (*message.claims, *here)))
        for claim in message.claims:
            self.membership.note(claim)
        self._fault("RendezvousError", (self._over,))

    def _complete(self) -> None:
        """Form the first epoch, if all who are waited for have joined."""
        names = sorted(self.membership.engines)
        if self.state is SessionState.JOINING and self.membership.is_complete and not self._refuse_frozen(names):
            self._happen("complete")
            self._form("join", names)

    def _refuse_frozen(self, engines: Iterable[str]) -> bool:
        """Refuse a round whose engines have patterns of frozen tensors that match nothing; whether it was."""
        useless = self.membership.useless_frozen(engines)
        if useless:
            self._fault("PlanError", useless)
        return bool(useless)


def _names(claims: Iterable[messages.Claim]) -> str:
    return "+".join(map(str, claims))
