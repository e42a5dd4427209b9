"""One thread a group that serves its links: what fabrics of our own share, whatever carries their bytes.

1. Operations are posted by any thread; the group's own thread takes them over and gives each to its peer's link.
2. It sleeps until something is posted, or a socket can be read or written, and then lets each link in turn do one
   bounded step, so that bytes move while the caller packs and unpacks.
3. `abort`, and a wait that runs out, tell that thread, which ends all that is pending after the step it is at.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from attrs import define, field

from refit_sdk.fabric import FabricError
from refit_sdk.runs import Runs

Kind = Literal["send", "recv"]


class Lost(Exception):
    """The link can't go on. The text says why."""


@define(eq=False)
class Operation:
    """One posted send or receive. `give_up` is called with the seconds that were waited in vain. `touched`: the buffer
    of a receive may have been written."""

    kind: Kind
    peer: int
    runs: Runs
    give_up: Callable[[Operation, float], None]
    nbytes: int = field(init=False)
    moved: int = field(default=0, init=False)
    touched: bool = field(default=False, init=False)
    error: FabricError | None = field(default=None, init=False)
    ended: threading.Event = field(factory=threading.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.nbytes = self.runs.nbytes

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds."""
        if not self.ended.wait(timeout):
            self.give_up(self, timeout)
            self.ended.wait()
        if self.error is not None:
            raise FabricError(str(self.error), peer=self.error.peer)
        return self.nbytes

    def end(self, error: FabricError | None = None) -> None:
        """It has ended, well or not."""
        self.error = error
        self.ended.set()


def mismatch(sender: int, nbytes: int, receiver: int, found: int) -> str:
    """What a message says that has another length than its receive."""
    here = f"process {sender} sends {nbytes} bytes where process {receiver} receives {found}"
    return f"{here}: the two run different programs"


def hang_up(connection: socket.socket) -> None:
    """Close a connection for everybody who has it: a child that was forked since has a copy, which keeps it open."""
    with suppress(OSError):  # the peer may have gone first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Link(Protocol):
    """The pair of this process and a peer. Only the group's thread calls it."""

    peer: int
    socket: socket.socket
    lost: FabricError | None

    def post(self, operation: Operation) -> None:
        """Take an operation over."""
        ...

    def step(self) -> bool:
        """Move a bounded number of bytes; whether any were. `Lost` if it can't go on."""
        ...

    def hear(self) -> None:
        """The socket has something to read, or its peer is gone. `Lost` if it can't go on."""
        ...

    def has_room(self) -> None:
        """The socket takes bytes again. `Lost` if it can't go on."""
        ...

    def end(self, error: FabricError) -> None:
        """Hang up, and only then end all that is pending. Nothing is copied any more. A second call does nothing."""
        ...


Listen = Callable[[Any, int], None]
"""Called by a link with itself and the events of epoll that it wants to be called for."""


@define(eq=False)
class LinkGroup:
    """One process's end of a group. A group without peers has no thread.

    `words` say what serves the links of this process, by (sender, receiver). `_lock` guards what the caller's threads
    and the group's own both touch: `_posted` and `_ended`.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    scatters: ClassVar[bool] = True
    _members: tuple[int, ...]
    _process: int
    _links: dict[int, Link] = field(factory=dict, init=False)
    _words: dict[tuple[int, int], str] = field(factory=dict, init=False)
    _by_descriptor: dict[int, Link] = field(factory=dict, init=False)
    _posted: deque[Operation] = field(factory=deque, init=False)
    _ended: FabricError | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _closers: list[Callable[[], None]] = field(factory=list, init=False)
    _wake: int = field(default=-1, init=False)
    _poll: select.epoll | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @classmethod
    def over(
        cls,
        make: Callable[[Listen], Sequence[Link]],
        *,
        members: Sequence[int],
        process: int,
        words: Mapping[tuple[int, int], str],
        on_close: Callable[[], None] = lambda: None,
    ) -> Self:
        """A group on links whose connections are made; it takes them over. `on_close` is called after its thread
        ended."""
        group = cls(tuple(members), process)
        group._words.update(words)
        group._closers.append(on_close)
        links = make(group._listen_for)
        if links:
            group._start(links)
        return group

    def _start(self, links: Sequence[Link]) -> None:
        self._poll, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        for link in links:
            self._links[link.peer] = self._by_descriptor[link.socket.fileno()] = link
            self._poll.register(link.socket, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="refit-links", daemon=True)
        self._thread.start()

    @property
    def links(self) -> dict[tuple[int, int], str]:
        """What carries the bytes of each link of this process, by (sender, receiver)."""
        return dict(self._words)

    @property
    def ended(self) -> FabricError | None:
        """Why the whole group has ended at this process, or None."""
        return self._ended

    def send(self, buffer: torch.Tensor | Runs, *, peer: int) -> Operation:
        """Start sending. The buffer may change when the work has ended."""
        return self._post("send", buffer, peer)

    def recv(self, buffer: torch.Tensor | Runs, *, peer: int) -> Operation:
        """Start receiving exactly the buffer's length."""
        return self._post("recv", buffer, peer)

    def _post(self, kind: Kind, buffer: torch.Tensor | Runs, peer: int) -> Operation:
        runs = buffer if isinstance(buffer, Runs) else Runs.of([buffer])
        operation = Operation(kind, peer, runs, self._give_up)
        with self._lock:
            error = self._ended or self._link(peer).lost
            if error is not None:
                raise FabricError(str(error), peer=error.peer)
            self._posted.append(operation)
            os.eventfd_write(self._wake, 1)
        return operation

    def _link(self, peer: int) -> Link:
        if peer not in self._links:
            raise FabricError(f"process {self._process} can't reach process {peer} in the group of {[*self._members]}")
        return self._links[peer]

    def _give_up(self, operation: Operation, seconds: float) -> None:
        verb = "take" if operation.kind == "send" else "send"
        reason = f"waited up to {seconds:g} s for process {operation.peer} to {verb} {operation.nbytes} bytes"
        self._end(FabricError(reason, peer=operation.peer))

    def abort(self, reason: str) -> None:
        """End every pending and later operation with a `FabricError` that gives the reason. Returns at once."""
        self._end(FabricError(reason))

    def _end(self, error: FabricError) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = error
                if self._thread is not None:
                    os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Hang up, and free sockets, thread and memory. A second call does nothing."""
        self._end(FabricError(f"process {self._process} closed its group of {list(self._members)}"))
        with self._lock:
            thread, self._thread = self._thread, None
            closers, self._closers = self._closers, []
        if thread is not None:
            thread.join()
            os.close(self._wake)
            assert self._poll is not None
            self._poll.close()
        for close in closers:
            close()

    def _serve(self) -> None:
        try:
            while self._ended is None:
                self._take_posted()
                busy = [link for link in self._links.values() if self._guarded(link, link.step)]
                self._listen(0 if busy else None)
        finally:
            self._end(FabricError(f"a group's thread of process {self._process} failed; its error is on stderr"))
            self._end_links()

    def _take_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
        for operation in posted:
            link = self._links[operation.peer]
            if link.lost is not None:
                operation.end(link.lost)
            else:
                link.post(operation)

    def _listen(self, seconds: float | None) -> None:
        assert self._poll is not None
        for descriptor, events in self._poll.poll(seconds):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            link = self._by_descriptor[descriptor]
            if events & select.EPOLLOUT:
                self._guarded(link, link.has_room)
            if events & ~select.EPOLLOUT:
                self._guarded(link, link.hear)

    def _guarded(self, link: Link, do: Callable[[], bool | None]) -> bool:
        """Do something with a link that isn't lost; whether it says that it did. A link that breaks is ended."""
        if link.lost is not None:
            return False
        try:
            return bool(do())
        except Lost as error:
            link.end(FabricError(f"lost process {link.peer}: {error}", peer=link.peer))
        except FabricError as error:
            link.end(FabricError(str(error), peer=link.peer))
        return False

    def _listen_for(self, link: Link, events: int) -> None:
        assert self._poll is not None
        self._poll.modify(link.socket, events)

    def _end_links(self) -> None:
        error = self._ended
        assert error is not None
        for link in self._links.values():
            link.end(error)
        self._take_posted()
