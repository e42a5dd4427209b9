"""Engines that run elsewhere, led through a push by their own controls: one process of the sources' does it for all.

1. As the session opens, each engine is told where the rendezvous is (`connect`). Its ranks join from there, so telling
   them lasts until everybody has joined: it goes on in a thread of its own.
2. A push begins by pausing all engines and having their ranks ready to receive. What fails here touches nothing: those
   that were paused serve again.
3. While the sources push, `update` goes on in threads: it ends as the engine's ranks end their part. Whether an engine
   committed, the rendezvous knows.
4. An engine that committed is given the version, its caches are looked after, and it resumes. One that didn't stays
   paused and fenced, and the error says how it gets out of that.

What a token is never passes through here: engines have it from their own environment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import define, evolve, field

from refit_sdk import asked
from refit_sdk.adapter import EngineControl
from refit_sdk.errors import PushError, RefitError
from refit_sdk.report import PushReport
from refit_sdk.states import PushState

if TYPE_CHECKING:
    from refit_sdk.hub import Hub
    from refit_sdk.participant import Participant

CLOSING_SECONDS = 10.0
"""How long engines are waited for as a session closes."""

RECOVERY = (
    "it stays paused and fenced; push again once the cause is mended (after reform(), if a rank was lost), or load its "
    "weights anew and resume it yourself"
)
"""How an engine that a push failed on gets to serve again."""


@runtime_checkable
class DrivenEngine(EngineControl, Protocol):
    """An engine's control that a session leads through pushes. `engine` is the engine's name in the session."""

    engine: str

    def connect(self, *, info: Mapping[str, Any]) -> None:
        """Have every rank of the engine join the session; returns once they have. `info` is plain data."""
        ...

    def check(self) -> None:
        """`RefitError` if the engine can't be reached, or can't take part as it was started."""
        ...

    def pause_now(self) -> None:
        """Pause as this control was made to, and have every rank ready to receive."""
        ...

    def disconnect(self) -> None:
        """Have every rank of the engine leave the session."""
        ...

    def refresh_caches(self) -> None:
        """Empty the caches that hold what older weights computed, or keep them, as this control was made to."""
        ...


@define(eq=False)
class Stages:
    """Seconds of each stage, the longest of all engines."""

    seconds: dict[str, float] = field(factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Time a stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = max(self.seconds.get(stage, 0.0), time.perf_counter() - begun)


def split(engines: Any) -> tuple[Any, tuple[DrivenEngine, ...]]:
    """What was given as `engines=`, as names or a number, and the controls among it.

    >>> split(["rollout-1", "rollout-0"]), split(2)
    ((('rollout-0', 'rollout-1'), ()), (2, ()))
    """
    if isinstance(engines, str | bytes) or not isinstance(engines, Iterable):
        return asked.engines(engines), ()
    given = list(engines)
    controls = tuple(each for each in given if isinstance(each, DrivenEngine))
    return asked.engines([each.engine if isinstance(each, DrivenEngine) else each for each in given]), controls


class Driver:
    """Leads engines. Made by who hosts the rendezvous."""

    def __init__(self, engines: Sequence[DrivenEngine], *, info: Mapping[str, Any]) -> None:
        """`info` is what every engine is told at `connect`, its own name added."""
        self.served: Callable[[], Mapping[str, int | None]] = dict
        """Which version each engine has committed; set by who hosts the rendezvous."""
        self._engines = tuple(engines)
        self._info = dict(info)
        self._deadline = float(info.get("deadline", 120.0))
        self._connecting: dict[str, Future[None]] = {}
        self._updates: dict[str, Future[None]] = {}
        self._fenced: set[str] = set()
        self._next: Callable[[], None] = lambda: None
        self.seconds: dict[str, float] = {}

    def lead(self, participant: Participant, hub: Hub | None) -> Driver:
        """Begin as `participant` enters, and ask `hub` what was committed. `RefitError` where another process hosts."""
        if hub is None:
            reason = "a controller hosts the rendezvous: give it the engines' controls, and the sources their names"
            participant.close(reason)
            raise RefitError(reason)
        self.served = hub.coordinator.engine_versions
        participant.held[0].entering = self.enter
        return self

    def connect(self) -> None:
        """Look whether all engines can take part, and begin to have them join. `RefitError` names those that can't."""
        _raise("can't take part", _each(self._engines, lambda engine: engine.check(), self._deadline))
        for engine in self._engines:
            info = {**self._info, "engine": engine.engine}
            self._connecting[engine.engine] = _begin(lambda engine=engine, info=info: engine.connect(info=info))  # type: ignore[misc]

    def connected(self, *, seconds: float) -> None:
        """Wait until all engines have joined. `RefitError` says which didn't, and why."""
        _raise("didn't join", _failures(self._connecting, seconds))

    def refused(self) -> str:
        """What engines that failed to join have said so far, for the error of a join that failed; nothing if none."""
        ended = {name: future for name, future in self._connecting.items() if future.done()}
        return "; ".join(f"{name}: {error}" for name, error in _failures(ended, 0.0).items())

    def enter(self) -> None:
        """Begin what comes next. Called as this process enters a push or a reform: what is raised keeps it out of that,
        and the others hear of it.
        """
        self._next()

    def begin(self, version: int) -> None:
        """Pause all engines and have them receive. `RefitError` if one can't be: those that were paused resume."""
        stages = Stages()
        with stages.timed("pause"):
            failed = _each(self._engines, lambda engine: engine.pause_now(), self._deadline)
        self.seconds = stages.seconds
        if failed:
            spared = {*failed, *self._fenced}
            _each(
                [engine for engine in self._engines if engine.engine not in spared],
                lambda engine: engine.resume(),
                self._deadline,
            )
        _raise("can't be paused for the push", failed)
        self._update({"version": version})

    def begin_reform(self) -> None:
        """Have all engines take part in a reform, paused. They stay so until a push commits."""
        _raise("can't take part in the reform", _each(self._engines, lambda engine: engine.pause_now(), self._deadline))
        self._update({"version": -1, "reform": True})

    def _update(self, told: Mapping[str, Any]) -> None:
        version, info = told["version"], {key: value for key, value in told.items() if key != "version"}
        self._updates = {
            engine.engine: _begin(lambda engine=engine: engine.update(version=version, info=info))  # type: ignore[misc]
            for engine in self._engines
        }

    def reform(self, reform: Callable[[], None], *, seconds: float) -> None:
        """Do a reform that calls `enter`, and wait for all engines. `RefitError` says which failed."""
        self._next = self.begin_reform
        try:
            reform()
        finally:
            updates, self._updates = self._updates, {}
        _raise("didn't take part in the reform", _failures(updates, seconds))

    def end(self, version: int, *, seconds: float) -> dict[str, str]:
        """Finish and resume the engines that committed, and fence those that didn't: which, and why."""
        updates, self._updates = self._updates, {}
        if not updates:
            return {}
        failed, served = _failures(updates, seconds), self.served()
        for name in updates:
            if served.get(name) != version:
                failed.setdefault(name, f"it didn't commit version {version}")
        return self._conclude(version, failed)

    def push(self, push: Callable[[], PushReport], *, version: int, require: int, seconds: float) -> PushReport:
        """Do a push that calls `enter`, and end it. `PushError` says which engines stay paused, and why."""
        self._next = partial(self.begin, version)
        with self.ending(version, require=require, seconds=seconds):
            report = push()
        return evolve(report, seconds={**report.seconds, **self.seconds})

    @contextmanager
    def ending(self, version: int, *, require: int, seconds: float) -> Iterator[None]:
        """End what `begin` began, once the block has pushed or failed to."""
        try:
            yield
        except BaseException as error:
            failed = self.end(version, seconds=seconds)
            if failed and isinstance(error, Exception):
                raise failure_of(version, failed, error) from error
            raise
        failed = self.end(version, seconds=seconds)
        if failed and not 0 < require <= len(self._engines) - len(failed):
            raise failure_of(version, failed, None)

    def close(self) -> None:
        """Have engines leave the session, if they answer soon."""
        begun = {engine.engine: _begin(engine.disconnect) for engine in self._engines}
        _failures(begun, CLOSING_SECONDS)

    def _conclude(self, version: int, failed: Mapping[str, str]) -> dict[str, str]:
        """Finish and resume what committed, fence what didn't; what failed, this included."""
        stages = Stages(self.seconds)
        lost = dict(failed)
        verbs: tuple[tuple[str, Callable[[DrivenEngine], None]], ...] = (
            ("finish", lambda engine: engine.finish(version=version)),
            ("caches", lambda engine: engine.refresh_caches()),
            ("resume", lambda engine: engine.resume()),
        )
        for stage, verb in verbs:
            with stages.timed(stage):
                lost |= _each([engine for engine in self._engines if engine.engine not in lost], verb, self._deadline)
        self._fenced = set(lost)
        fenced = [engine for engine in self._engines if engine.engine in lost]
        unreached = _each(fenced, lambda engine: engine.fence(lost[engine.engine]), self._deadline)
        return {
            n: f"{text} (and it couldn't be fenced: {unreached[n]})" if n in unreached else text
            for n, text in lost.items()
        }


