"""Real processes that are ranks of a session: started, told to go on, killed and stopped by a test, and heard.

A body is a module-level function `body(rank: Rank, *args)`. What it returns is the rank's result; what it raises is
kept as text. Processes wait on events, never on sleeps.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from attrs import define, field

PATIENCE = 60.0
"""Seconds that a test waits for a rank to say something before it gives up."""


def context() -> Any:
    """Processes from a server that has torch loaded: a rank starts in hundredths of a second."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["torch", "torch._dynamo", "refit_sdk.session", "refit_sdk.controller"])
    return made


def free_rendezvous(host: str = "127.0.0.1") -> str:
    """An address with a port that nobody has now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind(socket.getaddrinfo(host, 0, family, socket.SOCK_STREAM)[0][4])
        port = sock.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@define
class Rank:
    """A body's end: its number among all processes of the test, and the pipe to the test."""

    number: int
    pipe: Connection

    def tell(self, event: str, value: Any = None) -> None:
        """Say that something has happened."""
        self.pipe.send(("event", event, value))

    def wait(self, word: str) -> None:
        """Wait until the test says this word."""
        said = self.pipe.recv()
        assert said == word, f"waited for {word!r}, was told {said!r}"

    def meet(self, event: str) -> None:
        """Say that something has happened, and wait until the test says to go on."""
        self.tell(event)
        self.wait(event)


def _run(number: int, pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(("result", None, body(Rank(number, pipe), *args)))
    except BaseException as error:  # noqa: BLE001 - a rank's failure is the test's to judge
        pipe.send(("error", type(error).__name__, (str(error), traceback.format_exc(), details(error))))


def details(error: BaseException) -> dict[str, Any]:
    """The attributes of a `RefitError`, by name."""
    names = ("failures", "engines", "violations", "transport", "need")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


@define
class Failure:
    """What a rank raised: the class's name, its text, its traceback, and the attributes of a `RefitError`."""

    kind: str
    text: str
    trace: str
    details: dict[str, Any]


@define(eq=False)
class Process:
    """The test's end of one rank."""

    process: Any
    pipe: Connection
    seconds: float = 0.0
    _ended: bool = False
    _begun: float = field(factory=time.monotonic)

    def expect(self, event: str, *, timeout: float = PATIENCE) -> Any:
        """Wait until the rank tells this event, and take its value."""
        kind, name, value = self._hear(timeout)
        assert (kind, name) == ("event", event), f"waited for {event!r}, heard {kind} {name}: {value}"
        return value

    def go(self, word: str) -> None:
        """Say a word that the rank waits for."""
        self.pipe.send(word)

    def result(self, *, timeout: float = PATIENCE) -> Any:
        """The body's result. What it raised fails the test."""
        outcome = self.outcome(timeout=timeout)
        assert not isinstance(outcome, Failure), outcome.trace
        return outcome

    def failure(self, *, timeout: float = PATIENCE) -> Failure:
        """What the body raised. A result fails the test."""
        outcome = self.outcome(timeout=timeout)
        assert isinstance(outcome, Failure), f"expected an error, got {outcome!r}"
        return outcome

    def outcome(self, *, timeout: float = PATIENCE) -> Any:
        """The result, or the `Failure`."""
        while True:
            kind, name, value = self._hear(timeout)
            if kind == "event":
                continue
            self.seconds, self._ended = time.monotonic() - self._begun, True
            return value if kind == "result" else Failure(name, *value)

    def _hear(self, timeout: float) -> tuple[str, Any, Any]:
        assert self.pipe.poll(timeout), f"rank process {self.process.pid} said nothing for {timeout:g} s"
        try:
            heard: tuple[str, Any, Any] = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"rank process {self.process.pid} is gone") from None
        return heard

    def kill(self) -> None:
        """Kill it with signal 9 and wait until it's gone."""
        self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)

    def signal(self, number: int) -> None:
        """Send a signal: SIGSTOP, SIGCONT, SIGTERM."""
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """See that it's gone: a body that has ended may leave by itself."""
        if self._ended:
            self.process.join(2.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def start(started: list[Process], body: Callable[..., Any], args: tuple[Any, ...]) -> Process:
    """Start one more of the processes that `running` sees to."""
    made = context()
    here, there = made.Pipe()
    process = made.Process(target=_run, args=(len(started), there, body, args))
    process.start()
    there.close()
    started.append(Process(process, here))
    return started[-1]


@contextmanager
def running(bodies: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[list[Process]]:
    """Start a process for each (body, args); whatever happens, none is left."""
    started: list[Process] = []
    try:
        for body, args in bodies:
            start(started, body, args)
        yield started
    finally:
        for each in started:
            each.end()
