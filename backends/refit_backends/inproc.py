"""Fabric `inproc`: the "processes" are threads of one process, and a message is one copy.

It is strict where real fabrics are lenient, so that what works here doesn't lean on luck: a send ends only when its
receive was posted, and the bytes are read then, not before. Waiting goes through a `Clock`: a test can bring its own.

1. The first member to come makes a `_Hub` and puts its number into the store; the others look it up.
2. A posted operation meets the oldest waiting one of the other kind on its directed pair; the second to come copies.
3. A member that aborts, closes or waits too long leaves the hub: what it had pending ends with its reason, and what
   others had pending with it ends with its number.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal
from weakref import WeakValueDictionary

import torch
from attrs import define, field

from refit_sdk.fabric import Clock, Deadline, Fabric, FabricError, KeyValue, SystemClock, roll_call
from refit_sdk.hookspecs import hookimpl

Kind = Literal["send", "recv"]

_hubs: WeakValueDictionary[str, _Hub] = WeakValueDictionary()
_numbers: Iterator[int] = itertools.count()


@define(eq=False)
class _Operation:
    kind: Kind
    process: int
    peer: int
    buffer: torch.Tensor
    done: bool = False
    error: FabricError | None = None

    @property
    def pair(self) -> tuple[int, int]:
        """Who sends and who receives."""
        return (self.process, self.peer) if self.kind == "send" else (self.peer, self.process)

    def end(self, error: FabricError | None = None) -> None:
        self.done, self.error = True, error


@define(eq=False)
class _Hub:
    """Where the members of one group meet. All its state changes under `changed`."""

    clock: Clock
    changed: threading.Condition = field(factory=threading.Condition)
    waiting: dict[tuple[int, int], deque[_Operation]] = field(factory=dict)
    left: dict[int, str] = field(factory=dict)

    def post(self, operation: _Operation) -> None:
        with self.changed:
            self._refuse_if_left(operation)
            queue = self.waiting.setdefault(operation.pair, deque())
            if queue and queue[0].kind != operation.kind:
                _carry(queue.popleft(), operation)
                self.changed.notify_all()
            else:
                queue.append(operation)

    def _refuse_if_left(self, operation: _Operation) -> None:
        if (reason := self.left.get(operation.process)) is not None:
            raise FabricError(reason)
        if (reason := self.left.get(operation.peer)) is not None:
            raise _lost(operation.peer, reason)

    def leave(self, process: int, reason: str) -> None:
        with self.changed:
            if process in self.left:
                return
            self.left[process] = reason
            for pair, queue in self.waiting.items():
                if process in pair:
                    _end_all(queue, process, reason)
            self.changed.notify_all()

    def wait(self, operation: _Operation, timeout: float) -> None:
        deadline = Deadline.after(timeout, clock=self.clock)
        with self.changed:
            while not operation.done and (remaining := deadline.remaining()):
                self.clock.wait(self.changed, remaining)
        if not operation.done:
            reason = f"waited {timeout:g} s for process {operation.peer} to {_counterpart(operation)}"
            self.leave(operation.process, reason)
            operation.error = FabricError(reason, peer=operation.peer)
        if operation.error is not None:
            raise operation.error


def _counterpart(operation: _Operation) -> str:
    verb = "take" if operation.kind == "send" else "send"
    return f"{verb} {operation.buffer.numel()} bytes"


def _lost(process: int, reason: str) -> FabricError:
    return FabricError(f"the connection to process {process} ended: {reason}", peer=process)


def _end_all(queue: deque[_Operation], process: int, reason: str) -> None:
    while queue:
        operation = queue.popleft()
        operation.end(FabricError(reason) if operation.process == process else _lost(process, reason))


def _carry(one: _Operation, other: _Operation) -> None:
    send, recv = (one, other) if one.kind == "send" else (other, one)
    if send.buffer.numel() != recv.buffer.numel():
        message = (
            f"process {send.process} sends {send.buffer.numel()} bytes where process {recv.process} receives "
            f"{recv.buffer.numel()}: the two run different programs"
        )
        send.end(FabricError(message, peer=recv.process))
        recv.end(FabricError(message, peer=send.process))
        return
    with torch.inference_mode():
        recv.buffer.copy_(send.buffer)
    send.end()
    recv.end()


@define(eq=False)
class InprocWork:
    """One posted send or receive."""

    _hub: _Hub
    _operation: _Operation

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds."""
        self._hub.wait(self._operation, timeout)
        return self._operation.buffer.numel()


@define(eq=False)
class InprocGroup:
    """One member's end of a hub."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    _hub: _Hub
    _process: int

    def send(self, buffer: torch.Tensor, *, peer: int) -> InprocWork:
        """Start sending. The work ends when the peer has the bytes."""
        return self._post("send", buffer, peer)

    def recv(self, buffer: torch.Tensor, *, peer: int) -> InprocWork:
        """Start receiving exactly the buffer's length."""
        return self._post("recv", buffer, peer)

    def _post(self, kind: Kind, buffer: torch.Tensor, peer: int) -> InprocWork:
        operation = _Operation(kind, self._process, peer, buffer)
        self._hub.post(operation)
        return InprocWork(self._hub, operation)

    def abort(self, reason: str) -> None:
        """End every pending and later operation of this member with a `FabricError` that gives the reason."""
        self._hub.leave(self._process, reason)

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        self._hub.leave(self._process, f"process {self._process} closed its group")


class InprocFabric:
    """Connects threads that share a `KeyValue`, for tests and for sessions whose two sides live in one process.

    >>> InprocFabric.name, InprocFabric.missing()
    ('inproc', None)
    """

    name: ClassVar[str] = "inproc"
    within_process: ClassVar[bool] = True

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()

    @classmethod
    def missing(cls) -> str | None:
        """None: it needs nothing."""
        return None

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> InprocGroup:
        """Meet the other members at a hub. `FabricError` naming those that don't come within `timeout` seconds."""
        deadline = Deadline.after(timeout, clock=self._clock)
        hub = self._meet(f"{group}/inproc", store, deadline)
        roll_call(store, group=group, members=members, process=process, deadline=deadline)
        return InprocGroup(hub, process)

    def _meet(self, key: str, store: KeyValue, deadline: Deadline) -> _Hub:
        if store.add(f"{key}/comers", 1) == 1:
            hub, number = _Hub(self._clock), f"{os.getpid()}/{next(_numbers)}"
            _hubs[number] = hub
            store.set(f"{key}/hub", number.encode())
            return hub
        number = store.get(f"{key}/hub", timeout=deadline.remaining()).decode()
        try:
            return _hubs[number]
        except KeyError:
            raise FabricError(
                f"hub {number} of {key!r} is not in this process ({os.getpid()}): fabric inproc joins threads of one "
                "process only; use fabric gloo between processes"
            ) from None


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [InprocFabric]
