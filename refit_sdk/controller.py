"""A rendezvous without a model: it says which engines a push waits for, and runs where no GPU is, in a driver say.

>>> with RefitController(rendezvous="tcp://127.0.0.1:0", engines=["rollout-0"]) as controller:
...     controller.engines
{'rollout-0': 'waiting'}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from refit_sdk import asked
from refit_sdk.control import Address, find_token, listen, parse_rendezvous
from refit_sdk.driving import DrivenEngine, Driver, split
from refit_sdk.errors import RefitError, RendezvousError
from refit_sdk.joining import rendezvous_or_env, serve
from refit_sdk.rounds import Sent
from refit_sdk.session import DEADLINE, HEARTBEAT


class RefitController:
    """Hosts the rendezvous, and admits, drops, pauses and resumes engines."""

    def __init__(
        self,
        *,
        rendezvous: str | None = None,
        engines: int | Sequence[str | DrivenEngine] = 1,
        fabric: str = "mixed",
        token: str | None = None,
        insecure: bool = False,
        deadline: float = DEADLINE,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        """Listen at `rendezvous` (port 0: any free one). `engines`: how many to wait for, their names, or controls of
        engines that run elsewhere: those are told to join at once, over the `fabric` of that name, and led by `update`.
        """
        expected, controls = split(engines)
        deadline, heartbeat = asked.seconds(deadline, "deadline"), asked.seconds(heartbeat, "heartbeat")
        address = parse_rendezvous(rendezvous_or_env(rendezvous))
        secret = find_token(token, address=address, insecure=insecure)
        try:
            listener = listen(address)
        except OSError as error:
            raise RendezvousError(f"the controller can't listen at {address}: {error}; is another there?") from error
        self._closed = False
        self._driver: Driver | None = None
        self._address = Address(address.host, listener.getsockname()[1])
        self._hub = serve(
            listener,
            token=secret,
            engines=expected,
            deadline=deadline,
            heartbeat=heartbeat,
            hosted_by="the controller",
        )
        self._deadline = deadline
        self._driver = self._drive(controls, {"deadline": deadline, "heartbeat": heartbeat, "fabric": fabric})

    def _drive(self, controls: Sequence[DrivenEngine], info: dict[str, str | float]) -> Driver | None:
        if not controls:
            return None
        driver = Driver(controls, info={"rendezvous": self.rendezvous, **info})
        driver.served = self._hub.coordinator.engine_versions
        try:
            driver.connect()
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        return driver

    @contextmanager
    def update(self, *, version: int) -> Iterator[None]:
        """Lead the engines that were given as controls through a push: pause them, have them receive while the block
        has all sources `push(version=...)`, finish and resume them. `PushError` says which stay paused, and why.
        """
        number = asked.version(version)
        driver = self._driver
        if driver is None:
            raise RefitError("no engine was given as a control: pass engines=[VllmServer(url), ...], say")
        driver.connected(seconds=self._deadline)
        driver.begin(number)
        with driver.ending(number, require=0, seconds=self._deadline):
            yield

    @property
    def rendezvous(self) -> str:
        """The address to give to every session."""
        return str(self._address)

    @property
    def engines(self) -> dict[str, str]:
        """Every engine's state, by name: those of `refit_sdk.states.EngineState`."""
        return self._hub.coordinator.engine_states()

    @property
    def state(self) -> str:
        """The session's state: those of `refit_sdk.states.SessionState`."""
        return str(self._hub.coordinator.state)

    def admit(self, engine: str) -> None:
        """Let an engine of this name join; it is in from the next push on."""
        name = asked.engine(engine)
        self._ask(lambda: self._hub.coordinator.admit(name))

    def drop(self, engine: str, *, reason: str = "the controller dropped it") -> None:
        """Take an engine out for good, whether it has joined or not: its sessions are closed, and neither joining nor
        pushes wait for it any more. `admit` lets another of its name come.

        `RendezvousError` for a name that isn't known.
        """
        name = asked.engine(engine)
        self._ask(lambda: self._hub.coordinator.drop(name, reason, now=time.monotonic()))

    def pause(self, engine: str) -> None:
        """Leave an engine out of the next pushes. `RendezvousError` unless it is ready, and no push to it has begun."""
        name = asked.engine(engine)
        self._ask(lambda: self._hub.coordinator.pause(name))

    def resume(self, engine: str) -> None:
        """Take a paused engine in again. `RendezvousError` unless it is paused."""
        name = asked.engine(engine)
        self._ask(lambda: self._hub.coordinator.resume(name))

    def close(self, reason: str = "") -> None:
        """End the session for everybody and free the address. A second call does nothing."""
        self._closed = True
        if self._driver is not None:
            self._driver.close()
        self._hub.close(f"the controller closed the session{': ' if reason else ''}{reason}", normal=not reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def _ask(self, verb: Callable[[], Sent]) -> None:
        if self._closed:
            raise RendezvousError("this controller is closed: start a new one")
        self._hub.ask(verb)