def told(options: Any) -> dict[str, Any]:
    """What engines are told of a session: where it meets, and its times. No token: they have it from their own host."""
    if not isinstance(options.fabric, str):
        raise RefitError("fabric= is an object of this process, which engines can't be told: pass the fabric's name")
    return {
        "rendezvous": options.rendezvous,
        "deadline": options.deadline,
        "heartbeat": options.heartbeat,
        "fabric": options.fabric,
    }


@contextmanager
def joining(driver: Driver | None, *, seconds: float) -> Iterator[None]:
    """Have engines join while the block does. What they say is told where the block fails."""
    if driver is None:
        yield
        return
    driver.connect()
    try:
        yield
    except RefitError as error:
        refused = driver.refused()
        if refused:
            raise RefitError(f"{error}; {refused}") from error
        raise
    driver.connected(seconds=seconds)


def failure_of(version: int, failed: Mapping[str, str], error: BaseException | None) -> PushError:
    """The error of a push that failed on engines that are driven, `error` being what the push itself raised."""
    states = dict(error.engines) if isinstance(error, PushError) else dict.fromkeys(failed, str(PushState.IN_DOUBT))
    told = [f"engine {name}: {cause}" for name, cause in failed.items() if error is None]
    what = [str(error)] if error is not None else [f"version {version} was pushed, but {'; '.join(told)}"]
    causes = error.failures if isinstance(error, PushError) else failed
    return PushError("; ".join((*what, f"{', '.join(failed)}: {RECOVERY}")), failures=causes, engines=states)


def _begin(work: Callable[[], None]) -> Future[None]:
    """Work in a thread that no exit waits for: an engine that died may never answer."""
    future: Future[None] = Future()

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is told where the future is asked
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=body, name="refit-engine", daemon=True).start()
    return future


def _failures(futures: Mapping[str, Future[None]], seconds: float) -> dict[str, str]:
    """Who failed, and why. `seconds` are for all together."""
    end = time.monotonic() + seconds
    failed = {}
    for name, future in futures.items():
        try:
            future.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            failed[name] = f"no answer in {seconds:g} s"
        except Exception as error:  # noqa: BLE001 - every engine's failure is told
            failed[name] = str(error)
    return failed


def _each(engines: Sequence[DrivenEngine], verb: Callable[[DrivenEngine], None], seconds: float) -> dict[str, str]:
    """Do it to all engines at once; who failed, or had no answer in so many seconds, and why."""
    begun = {engine.engine: _begin(lambda engine=engine: verb(engine)) for engine in engines}  # type: ignore[misc]
    return _failures(begun, seconds)


def _raise(what: str, failed: Mapping[str, str]) -> None:
    if failed:
        raise RefitError("; ".join(f"engine {name} {what}: {error}" for name, error in failed.items()))
