"""One peer of this host: device memory goes through a ring that its sender filled and its receiver has opened.

1. The sender enqueues a copy into a free slot, and tells of the chunk when the device is through with it.
2. The receiver enqueues a copy out of the slot into its oldest receive; when that is through it says that the slot is
   free, and at the end `DONE`.

Each end waits for its own device only, by asking an event. No stream ever waits for an event of another process: one
that dies would leave it waiting for ever.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from contextlib import suppress
from typing import Final

from attrs import define, field

from refit_backends.cuda_ipc_memory import SLOTS, SharedMemory
from refit_backends.cudart import patiently
from refit_backends.links import Lost, Operation
from refit_backends.records import RecordLink, Tag
from refit_sdk.fabric import Deadline, FabricError

_PAUSE: Final = 20e-6
"""Seconds between two questions to the device."""

DRAIN_SECONDS: Final = 10.0
PARTING_SECONDS: Final = 2.0
"""How long the device may take for what it began, and a peer to close this process's memory, when a link ends."""


@define(eq=False)
class Copying:
    """A copy of a chunk of an operation that the device was given; `event` comes behind it."""

    event: int
    nbytes: int
    operation: Operation


@define(eq=False)
class Streams:
    """A stream for what goes out and one for what comes in, and events, of one device."""

    memory: SharedMemory
    out: int
    into: int
    _events: list[int] = field(factory=list, init=False)
    _all: list[int] = field(factory=list, init=False)

    @classmethod
    def made(cls, memory: SharedMemory) -> Streams:
        """New ones on the memory's device, which is the current one. Events are made here, as that is the device's."""
        streams = cls(memory, memory.cuda.stream(), memory.cuda.stream())
        streams._all.extend(memory.cuda.event() for _ in range(1 + 2 * SLOTS * len(memory.peers)))
        streams._events.extend(streams._all)
        return streams

    def copy(self, into: int, out_of: int, operation: Operation, nbytes: int, stream: int) -> Copying:
        """Enqueue a copy."""
        event = self._events.pop()
        if nbytes:
            self.memory.cuda.copy(into, out_of, nbytes, stream)
        self.memory.cuda.record(event, stream)
        return Copying(event, nbytes, operation)

    def is_done(self, copying: Copying) -> bool:
        """Whether the device is through with it; then its event is free again."""
        if not self.memory.cuda.is_done(copying.event):
            return False
        self._events.append(copying.event)
        return True

    def follow(self, stream: int) -> None:
        """Put what is enqueued from now on behind what another stream was given so far."""
        event = self._events.pop()
        self.memory.cuda.record(event, stream)
        for own in (self.out, self.into):
            self.memory.cuda.wait_for(own, event)
        self._events.append(event)

    def free(self) -> None:
        """Give all back."""
        with self.memory.cuda.on(self.memory.device):
            for stream in (self.out, self.into):
                self.memory.cuda.free_stream(stream)
            for event in self._all:
                self.memory.cuda.free_event(event)


