"""A crew of processes that speaks to one parent, and never outlives it. No torch.

1. Children are forked from a server that has torch loaded, so that starting one takes milliseconds.
2. Each has a pipe to the parent for what it says: values, and text about what it is doing.
3. A child that fails says why and ends; the parent then waits a moment for what the others say, and raises it all,
   killed ranks first.
4. A child ends when its parent does, however that happens. The parent ends its children when it leaves the crew: by an
   error, at the timeout, on SIGINT and on SIGTERM.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final

from attrs import define, frozen

from refit_sdk.errors import RefitError

GRACE: Final = 2.0
"""Seconds for the others to say what they saw after one rank failed, and for a process to end when asked."""

_PRELOAD: Final = ["torch", "torch._dynamo", "refit_sdk.demo.train", "refit_sdk.demo.rollout"]


class CrewError(RefitError):
    """Processes that failed. `failures` maps a rank's name to what it said, first cause first.

    >>> print(CrewError("the run failed", failures={"source[0]": "no route", "source[1]": "no route"}))
    the run failed
      source[0], source[1]: no route
    """

    def __init__(self, message: str, *, failures: dict[str, str]) -> None:
        self.failures = failures
        names: dict[str, list[str]] = {}
        for name, cause in failures.items():
            names.setdefault(cause, []).append(name)
        super().__init__("\n".join((message, *(f"  {', '.join(who)}: {cause}" for cause, who in names.items()))))


@frozen
class Failed:
    """The last words of a child."""

    cause: str


@define(eq=False)
class Member:
    """One child, what it last said it was doing, and why it failed, if it did."""

    process: BaseProcess
    pipe: Connection
    doing: str = "starting"
    cause: str | None = None
    ended: bool = False


class Crew:
    """Children by name, as a context manager that ends them all."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._members: dict[str, Member] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, entry: Callable[..., None], *args: Any) -> None:
        """Run `entry(*args, say)` in a new process; `say` takes text about what it does, or a value for the parent."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(entry, args, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        self._members[name] = Member(process, ours)

    def messages(self, *, timeout: float) -> Iterator[tuple[str, Any]]:
        """Every value that a child says, with its name, until all ended. `CrewError` if one fails or time is up."""
        until = time.monotonic() + timeout
        while running := self._running():
            if time.monotonic() >= until:
                doing = {name: f"still {member.doing}" for name, member in running.items()}
                raise CrewError(f"the run took more than {timeout:g} seconds", failures=doing)
            yield from self._listen(running, until - time.monotonic())
            if any(member.cause for member in self._members.values()):
                raise self._failure()

    def stop(self) -> None:
        """End every child: asked first, made to after a moment. Returns when all are gone."""
        for member in self._members.values():
            member.process.terminate()
        until = time.monotonic() + GRACE
        for member in self._members.values():
            member.process.join(max(0.0, until - time.monotonic()))
            member.process.kill()
            member.process.join()
            member.pipe.close()
        self._members.clear()

    def _running(self) -> dict[str, Member]:
        return {name: member for name, member in self._members.items() if not member.ended}

    def _listen(self, running: dict[str, Member], timeout: float) -> Iterator[tuple[str, Any]]:
        ready = set(wait([member.pipe for member in running.values()], timeout))
        for name, member in running.items():
            if member.pipe in ready and (said := _heard(member)) is not None:
                yield name, said

    def _failure(self) -> CrewError:
        until = time.monotonic() + GRACE
        while (running := self._running()) and (left := until - time.monotonic()) > 0:
            for _ in self._listen(running, left):
                pass
        causes = {name: member.cause for name, member in self._members.items() if member.cause}
        killed = {name: cause for name, cause in causes.items() if cause.startswith(_KILLED)}
        return CrewError("a rank failed, and the run with it", failures={**killed, **causes})


_KILLED: Final = "ended"


def _heard(member: Member) -> Any | None:
    """One message off a ready pipe: a value, or None for text, last words and the end."""
    try:
        said = member.pipe.recv()
    except (EOFError, ConnectionError):
        member.ended = True
        member.process.join()
        if member.process.exitcode and not member.cause:
            member.cause = f"{_KILLED} with exit code {member.process.exitcode} while {member.doing}"
        return None
    if isinstance(said, Failed):
        member.cause = f"while {member.doing}: {said.cause}"
        return None
    if isinstance(said, str):
        member.doing = said
        return None
    return said


def _child(entry: Callable[..., None], args: tuple[Any, ...], pipe: Connection) -> None:
    # A terminal sends Ctrl-C to every process of its group; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        entry(*args, pipe.send)
    except BaseException as error:
        pipe.send(Failed(_describe(error)))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _describe(error: BaseException) -> str:
    if isinstance(error, RefitError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


@contextmanager
def signals_exit() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `SystemExit(128 + number)`; later ones can't disturb the cleaning up."""

    def answer(number: int, _: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, answer)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
