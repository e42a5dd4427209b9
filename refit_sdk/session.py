"""The public face: one object a process, that joins on construction and leaves on close.

>>> RefitSession.target(None, rendezvous="here", engine="rollout-0", rank=0, size=1)
Traceback (most recent call last):
...
refit_sdk.errors.RendezvousError: rendezvous='here' is not an address; it looks like tcp://10.0.0.1:29600, ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from attrs import frozen

from refit_sdk import asked
from refit_sdk.device import callers_streams
from refit_sdk.driving import DrivenEngine, Driver, joining, split, told
from refit_sdk.errors import RefitError
from refit_sdk.fabric import Fabric
from refit_sdk.hub import Hub
from refit_sdk.joining import Options, Place, join, number_or_env, rendezvous_or_env
from refit_sdk.participant import Participant
from refit_sdk.plan import Plan
from refit_sdk.report import PushReport
from refit_sdk.settings import Settings, checked, settings_of
from refit_sdk.world import Side

DEADLINE = 120.0
"""Seconds that a wait inside joining, a push or a reform may take, where no other number is given."""

HEARTBEAT = 15.0
"""Seconds of silence after which a rank is taken for lost, where no other number is given."""


@frozen(eq=False)
class PushHandle:
    """A push that goes on by itself. `released` is set when the sources may change their values again."""

    released: threading.Event
    _done: Future[PushReport]

    def result(self, timeout: float | None = None) -> PushReport:
        """The report, waited for at most `timeout` seconds. Raises what the push raised, or `TimeoutError`."""
        return self._done.result(timeout)


class RefitSession:
    """A process's part in a refit, from joining to leaving. Made by `source`, `target` or `colocated`."""

    def __init__(self, participant: Participant, *, hub: Hub | None, sides: Iterable[Side], deadline: float) -> None:
        """For the three makers below."""
        self._participant = participant
        self._driver: Driver | None = None
        self._hub = hub
        self._sides = frozenset(sides)
        self._deadline = deadline
        self._busy = threading.Lock()
        self._pushing: threading.Thread | None = None
        self._closed = False

    @classmethod
    def source(
        cls,
        model: Any,
        *,
        rendezvous: str | None = None,
        rank: int | None = None,
        size: int | None = None,
        engines: int | Sequence[str | DrivenEngine] | None = None,
        settings: Settings | None = None,
        routes: Iterable[tuple[str, str]] | None = None,
        casts: Iterable[tuple[str, str]] | None = None,
        cast: Literal["allowed", "never"] | None = None,
        ignore: Iterable[str] | None = None,
        window_bytes: int | None = None,
        topology: str | Path | Mapping[str, Any] | None = None,
        adapter: str | None = None,
        fabric: str | Fabric = "mixed",
        token: str | None = None,
        insecure: bool = False,
        deadline: float = DEADLINE,
        heartbeat: float = HEARTBEAT,
    ) -> Self:
        """Join with a rank that trains. All sources give the same settings.

        `rank` and `size` default to RANK and WORLD_SIZE, `rendezvous` to REFIT_RENDEZVOUS. Rank 0 hosts it
        unless a `RefitController` does. `engines`: how many engines to wait for (1), their names, or controls of
        engines that run elsewhere, which rank 0 then leads through every push. `routes`, `casts`, `cast`, `ignore` and
        `window_bytes` are those of `Settings`, or give a whole `settings`. `fabric` is a name, or a fabric made with
        arguments of its own; `"mixed"` is shared memory inside hosts and TCP between them. `topology` is a topology
        file's path or content (REFIT_TOPOLOGY).
        """
        place = Place(
            side="source",
            engine="",
            rank=number_or_env(rank, "rank", "RANK"),
            size=number_or_env(size, "size", "WORLD_SIZE"),
            model=model,
            adapter=adapter,
        )
        stated = settings_of(
            settings, routes=routes, casts=casts, cast=cast, ignore=ignore, window_bytes=window_bytes, topology=topology
        )
        names, controls = (None, ()) if engines is None else split(engines)
        return cls._join(
            Options(
                rendezvous=rendezvous_or_env(rendezvous),
                places=(place,),
                settings=stated,
                engines=names,
                fabric=fabric,
                token=token,
                insecure=insecure,
                deadline=asked.seconds(deadline, "deadline"),
                heartbeat=asked.seconds(heartbeat, "heartbeat"),
            ),
            drive=controls if place.rank == 0 else (),
        )

    @classmethod
    def target(
        cls,
        module: Any,
        *,
        rendezvous: str | None = None,
        engine: str,
        rank: int,
        size: int,
        frozen: Iterable[str] = (),
        settings: Settings | None = None,
        adapter: str | None = None,
        fabric: str | Fabric = "mixed",
        token: str | None = None,
        insecure: bool = False,
        deadline: float = DEADLINE,
        heartbeat: float = HEARTBEAT,
    ) -> Self:
        """Join with a rank of an engine that generates. `frozen` are patterns of tensors that pushes leave alone;
        each has to match something on a rank of the engine. `settings`, where given, must be the sources'.
        """
        place = Place(
            side="target",
            engine=asked.engine(engine),
            rank=asked.whole(rank, "rank"),
            size=asked.whole(size, "size"),
            model=module,
            adapter=adapter,
            frozen=asked.strings(frozen, "frozen"),
        )
        return cls._join(
            Options(
                rendezvous=rendezvous_or_env(rendezvous),
                places=(place,),
                settings=None if settings is None else checked(settings),
                engines=None,
                fabric=fabric,
                token=token,
                insecure=insecure,
                deadline=asked.seconds(deadline, "deadline"),
                heartbeat=asked.seconds(heartbeat, "heartbeat"),
            )
        )

    @classmethod
    def colocated(
        cls,
        *,
        source: Any,
        target: Any,
        rendezvous: str | None = None,
        rank: int | None = None,
        size: int | None = None,
        engine: str = "colocated",
        engine_rank: int | None = None,
        engine_size: int | None = None,
        engines: int | Sequence[str] | None = None,
        frozen: Iterable[str] = (),
        settings: Settings | None = None,
        routes: Iterable[tuple[str, str]] | None = None,
        casts: Iterable[tuple[str, str]] | None = None,
        cast: Literal["allowed", "never"] | None = None,
        ignore: Iterable[str] | None = None,
        window_bytes: int | None = None,
        topology: str | Path | Mapping[str, Any] | None = None,
        source_adapter: str | None = None,
        target_adapter: str | None = None,
        fabric: str | Fabric = "mixed",
        token: str | None = None,
        insecure: bool = False,
        deadline: float = DEADLINE,
        heartbeat: float = HEARTBEAT,
    ) -> Self:
        """Join with a process that trains and generates. What it holds of what it needs is copied, not sent.

        `engine_rank` and `engine_size` are the rank in the engine, where they aren't `rank` and `size`.
        """
        rank, size = number_or_env(rank, "rank", "RANK"), number_or_env(size, "size", "WORLD_SIZE")
        trains = Place(side="source", engine="", rank=rank, size=size, model=source, adapter=source_adapter)
        generates = Place(
            side="target",
            engine=asked.engine(engine),
            rank=rank if engine_rank is None else asked.whole(engine_rank, "engine_rank"),
            size=size if engine_size is None else asked.whole(engine_size, "engine_size"),
            model=target,
            adapter=target_adapter,
            frozen=asked.strings(frozen, "frozen"),
        )
        stated = settings_of(
            settings, routes=routes, casts=casts, cast=cast, ignore=ignore, window_bytes=window_bytes, topology=topology
        )
        return cls._join(
            Options(
                rendezvous=rendezvous_or_env(rendezvous),
                places=(trains, generates),
                settings=stated,
                engines=None if engines is None else asked.engines(engines),
                fabric=fabric,
                token=token,
                insecure=insecure,
                deadline=asked.seconds(deadline, "deadline"),
                heartbeat=asked.seconds(heartbeat, "heartbeat"),
            )
        )

    @classmethod
    def _join(cls, options: Options, *, drive: Sequence[DrivenEngine] = ()) -> Self:
        driver = Driver(drive, info=told(options)) if drive else None
        with joining(driver, seconds=options.deadline):
            participant, hub = join(options)
        made = cls(participant, hub=hub, sides=[place.side for place in options.places], deadline=options.deadline)
        if driver is not None:
            made._driver = driver.lead(participant, hub)
        return made

    @property
    def plan(self) -> Plan:
        """What a push will move, and how. `RefitError` for a rank that came late, before its first push."""
        self._refuse_closed()
        plan = self._participant.plan
        if plan is None:
            raise RefitError("there is no plan yet: this rank came late, and is in from the next push on")
        return plan

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of this target's tensors that no push writes, sorted: those that `frozen` leaves out, and those that
        the adapter knows of and doesn't describe, such as non-persistent buffers. `()` on a rank that only trains.

        They stay as the engine has them. What is derived from weights belongs into the adapter's `install`.
        """
        return self._participant.uncovered

    @property
    def links(self) -> dict[tuple[str, str], str]:
        """What carries this process's bytes, by the names of sender and receiver: `shm (one copy)`, `shm`, `tcp`, or
        another fabric's name. Chosen when the ranks connect; only links on which the plan moves bytes.
        None before there is a plan, or after `close`.
        """
        return self._participant.links()

    def push(
        self, *, version: int, require: int | Literal["all"] = "all", wait: bool = True
    ) -> PushReport | PushHandle:
        """Deliver the sources' current values as `version`. All sources call it.

        `require`: how many engines must commit for the push not to raise. `wait=False` returns a handle at once; the
        values may not change before `released` is set. `PushError` says what each engine is; `PlanError` and
        `UnsupportedMoveError` come before any byte moves.
        """
        number, needed = asked.version(version), asked.require(require)
        if wait:
            return self._alone("push", number, needed)
        self._enter("push")
        released = threading.Event()
        done: Future[PushReport] = Future()
        args = (callers_streams(), number, needed, released, done)
        self._pushing = threading.Thread(target=self._later, args=args, name="refit-push")
        self._pushing.start()
        return PushHandle(released, done)

    def receive(self) -> PushReport:
        """Wait for the next push, however long its peers live, and take it. Every rank of an engine calls it.

        `SessionClosed` when the sources have closed; `PushError` if the push failed.
        """
        return self._alone("receive", None, 0)

    def sync(self, *, version: int, require: int | Literal["all"] = "all") -> PushReport:
        """Both halves of a push in one process. All colocated processes call it."""
        return self._alone("sync", asked.version(version), asked.require(require))

    def reform(self) -> None:
        """Go on with the survivors, after a rank was lost. Every survivor calls it; the next push is theirs."""
        with self._exclusive("reform"):
            reform, driver = self._participant.reform, self._driver
            reform() if driver is None else driver.reform(reform, seconds=self._deadline)

    def watch(self, watcher: Callable[[int, int], None] | None) -> None:
        """Have `watcher(done, total)` called in every push, on its thread, whenever a window is through; None: nobody.

        What it raises fails the push.
        """
        self._participant.watcher = watcher

    def release(self) -> None:
        """Free the window buffers until the next push."""
        with self._exclusive("release"):
            self._participant.release()

    def close(self, reason: str = "") -> None:
        """Leave, and free sockets, threads and memory. A reason makes it an error for those who wait.

        A push that goes on by itself is waited for, for at most the deadline. A second call does nothing.
        """
        self._closed = True
        if self._pushing is not None and self._pushing is not threading.current_thread():
            self._pushing.join(self._deadline)
        if self._driver is not None:
            self._driver.close()
        self._participant.close(reason)
        if self._hub is not None:
            self._hub.close(f"source[0] closed the session{': ' if reason else ''}{reason}", normal=not reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RefitError("this session is closed: make a new one")

    def _enter(self, verb: str) -> None:
        """Begin a verb. Refused, not waited for, during another: two pushes at once are a mistake of the caller's."""
        self._refuse_closed()
        if not self._busy.acquire(blocking=False):
            raise RefitError("this session is busy with a push, a receive or a reform: wait for it to end")
        wrong = _wrong_side(verb, self._sides)
        if wrong:
            self._busy.release()
            raise RefitError(wrong)

    @contextmanager
    def _exclusive(self, verb: str) -> Iterator[None]:
        self._enter(verb)
        try:
            yield
        finally:
            self._busy.release()

    def _alone(self, verb: str, version: int | None, require: int) -> PushReport:
        with self._exclusive(verb):
            return self._push(version, require)

    def _push(self, version: int | None, require: int, *, released: Callable[[], None] | None = None) -> PushReport:
        push = partial(self._participant.push, version=version, require=require, released=released)
        if self._driver is None or version is None:
            return push()
        return self._driver.push(push, version=version, require=require, seconds=self._deadline)

    def _later(
        self,
        streams: Callable[[], AbstractContextManager[None]],
        version: int,
        require: int,
        released: threading.Event,
        done: Future[PushReport],
    ) -> None:
        """Push on a thread of its own, for a caller who entered the verb. Who has the outcome may go on at once."""
        end: Callable[[], None]
        try:
            with streams():
                report = self._push(version, require, released=released.set)
            end = partial(done.set_result, report)
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            end = partial(done.set_exception, error)
        released.set()
        self._busy.release()
        end()


def _wrong_side(verb: str, sides: frozenset[Side]) -> str:
    """What is wrong with a verb on a session of these sides; nothing if it is right."""
    if len(sides) > 1:
        return "this session trains and generates: call sync(version=), not receive()" if verb == "receive" else ""
    side: Side = "source" if "source" in sides else "target"
    right = {"source": "push", "target": "receive"}[side]
    if verb not in ("push", "receive", "sync") or verb == right:
        return ""
    return f"{verb}() was called on a session that is only a {side}: call {right}({'version=' * (right == 'push')})"
