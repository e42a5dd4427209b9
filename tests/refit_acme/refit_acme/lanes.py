"""A fabric: threads of one process, that meet at a hub and copy from buffer to buffer."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from attrs import define, field

from refit_sdk.fabric import Deadline, FabricError, KeyValue, roll_call
from refit_sdk.hookspecs import hookimpl


@define(eq=False)
class _Hub:
    """What the ends of a group share: messages that wait for their other end, and why members have left."""

    changed: threading.Condition = field(factory=threading.Condition)
    waiting: defaultdict[tuple[str, int, int], deque[_Work]] = field(factory=lambda: defaultdict(deque))
    left: dict[int, str] = field(factory=dict)


@define(eq=False)
class _Work:
    """A send or a receive; done when both are there."""

    end: Lane
    peer: int
    buffer: torch.Tensor
    done: bool = False
    wrong: str = ""

    def wait(self, timeout: float) -> int:
        """The bytes carried, or why not."""
        left, me = self.end.hub.left, self.end.process
        with self.end.hub.changed:
            self.end.hub.changed.wait_for(lambda: self.done or self.wrong or me in left or self.peer in left, timeout)
            if self.done:
                return self.buffer.numel()
            if self.wrong or me in left:
                raise FabricError(self.wrong or left[me], peer=self.peer)
            if self.peer in left:
                raise FabricError(f"process {self.peer} is gone: {left[self.peer]}", peer=self.peer)
        reason = f"waited {timeout:g} s for process {self.peer}, for {self.buffer.numel()} bytes"
        self.end.abort(reason)
        raise FabricError(reason, peer=self.peer)


@define(eq=False)
class Lane:
    """One member's end of a group."""

    hub: _Hub
    process: int
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def send(self, buffer: torch.Tensor, *, peer: int) -> _Work:
        """Start sending."""
        return self._post("send", "recv", (self.process, peer), _Work(self, peer, buffer))

    def recv(self, buffer: torch.Tensor, *, peer: int) -> _Work:
        """Start receiving."""
        return self._post("recv", "send", (peer, self.process), _Work(self, peer, buffer))

    def _post(self, kind: str, other: str, link: tuple[int, int], work: _Work) -> _Work:
        with self.hub.changed:
            if self.process in self.hub.left:
                raise FabricError(self.hub.left[self.process])
            if work.peer in self.hub.left:
                raise FabricError(f"process {work.peer} is gone: {self.hub.left[work.peer]}", peer=work.peer)
            if waiting := self.hub.waiting[other, *link]:
                _meet(waiting.popleft(), work, into=work if kind == "recv" else None)
                self.hub.changed.notify_all()
            else:
                self.hub.waiting[kind, *link].append(work)
        return work

    def abort(self, reason: str) -> None:
        """End everything of this end; the first reason stays."""
        with self.hub.changed:
            self.hub.left.setdefault(self.process, reason)
            self.hub.changed.notify_all()

    def close(self) -> None:
        """Leave."""
        self.abort("it closed the group")


def _meet(first: _Work, second: _Work, *, into: _Work | None) -> None:
    receive, send = (second, first) if into is second else (first, second)
    if receive.buffer.numel() == send.buffer.numel():
        receive.buffer.copy_(send.buffer)
        first.done = second.done = True
    else:
        first.wrong = second.wrong = f"{send.buffer.numel()} bytes were sent, {receive.buffer.numel()} expected"


_hubs: WeakValueDictionary[str, _Hub] = WeakValueDictionary()
_numbers = itertools.count()


class Lanes:
    """Threads of one process."""

    name = "acme"
    within_process = True

    @classmethod
    def missing(cls) -> str | None:
        """Nothing is needed."""
        return None

    def connect(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float) -> Lane:
        """Meet the others at the hub that the first of them made."""
        deadline = Deadline.after(timeout)
        hub = _Hub()
        if process == min(members):
            number = f"{os.getpid()}/{next(_numbers)}"
            _hubs[number] = hub
            store.set(f"{group}/acme", number.encode())
        roll_call(store, group=group, members=members, process=process, deadline=deadline)
        number = store.get(f"{group}/acme", timeout=deadline.remaining()).decode()
        if number not in _hubs:
            raise FabricError(f"fabric acme joins threads of one process; {number} is in another")
        return Lane(_hubs[number], process)


@hookimpl
def refit_register_fabrics() -> list[type]:
    """The one fabric."""
    return [Lanes]
