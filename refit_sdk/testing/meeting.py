"""Where the ranks of a test find each other, and who runs them: processes that live through many cases, or threads.

A body is a function `body(rank, *args)` at the top of a module, where processes find it. What it returns is its
outcome, and so is what it raises, as a `Failure`.

>>> runs = Threads()
>>> runs.outcomes([(lambda rank, word: word.upper(), ("a",)), (lambda rank: 1 / 0, ())])[1].kind
'ZeroDivisionError'
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch.distributed
from attrs import define, field

from refit_sdk.errors import RendezvousError
from refit_sdk.fabric import Deadline
from refit_sdk.testing.crew import Crew, Job, crew
from refit_sdk.testing.ranks import Failure, details

__all__ = ["Players", "Processes", "Table", "Threads", "host_table"]

PATIENCE = 30.0
"""Seconds that a rank waits for another, and a test for a rank."""

_tcp_store: Any = getattr(torch.distributed, "TCPStore")  # noqa: B009  torch doesn't say that it exports it
_clients: dict[int, Any] = {}
_connecting = threading.Lock()


class Table:
    """The shared table that groups find each other through: torch's own server, on loopback."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    @classmethod
    def at(cls, port: int, *, prefix: str) -> Table:
        """A client of a server of this host, one for all of this process: connecting now and then takes seconds.

        Keys of other prefixes aren't seen.
        """
        with _connecting:
            if port not in _clients:
                _clients[port] = _tcp_store("127.0.0.1", port, is_master=False, wait_for_workers=False)
        return cls(_clients[port], prefix)

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str, *, timeout: float) -> bytes:
        """The value, waited for at most `timeout` seconds."""
        deadline = Deadline.after(timeout)
        while not self.check([key]):  # the client's own wait would keep it from all other threads
            if not deadline.remaining():
                raise RendezvousError(f"{key!r} was not set in {timeout:g} s")
            time.sleep(0.001)
        return bytes(self._store.get(self._prefix + key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return int(self._store.add(self._prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def delete(self, key: str) -> bool:
        """Remove a key."""
        return bool(self._store.delete_key(self._prefix + key))

    def meet(self, word: str, count: int, *, timeout: float = PATIENCE) -> None:
        """Wait until `count` have come to a word."""
        if self.add(f"meet/{word}", 1) == count:
            self.set(f"met/{word}", b"1")
        self.get(f"met/{word}", timeout=timeout)


def host_table() -> Any:
    """The server of a table; its `port` is where clients come."""
    return _tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Players(Protocol):
    """Who runs the ranks of a case."""

    def outcomes(self, jobs: Sequence[Job], *, lost: Sequence[int] = ()) -> list[Any]:
        """What each body returned, or its `Failure`; None for those that were to be `lost`."""
        ...

    def close(self) -> None:
        """End them."""
        ...


@define(eq=False)
class Processes:
    """At most `size` processes, started when they are first needed; others where some are to be lost."""

    size: int
    _crew: Crew | None = None
    _stack: ExitStack = field(factory=ExitStack)

    def outcomes(self, jobs: Sequence[Job], *, lost: Sequence[int] = ()) -> list[Any]:
        """What each body returned, or its `Failure`; None for those that were to be `lost`."""
        if lost:
            with crew(len(jobs)) as doomed, doomed.at_work(jobs) as ranks:
                return [None if number in lost else rank.outcome() for number, rank in enumerate(ranks)]
        if self._crew is None:
            self._crew = self._stack.enter_context(crew(self.size))
        return self._crew.outcomes(jobs)

    def close(self) -> None:
        """End the processes, those that are stopped too."""
        self._stack.close()
        self._crew = None


class Threads:
    """A thread each, in this process."""

    def outcomes(self, jobs: Sequence[Job], *, lost: Sequence[int] = ()) -> list[Any]:
        """What each body returned, or its `Failure`; None for those that were to be `lost`."""
        found: list[Any] = [None] * len(jobs)

        def one(number: int) -> None:
            body, args = jobs[number]
            try:
                found[number] = body(None, *args)
            except BaseException as error:  # noqa: BLE001 - a rank's failure is the test's to judge
                found[number] = Failure(type(error).__name__, str(error), traceback.format_exc(), details(error))

        started = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(jobs))]
        for thread in started:
            thread.start()
        for number, thread in enumerate(started):
            thread.join(PATIENCE)
            raised = [each.trace for each in found if isinstance(each, Failure) and each.kind != "Gone"]
            assert not thread.is_alive(), "\n".join((f"rank {number} said nothing for {PATIENCE:g} s", *raised))
        return [None if number in lost else outcome for number, outcome in enumerate(found)]

    def close(self) -> None:
        """Nothing is kept."""
