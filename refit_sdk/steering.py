"""What a controller may ask of a rendezvous: which engines there are, and to admit, drop, pause and resume them.

1. An engine is known that has joined or is expected by name. A name that isn't known is an error, with the nearest one.
2. A dropped engine is waited for no more, whether it has joined or not. While others still join, they go on without it.
3. An engine is paused between pushes, not once a push to it is being agreed on.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from abc import abstractmethod

from refit_sdk import messages
from refit_sdk.admission import Admission
from refit_sdk.errors import RendezvousError
from refit_sdk.rounds import Sent
from refit_sdk.states import EngineState


class Steering(Admission):
    """The verbs of a controller. Each gives the messages to send."""

    def engine_states(self) -> dict[str, str]:
        """Every engine's state; `waiting` for those that are expected by name and haven't come."""
        found = {name: str(engine.state) for name, engine in self.membership.engines.items()}
        return {name: found.get(name, str(EngineState.WAITING)) for name in self.membership.names}

    def engine_versions(self) -> dict[str, int | None]:
        """The version that each engine has committed; None where nothing was, or it is torn."""
        return {name: engine.version for name, engine in self.membership.engines.items()}

    def admit(self, engine: str) -> Sent:
        """Let an engine of this name join, from the next push on."""
        self.membership.expect(engine)
        return self._flush()

    def drop(self, engine: str, reason: str, *, now: float) -> Sent:
        """Take an engine out: its ranks' sessions are closed, and neither joining nor pushes wait for it any more."""
        self._now = now
        found = self.membership.find(engine)
        links = sorted(set(found.links.values())) if found is not None else []
        self._tell(links, messages.Closed(reason=f"engine {engine} was dropped: {reason}", normal=False))
        for link in links:
            self._lose(link, f"dropped: {reason}", left=False, dropped=True)
        self.membership.forget(engine)
        self._complete()
        self._gather()
        return self._flush()

    def pause(self, engine: str) -> Sent:
        """Leave an engine out of the next pushes."""
        found = self.membership.engine_that_is(EngineState.READY, engine)
        if self._agreement is not None and engine in self._agreement.engines:
            raise RendezvousError(
                f"engine {engine!r} can't be paused now: a push to it has begun; pause it when that has ended"
            )
        found.happen("paused")
        self._gather()
        return self._flush()

    def resume(self, engine: str) -> Sent:
        """Take a paused engine in again."""
        self.membership.engine_that_is(EngineState.PAUSED, engine).happen("resumed")
        return self._flush()

    @abstractmethod
    def _lose(self, link: int, cause: str, *, left: bool, dropped: bool = False) -> None:
        """A process is gone; `left`: it closed normally; `dropped`: nobody wants it back."""

    @abstractmethod
    def _gather(self) -> None:
        """Go on with a round that waits for others, if it can."""
