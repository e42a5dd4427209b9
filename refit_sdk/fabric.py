"""The door for fabrics, which carry bytes on links and know no names, boxes or plans.

A session connects one `Group` an engine: all sources and the ranks of that engine. Aborting one engine's group leaves
the others as they are. What is posted goes on by itself, also while nobody waits for it: two windows are posted before
the first is waited for. Buffers are 1-D contiguous uint8 tensors that live until the work is waited for. Messages of a
directed pair match in posting order. Both ends of a message give buffers of the same length; a fabric that finds they
don't fails the message (at the latest when its wait runs out), and never writes beyond a buffer.

Errors name the peer that caused them. One pair that breaks leaves the group's other pairs as they are; a wait that runs
out, and `abort`, end the whole group at this process, and what its peers see is a lost connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from attrs import frozen

from refit_sdk.errors import RefitError, RendezvousError, UnsupportedMoveError

if TYPE_CHECKING:
    import torch

    from refit_sdk.transport import Transport


class FabricError(RefitError):
    """Bytes could not be carried. `peer` is the process number at the other end, where one is known to be the cause."""

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Clock(Protocol):
    """Where waiting gets its time from, so that a test can bring its own."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        """Wait on a condition that the caller holds, for at most `timeout` seconds of this clock."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        """Wait on a condition that the caller holds, for at most `timeout` seconds."""
        condition.wait(timeout)


@frozen
class Deadline:
    """A moment on a clock by which a wait must have ended."""

    at: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, *, clock: Clock | None = None) -> Deadline:
        """The deadline `seconds` from now."""
        used = clock or SystemClock()
        return cls(used.monotonic() + seconds, used)

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - self.clock.monotonic())


class KeyValue(Protocol):
    """The small shared table that groups find each other through; it runs on the session's control channel."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        ...

    def get(self, key: str, *, timeout: float) -> bytes:
        """The value, waited for at most `timeout` seconds; `RendezvousError` naming the key after that."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 if unset) and return its new value; stored as ASCII decimal."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys are set."""
        ...

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        ...


def local_host(store: KeyValue) -> str:
    """The address of this host on the way to a session's rendezvous; of a store that doesn't say, loopback."""
    return getattr(store, "local_host", "127.0.0.1")


def check_collectives(fabric: Fabric, transports: Iterable[Transport]) -> None:
    """`UnsupportedMoveError` if a transport's steps are a collective that isn't among the fabric's `collectives`."""
    offered: frozenset[str] = getattr(fabric, "collectives", frozenset())
    for transport in transports:
        need = transport.capabilities.collective
        if need is not None and need not in offered:
            has = ", ".join(sorted(offered)) or "none"
            raise UnsupportedMoveError(
                f"transport {transport.name!r} is one collective step {need!r} a tensor, which the fabric has to "
                f"offer; fabric {fabric.name!r} offers {has}; route those tensors to another transport",
                transport=transport.name,
                need=f"the collective {need!r}",
            )


def roll_call(
    store: KeyValue, *, group: str, members: Sequence[int], process: int, deadline: Deadline, word: bytes = b""
) -> dict[int, bytes]:
    """Say that this process is here, with a word about itself, and wait for the words of all members.

    `FabricError` naming every member that isn't here by the deadline. Keys are `group/here/process`.
    """

    def key(member: int) -> str:
        return f"{group}/here/{member}"

    store.set(key(process), word)
    words = {}
    for member in members:
        try:
            words[member] = store.get(key(member), timeout=deadline.remaining())
        except RendezvousError as error:
            missing = [m for m in members if m not in words and not store.check([key(m)])] or [member]
            raise FabricError(
                f"group {group!r} is not complete: of its {len(members)} processes, {missing} did not come in time; "
                "see why they didn't start, or raise the deadline",
                peer=missing[0],
            ) from error
    return words


class Work(Protocol):
    """One posted send or receive. If it has `touched`, that says whether a receive's buffer may have been written."""

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds. A second
        wait tells the same at once."""
        ...


class Group(Protocol):
    """Connected processes. `peer` is always a world number. `abort` may be called from any thread.

    `devices` are the types of the devices whose memory the group reads and writes (`"cpu"`, `"cuda"`). A group whose
    links differ also has `links`, a dict from (sender, receiver) to a few words on what serves that link. A group that
    has `scatters`, and it is true, also takes `refit_sdk.runs.Runs` in place of a buffer, whose bytes on the host it
    gathers and scatters itself. One that begins all that was posted for a window at once has `flush`, which is called
    after the last of them; a wait begins what was posted before, too.
    """

    devices: ClassVar[frozenset[str]]

    def send(self, buffer: torch.Tensor, *, peer: int) -> Work:
        """Start sending; `FabricError` if the group was aborted or the peer is gone."""
        ...

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Work:
        """Start receiving exactly the buffer's length."""
        ...

    def abort(self, reason: str) -> None:
        """End every pending and later operation with a `FabricError` that gives the reason. Returns at once."""
        ...

    def close(self) -> None:
        """Free sockets, threads and memory. Nothing may be pending. A second call does nothing."""
        ...


def scatters(group: Group) -> bool:
    """Whether a group takes runs in place of buffers."""
    return bool(getattr(group, "scatters", False))


def within_process(fabric: Fabric | type[Fabric]) -> bool:
    """Whether a fabric joins only threads of one process."""
    return bool(getattr(fabric, "within_process", False))


def flush(group: Group) -> None:
    """All of a window are posted: a group that begins windows as a whole begins this one. Returns at once."""
    begin = getattr(group, "flush", None)
    if begin is not None:
        begin()


def serves(group: Group, link: tuple[int, int], *, otherwise: str) -> str:
    """What serves a link (sender, receiver) of a group: what the group says, or its fabric's name."""
    links: Mapping[tuple[int, int], str] = getattr(group, "links", {})
    return links.get(link, otherwise)


@runtime_checkable
class Fabric(Protocol):
    """A way to carry bytes. Constructed without arguments, or with those that the user gave in `fabric=`.

    One that joins only threads of one process says so by an attribute `within_process` that is true.
    One whose groups have collectives of their own names them in `collectives`, a frozenset.
    """

    name: ClassVar[str]

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here and what to install, or None if it can."""
        ...

    def connect(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float) -> Group:
        """Connect this process to the others of a group; all members call it, each with the same `group` and `members`.

        `group` is unique for (session, epoch, engine). `members` are world numbers in ascending order.
        """
        ...
