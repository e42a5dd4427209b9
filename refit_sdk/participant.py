"""A process's part in the protocol: join, agree, move, confirm, and fence itself where the outcome isn't good.

1. Join: describe, say `Hello`, and form the first epoch with all others.
2. A push: prepare; look whether anything described has moved; say `Ready`; form an epoch if the rendezvous says so;
   on `Go`, run the program; install; check that as many bytes arrived as planned and that no address changed; say
   `Done`; and wait for the outcome.
3. From `Go` to the outcome a target is fenced. It serves again if its engine committed, or if it served before and its
   engine was left untouched; torn or in doubt, it stays fenced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

from refit_sdk import __version__, messages
from refit_sdk.adapter import Observer
from refit_sdk.agreement import Sums
from refit_sdk.confirming import Install, done_of, install
from refit_sdk.control import ANEW, Client
from refit_sdk.errors import PushError, RefitError, RendezvousError, SessionClosed
from refit_sdk.executor import Moved
from refit_sdk.fabric import Fabric, FabricError
from refit_sdk.messages import Done, Down, EngineDone, Fault, Form, Go, Link, Outcome
from refit_sdk.mover import Mover, Standing
from refit_sdk.outcome import report_of, tell
from refit_sdk.plan import Plan
from refit_sdk.raising import causes_of, error_of, telling
from refit_sdk.report import PushReport
from refit_sdk.seat import Gate, Held
from refit_sdk.sharing import Sharing
from refit_sdk.states import PushState
from refit_sdk.world import World

Planner = Callable[[World, str], tuple[str, Plan]]
"""A world and the settings' JSON → the input digest and the plan."""

GRACE: Final = 3
"""The rendezvous keeps the deadlines. A process gives up by itself only after this many of them."""


