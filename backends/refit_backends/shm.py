"""Fabric `shm`: CPU tensors between processes of one host, through memory that they share.

1. Find who shares this host, and connect to each by a Unix socket (`shm_meeting`). All members must.
2. One thread a group sleeps until something is posted or said, and then copies chunk by chunk, each peer in turn
   (`shm_link`), so that bytes move while the caller packs and unpacks.
3. `abort`, and a wait that runs out, tell that thread, which ends all that is pending after the chunk it is at.

Where the kernel lets the receiver read the sender's memory (tried at connecting), a message is one copy, else two.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import torch
from attrs import define, field

from refit_backends.shm_link import Kind, Link, Lost, Operation
from refit_backends.shm_meeting import Met, Peer, meet
from refit_backends.shm_memory import RING_NBYTES, Reader, check_room
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue
from refit_sdk.hookspecs import hookimpl

ONE_COPY: Final = "shm (one copy)"
TWO_COPIES: Final = "shm"


@define(eq=False)
class ShmGroup:
    """One process's end of a group. A group without peers has no thread.

    `_lock` guards what the caller's threads and the group's own both touch: `_posted` and `_ended`.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    _members: tuple[int, ...]
    _process: int
    _links: dict[int, Link] = field(factory=dict, init=False)
    _by_descriptor: dict[int, Link] = field(factory=dict, init=False)
    _posted: deque[Operation] = field(factory=deque, init=False)
    _ended: FabricError | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _reader: Reader = field(factory=Reader, init=False)
    _wake: int = field(default=-1, init=False)
    _poll: select.epoll | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @classmethod
    def over(
        cls, peers: Mapping[int, Peer], *, members: Sequence[int], process: int, directory: str | None
    ) -> ShmGroup:
        """A group on connections that are made; it takes them over."""
        group = cls(tuple(members), process)
        if peers:
            group._start(peers, directory)
        return group

    def _start(self, peers: Mapping[int, Peer], directory: str | None) -> None:
        self._poll, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        for member, peer in peers.items():
            self._links[member] = Link(
                self._process, member, peer.socket, peer.pid, peer.readable, peer.reads, directory,
                self._reader, self._wants_room,
            )  # fmt: skip
            self._by_descriptor[peer.socket.fileno()] = self._links[member]
            self._poll.register(peer.socket, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="refit-shm", daemon=True)
        self._thread.start()

    @property
    def links(self) -> dict[tuple[int, int], str]:
        """How bytes of each link of this process travel: `shm (one copy)` or `shm`, by (sender, receiver)."""
        found = {}
        for peer, link in self._links.items():
            found[self._process, peer] = ONE_COPY if link.reads else TWO_COPIES
            found[peer, self._process] = ONE_COPY if link.readable else TWO_COPIES
        return found

    @property
    def ended(self) -> FabricError | None:
        """Why the whole group has ended at this process, or None."""
        return self._ended

    def send(self, buffer: torch.Tensor, *, peer: int) -> Operation:
        """Start sending. The work ends when the peer has the bytes."""
        return self._post("send", buffer, peer)

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Operation:
        """Start receiving exactly the buffer's length."""
        return self._post("recv", buffer, peer)

    def _post(self, kind: Kind, buffer: torch.Tensor, peer: int) -> Operation:
        operation = Operation(kind, peer, buffer, self._give_up)
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
        if self._thread is not None:
            self._thread.join()
            with self._lock:
                self._thread = None
                os.close(self._wake)
            assert self._poll is not None
            self._poll.close()
            self._reader.close()

    def _serve(self) -> None:
        try:
            while self._ended is None:
                self._take_posted()
                busy = [link for link in self._links.values() if self._guarded(link, link.step)]
                self._listen(0 if busy else None)
        finally:
            self._end(FabricError(f"the shared memory of process {self._process} failed; its error is on stderr"))
            self._end_links()

    def _take_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
        for operation in posted:
            self._links[operation.peer].post(operation)

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

    def _wants_room(self, link: Link, wants: bool) -> None:
        assert self._poll is not None
        self._poll.modify(link.socket, select.EPOLLIN | (select.EPOLLOUT if wants else 0))

    def _end_links(self) -> None:
        error = self._ended
        assert error is not None
        for link in self._links.values():
            link.end(error)
        self._take_posted()


class ShmFabric:
    """Shared memory between all processes of a group, which must share a host. `host` overrides REFIT_HOST, which
    states the host instead of having it found. `one_copy=False` leaves peers' memory alone. Segments are memfds, or
    unnamed files in `directory`.

    >>> ShmFabric(host="rack-3").name
    'shm'
    """

    name: ClassVar[str] = "shm"

    def __init__(self, *, host: str | None = None, one_copy: bool = True, directory: str | None = None) -> None:
        self._host = host
        self._one_copy = one_copy
        self._directory = directory

    @classmethod
    def missing(cls) -> str | None:
        """None, or that this isn't Linux."""
        return None if sys.platform == "linux" else f"it needs Linux, this is {sys.platform}; use fabric 'gloo'"

    def meet(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, deadline: Deadline) -> Met:
        """Find and connect the members that share this host."""
        check_room(RING_NBYTES, directory=self._directory)
        return meet(
            group=group,
            members=members,
            process=process,
            store=store,
            deadline=deadline,
            host=os.environ.get("REFIT_HOST", "") if self._host is None else self._host,
            one_copy=self._one_copy,
            directory=self._directory,
        )

    def over(self, met: Met, *, members: Sequence[int], process: int) -> ShmGroup:
        """The group of those that were met."""
        return ShmGroup.over(met.peers, members=members, process=process, directory=self._directory)

    def connect(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float) -> ShmGroup:
        """Connect to all members. `FabricError` naming who doesn't come, or those that are on different hosts."""
        if len(members) == 1:
            return ShmGroup(tuple(members), process)
        met = self.meet(group=group, members=members, process=process, store=store, deadline=Deadline.after(timeout))
        if met.apart:
            for peer in met.peers.values():
                peer.socket.close()
            why = met.why_apart(met.apart[0])
            raise FabricError(
                f"fabric shm joins processes of one host only, and {len(met.apart)} pairs of group {group!r} share "
                f"none: {why}; use fabric 'mixed', which takes gloo between hosts",
                peer=next((peer for pair in met.apart if process in pair for peer in pair if peer != process), None),
            )
        return self.over(met, members=members, process=process)


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [ShmFabric]