@define(eq=False)
class CudaIpcLink(RecordLink):
    """The pair of this process and a peer."""

    streams: Streams
    _sends: deque[Operation] = field(factory=deque, init=False)
    """Not yet wholly given to the device."""
    _sent: deque[Operation] = field(factory=deque, init=False)
    _recvs: deque[Operation] = field(factory=deque, init=False)
    _taken: int = field(default=0, init=False)
    """Bytes of the oldest receive that the device was given."""
    _incoming: deque[tuple[int, int]] = field(factory=deque, init=False)
    _filling: deque[Copying] = field(factory=deque, init=False)
    _emptying: deque[Copying] = field(factory=deque, init=False)
    _free: int = field(default=SLOTS, init=False)
    _filled: int = field(default=0, init=False)
    _emptied: int = field(default=0, init=False)
    """Slots that were filled and emptied so far, which says what the next one is."""

    def post(self, operation: Operation) -> None:
        """Take an operation over."""
        (self._recvs if operation.kind == "recv" else self._sends).append(operation)

    def step(self) -> bool:
        """Give the device what there is room for, tell of what it is through with; whether it has anything to do."""
        did = [self._tell_filled(), self._fill(), self._tell_emptied(), self._empty()]
        self.flush()
        if any(did):
            return True
        if self._filling or self._emptying:
            time.sleep(_PAUSE)
            return True
        return False

    def _fill(self) -> bool:
        if not self._sends or not self._free:
            return False
        send = self._sends[0]
        chunk = min(self.streams.memory.slot_nbytes, send.nbytes - send.moved)
        slot = self.streams.memory.slot_to(self.peer, self._filled)
        at = (send.runs.address or 0) + send.moved
        self._filling.append(self.streams.copy(slot, at, send, chunk, self.streams.out))
        send.moved += chunk
        self._filled += 1
        self._free -= 1
        if send.moved == send.nbytes:
            self._sent.append(self._sends.popleft())
        return True

    def _tell_filled(self) -> bool:
        if not self._filling or not self.streams.is_done(self._filling[0]):
            return False
        copied = self._filling.popleft()
        self._say(Tag.CHUNK, copied.nbytes, copied.operation.nbytes)
        return True

    def _empty(self) -> bool:
        if not self._recvs or not self._incoming:
            return False
        recv, (chunk, nbytes) = self._recvs[0], self._incoming[0]
        self._match(nbytes, recv)
        if chunk > min(self.streams.memory.slot_nbytes, recv.nbytes - self._taken):
            raise Lost("its records make no sense")
        recv.touched = True
        slot = self.streams.memory.slot_of(self.peer, self._emptied, process=self.process)
        at = (recv.runs.address or 0) + self._taken
        self._emptying.append(self.streams.copy(at, slot, recv, chunk, self.streams.into))
        self._incoming.popleft()
        self._emptied += 1
        self._taken += chunk
        if self._taken == recv.nbytes:
            self._recvs.popleft()
            self._taken = 0
        return True

    def _tell_emptied(self) -> bool:
        if not self._emptying or not self.streams.is_done(self._emptying[0]):
            return False
        copied = self._emptying.popleft()
        recv = copied.operation
        self._say(Tag.FREED)
        recv.moved += copied.nbytes
        if recv.moved == recv.nbytes:
            self._say_done(recv)
        return True

    def _obey(self, tag: int, one: int, other: int, third: int) -> None:
        if tag == Tag.CHUNK and len(self._incoming) + len(self._emptying) < SLOTS:
            self._incoming.append((one, other))
        elif tag == Tag.FREED and self._free < SLOTS:
            self._free += 1
        elif tag == Tag.DONE and self._sent:
            self._sent.popleft().end()
        else:
            RecordLink._obey(self, tag, one, other, third)

    def end(self, error: FabricError) -> None:
        """Wait for the device, close the peer's memory, hang up, end all that is pending; then wait until the peer did
        the same."""
        if self.lost is not None:
            return
        self.lost = error
        pending = {id(each): each for each in (*self._sent, *self._sends, *self._recvs)}
        pending |= {id(copying.operation): copying.operation for copying in (*self._filling, *self._emptying)}
        pending |= {id(recv): recv for _, recv in self._handed}
        copies = [*self._filling, *self._emptying]
        is_idle = patiently(lambda: all(self._is_through(each) for each in copies), Deadline.after(DRAIN_SECONDS))
        if is_idle:
            self.streams.memory.close_of(self.peer)
        with suppress(OSError):  # the peer may have gone first
            self.socket.shutdown(socket.SHUT_WR)
        for operation in pending.values():
            operation.end(error)
        if self._has_left():
            self.streams.memory.still_open.discard(self.peer)
        self._hang_up()

    def _is_through(self, copying: Copying) -> bool:
        try:
            return self.streams.memory.cuda.is_done(copying.event)
        except FabricError:
            return True  # the device itself has failed, and writes nothing any more

    def _has_left(self) -> bool:
        """Whether the peer hung up in time, and so closed this process's memory, or died."""
        deadline = Deadline.after(PARTING_SECONDS)
        try:
            self.socket.setblocking(True)
            while deadline.remaining():
                self.socket.settimeout(max(0.001, deadline.remaining()))
                if not self.socket.recv(1 << 16):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True
        return False