class Participant:
    """One process of a session: at most one seat on each side."""

    def __init__(
        self,
        client_of: Callable[[Callable[[Down], None]], Client],
        *,
        source: Held | None,
        target: Held | None,
        planner: Planner,
        fabric: Fabric,
        observers: Sequence[Observer] = (),
        host: str = "",
        where: messages.Where | None = None,
    ) -> None:
        self._source = source
        self._observers = observers
        self._target = target
        self._gate = Gate(target)
        self._planner = planner
        self._mover = Mover(fabric, after_window=self._passed)
        self.links = self._mover.links
        self.watcher: Callable[[int, int], None] | None = None
        self._deadline, self._left = 0.0, False
        self._closed: SessionClosed | None = None
        self._client = client_of(self._urgent)
        self._sharing, self._where = Sharing(host=host), where

    @property
    def held(self) -> list[Held]:
        """The seats of this process, source first."""
        return [held for held in (self._source, self._target) if held is not None]

    @property
    def _own_name(self) -> str:
        return "+".join(str(held.claim) for held in self.held)

    @property
    def plan(self) -> Plan | None:
        """The plan of the current epoch; None for a late rank before its first push."""
        return self._mover.standing.plan if self._mover.standing is not None else None

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of the target's tensors that no push writes."""
        return self._target.uncovered if self._target is not None else ()

    @property
    def client(self) -> Client:
        """The control channel."""
        return self._client

    def _passed(self, done: int, total: int) -> None:
        """A window is through: adapters may let go of what it touched, and who watches is told."""
        for held in self.held:
            held.trim()
        if self.watcher is not None:
            self.watcher(done, total)

    def _urgent(self, message: Down) -> None:
        """Act on what can't wait for this rank's turn. Called on the reader's thread."""
        if isinstance(message, messages.Drop):
            self._mover.drop(message.push, message.engine, message.cause)
        elif isinstance(message, messages.Closed):
            self._mover.abort(message.reason)

    def join(
        self,
        *,
        settings: str | None,
        plugins: Mapping[str, str],
        engines: int | tuple[str, ...] | None,
        pid: int,
        host: str,
        deadline: float,
    ) -> None:
        """Take the seats and form the first epoch, or come late and wait for the next push. Raises what went wrong."""
        self._deadline = deadline
        hello = messages.Hello(
            sdk=__version__,
            claims=tuple(held.claim for held in self.held),
            manifests=tuple(held.body for held in self.held),
            settings=settings,
            plugins=dict(plugins),
            engines=engines,
            pid=pid,
            host=host,
            fabric=self._mover.fabric,
            frozen=self._target.frozen if self._target is not None else {},
            door=self._sharing.door,
            where=self._where or messages.Where(),
        )
        self._say(hello)
        match self._next(bounded=True):
            case messages.Welcome(late=late, hosted_by=hosted_by, heartbeat=heartbeat, deadline=seconds):
                self._client.host = f"the rendezvous host, {hosted_by},"
                self._client.heartbeat = heartbeat
                self._deadline = seconds
            case messages.Refused(reason=reason):
                raise RendezvousError(reason)
            case other:
                raise RendezvousError(
                    f"the rendezvous answered {type(other).__name__} to the first message: "
                    "see that every rank and the controller run the same release"
                )
        if late:
            self._gate.hold("it joined late: it serves from the next push on")
        else:
            self._round(bounded=True)

    def _say(self, message: messages.Message) -> None:
        """Send, if the rendezvous is there. If it isn't, `_next` tells, after the last words that came from it."""
        with contextlib.suppress(RendezvousError):
            self._client.send(message)

    def _next(self, *, bounded: bool) -> Down:
        """The next message that isn't about an earlier push. The end of the session is raised."""
        if self._closed is not None:
            raise self._closed
        while True:
            message = self._client.next(self._deadline * GRACE if bounded else None)
            match message:
                case None:
                    seconds = self._deadline * GRACE
                    raise RendezvousError(f"{self._client.host} gave no answer in {seconds:g} s; {ANEW}")
                case messages.Drop():
                    continue
                case messages.Closed(reason=reason, normal=True):
                    self._closed = SessionClosed(reason)
                    raise self._closed
                case messages.Closed(reason=reason):
                    raise RendezvousError(f"{reason}; {ANEW}")
                case _:
                    return message

    def _round(self, *, bounded: bool, sums: bool = False) -> Go | messages.Formed:
        """Take part in an agreement until it ends well. What ends it badly is raised."""
        while True:
            match self._next(bounded=bounded):
                case Form() as form:
                    self._attempt(form.epoch, lambda form=form: self._plan(form))  # type: ignore[misc]
                case Link() as link:
                    self._attempt(link.epoch, lambda link=link: self._link(link, sums=sums))  # type: ignore[misc]
                case Go() | messages.Formed() as end:
                    return end
                case Fault() as fault:
                    raise error_of(fault.error, fault.causes, failures=fault.failures, engines=fault.engines)
                case _:
                    continue

    def _attempt(self, epoch: int, step: Callable[[], None]) -> None:
        """Do a step of the agreement. Its error goes to the rendezvous, which raises it everywhere."""
        try:
            step()
        except RefitError as error:
            causes = causes_of(error)
            if isinstance(error, FabricError):
                who = self._own_name if error.peer is None else self._mover.name(error.peer)
                causes = (f"{who}: {error}",)
            self._say(messages.Failed(epoch=epoch, error=type(error).__name__, causes=causes))
        except BaseException as error:
            cause = f"{self._own_name}: {type(error).__name__}: {error}"
            self._say(messages.Failed(epoch=epoch, error="PushError", causes=(cause,)))
            raise

    def _plan(self, form: Form) -> None:
        world = self._sharing.world(form, self._client, deadline=self._deadline)
        claims = {(held.claim.side, held.claim.engine, held.claim.rank) for held in self.held}
        process = next(s.process for s in world.seats if (s.side, s.engine, s.rank) in claims)
        digest, plan = self._planner(world, form.settings)
        self._mover.standing = Standing(form.epoch, plan, process, form.fresh)
        self._say(messages.Planned(epoch=form.epoch, input_digest=digest, plan_digest=plan.digest))

    def _link(self, link: Link, *, sums: bool) -> None:
        self._mover.connect(self._client, timeout=self._deadline)
        parts = self._sums() if sums else ()
        self._gave_word = True
        self._say(messages.Linked(epoch=link.epoch, sums=parts))

    def _sums(self) -> Sums:
        standing = self._mover.standing
        if self._source is None or standing is None:
            return ()
        return self._source.sums(standing.plan, process=standing.process)

    def push(self, *, version: int | None, require: int = 0, released: Callable[[], None] | None = None) -> PushReport:
        """One push from this process's side: `version` for sources; targets take what comes (None).

        `released` is called when the sources may change their values again. Raises what went wrong.
        """
        begun = time.perf_counter()
        self._gate.served = self._gave_word = False
        with self._excused("push", version):
            for held in self.held:
                held.prepare()
            self._refresh()
        try:
            go = self._gather(version, require)
        except RendezvousError as error:
            raise self._cut_off(error, self._alone() if self._gave_word else PushState.UNTOUCHED) from error
        agreed = time.perf_counter()
        return self._deliver(go, agree=agreed - begun, released=released)

    def _refresh(self) -> None:
        """Describe again what was rebound since. Executors are bound to the old views, so they go."""
        for held in self.held:
            if held.refresh():
                self._mover.forget()

    @contextlib.contextmanager
    def _excused(self, kind: Literal["push", "reform"], version: int | None = None) -> Iterator[None]:
        """Make ready to enter. What is raised instead is raised here, and those who would wait hear why."""
        try:
            yield
        except BaseException as error:
            self._say(messages.Unready(kind=kind, cause=f"{type(error).__name__}: {error}", version=version))
            raise

    def _gather(self, version: int | None, require: int) -> Go:
        bodies = tuple(held.changed_body() for held in self.held)
        source = self._source is not None
        self._say(messages.Ready(kind="push", version=version, require=require, manifests=bodies))
        go = self._round(bounded=source, sums=source)
        if not isinstance(go, Go):
            raise RendezvousError("the others re-formed the session while this rank waited for a push: call it again")
        return go

    def reform(self) -> None:
        """Form an epoch of the survivors. A rank whose engine lacks another waits, fenced, for that one to return."""
        with self._excused("reform"):
            self._refresh()
        bodies = tuple(held.changed_body() for held in self.held)
        self._say(messages.Ready(kind="reform", manifests=bodies))
        formed = self._round(bounded=True)
        if isinstance(formed, messages.Formed) and formed.waiting:
            self._mover.standing = None
            lacks = ", ".join(formed.lacks)
            self._gate.hold(f"its engine lacks {lacks}: it serves from the first push after that came back")

    def _deliver(self, go: Go, *, agree: float, released: Callable[[], None] | None) -> PushReport:
        mine = self._mover.mine(go.engines)
        taking = self._target is not None and self._target.claim.engine in mine
        if taking:
            self._fence(go, mine)
        moved = self._run(go, mine)
        if released is not None:
            released()
        begun = time.perf_counter()
        install = self._install(go, moved) if taking else None
        installed = time.perf_counter()
        outcome = self._settle(go, moved, install)
        seconds = {"agree": agree, **moved.seconds, "install": installed - begun}
        seconds["commit"] = time.perf_counter() - installed
        windows = len(self._mover.program(mine).windows)
        return self._conclude(outcome, seconds=seconds, windows=windows, install=install)

    def _fence(self, go: Go, mine: frozenset[str]) -> None:
        self._gate.served = not self._gate.held
        with self._blamed(go, mine, mutated=False):
            self._gate.hold(f"the push of version {go.version} hasn't been committed here")

    @contextlib.contextmanager
    def _blamed(self, go: Go, mine: frozenset[str], *, mutated: bool) -> Iterator[None]:
        """Do a part of a push. What is raised fails all engines of this process, and they hear why."""
        try:
            yield
        except BaseException as error:
            done = EngineDone(0, 0, f"{type(error).__name__}: {error}", mutated=mutated)
            self._say(Done(push=go.push, engines=dict.fromkeys(mine, done)))
            raise

    def _run(self, go: Go, mine: frozenset[str]) -> Moved:
        source = self._source.views if self._source is not None else None
        target = self._target.views if self._target is not None else None
        with self._blamed(go, mine, mutated=True):
            executor = self._mover.executor(mine, sources=source, targets=target)
            return self._mover.run(go.push, executor, seconds=self._deadline)

    def _install(self, go: Go, moved: Moved) -> Install:
        assert self._target is not None
        expected = self._mover.program(self._mover.mine(go.engines)).arriving(self._target.claim.engine)
        return install(self._target, moved, expected=expected, version=go.version)

    def _settle(self, go: Go, moved: Moved, install: Install | None) -> Outcome:
        """Say what was done, and hear how it ended. Cut off from the rendezvous, say so truthfully instead."""
        own = self._target.claim.engine if self._target is not None else ""
        mine = self._mover.mine(go.engines)
        done = done_of(mine, moved, install, own=own, speaker=self._own_name, name=self._mover.name)
        try:
            self._say(Done(push=go.push, engines=done))
            return self._outcome(go)
        except RefitError as error:
            said = done.get(own)
            raise self._cut_off(error, self._alone_with(said)) from error

    def _alone_with(self, said: EngineDone | None) -> PushState:
        """What this rank knows of its engine by itself, after it moved."""
        if said is None or not said.cause:
            return PushState.IN_DOUBT
        return PushState.TORN if said.mutated else self._alone()

    def _alone(self) -> PushState:
        """What a rank that wasn't written to knows of its engine by itself: of the engine's other ranks, nothing."""
        whole = self._target is not None and self._target.claim.size == 1
        return PushState.UNTOUCHED if whole else PushState.IN_DOUBT

    def _outcome(self, go: Go) -> Outcome:
        while True:
            match self._next(bounded=True):
                case Outcome(push=go.push) as outcome:
                    return outcome
                case _:
                    continue

    def _cut_off(self, error: RefitError, state: PushState) -> PushError:
        """The error of a rank that can't hear the rendezvous any more, its engine fenced if need be."""
        if state is PushState.UNTOUCHED:
            self._gate.open_again()
        else:
            self._gate.hold(f"{state}: {error}")
        own = self._target.claim.engine if self._target is not None else None
        engines = self.plan.world.engines if self.plan is not None else ()
        told = {name: str(state) for name in engines if own in (None, name)}
        return PushError(f"{error}; {telling(told)}", failures={self._client.host.strip(","): str(error)}, engines=told)

    def _conclude(
        self, outcome: Outcome, *, seconds: Mapping[str, float], windows: int, install: Install | None
    ) -> PushReport:
        verdict = outcome.engines.get(self._target.claim.engine) if self._target is not None else None
        if self._target is not None and verdict is not None:
            if verdict.state == PushState.COMPLETE:
                self._gate.open()
            elif verdict.state == PushState.UNTOUCHED:
                self._gate.open_again()
        report = report_of(outcome, seconds=seconds, windows=windows)
        tell(self._observers, report)
        if outcome.committed:
            return report
        error = error_of("PushError", outcome.causes, failures=outcome.failures, engines=outcome.engines)
        raise error from (install.error if install is not None else None)

    def release(self) -> None:
        """Free the window buffers; the next push makes new ones."""
        self._mover.release()

    def close(self, reason: str = "") -> None:
        """Leave, normally or for a reason, and free everything. A second call does nothing."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(RefitError):
            self._client.send(messages.Leave(reason=reason))
        self._client.close()
        self._sharing.close()
        self._mover.close()
        for held in self.held:
            held.close()
