"""How processes of one host find each other: not by names, which lie, but by opening what the other made.

1. Each listens on an abstract Unix socket, which leaves nothing in any file system, and makes a nonce segment. Its word
   in the roll call has the socket's name, the nonce, and where the nonce also is in its own memory.
2. Each dials the members below it, shows the nonce that only the roll call could tell it, and hands its segment over.
3. Each says whom it dialled, takes those calls, opens the segments, and says whose nonce it found there: these share a
   host with it. So all know of all pairs, and agree on what serves them.
4. Both ends of a pair try to read the nonce in the other's memory, and tell.

A stated host (REFIT_HOST) overrides: two stated names that differ are two hosts, two that are equal must be one.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import msgspec
from attrs import define, frozen

from refit_backends.shm_memory import can_read, reserve
from refit_sdk.fabric import Deadline, FabricError, KeyValue, roll_call

NONCE_NBYTES: Final = 16
_GREETING: Final = struct.Struct(f"<{NONCE_NBYTES}sQ")
_ASK_SECONDS: Final = 0.25
"""How often who waits for calls asks whether the session is still there."""

_PATIENCE: Final = 5.0
"""Seconds for which somebody who dialled may say nothing."""


class Word(msgspec.Struct, frozen=True):
    """What a process says of itself. `host` is what was stated; `address` is where its nonce is in its memory."""

    host: str
    name: str
    nonce: str
    address: int

    def shares(self, other: Word) -> bool | None:
        """Whether two share a host by what they state; None if only trying can tell.

        >>> a, b, unstated = (Word(host, "", "", 0) for host in ("a", "b", ""))
        >>> a.shares(a), a.shares(b), a.shares(unstated)
        (True, False, None)
        """
        return self.host == other.host if self.host and other.host else None


@frozen(eq=False)
class Peer:
    """A process of this host. `readable`: this one may read its memory; `reads`: it may read this one's."""

    socket: socket.socket
    pid: int
    readable: bool
    reads: bool


@frozen(eq=False)
class Met:
    """Who shares this host, connected, and all pairs of the group that don't share one."""

    peers: dict[int, Peer]
    apart: tuple[tuple[int, int], ...]
    words: dict[int, Word]

    def part(self) -> None:
        """Close all connections."""
        for peer in self.peers.values():
            peer.socket.close()

    def why_apart(self, pair: tuple[int, int]) -> str:
        """What is known of a pair that shares no host."""
        one, other = (self.words[member] for member in pair)
        if one.shares(other) is False:
            return f"REFIT_HOST is {one.host!r} at process {pair[0]} and {other.host!r} at process {pair[1]}"
        return f"process {pair[1]} can't open what process {pair[0]} made"


@define(eq=False)
class _Own:
    """What this process shows the others."""

    listener: socket.socket
    segment: int
    nonce: bytes
    copy: ctypes.Array[ctypes.c_char]
    word: Word


@contextmanager
def _own(host: str, backlog: int, directory: str | None) -> Iterator[_Own]:
    nonce, name = secrets.token_bytes(NONCE_NBYTES), f"refit-{os.getpid()}-{secrets.token_hex(16)}"
    copy = ctypes.create_string_buffer(nonce, NONCE_NBYTES)
    word = Word(host, name, nonce.hex(), ctypes.addressof(copy))
    segment = reserve(NONCE_NBYTES, directory=directory)
    try:
        os.pwrite(segment, nonce, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")
            listener.listen(backlog)
            yield _Own(listener, segment, nonce, copy, word)
    finally:
        os.close(segment)


def meet(
    *,
    group: str,
    members: Sequence[int],
    process: int,
    store: KeyValue,
    deadline: Deadline,
    host: str,
    one_copy: bool,
    directory: str | None,
) -> Met:
    """Find who shares this host. `FabricError` names who doesn't come, and hosts that are stated equal and aren't."""

    def call(step: str, word: bytes) -> dict[int, bytes]:
        name = f"{group}/shm{step}"
        return roll_call(store, group=name, members=members, process=process, deadline=deadline, word=word)

    with _own(host, len(members), directory) as own, ExitStack() as unless_met:
        told = call("", msgspec.json.encode(own.word))
        words = {member: msgspec.json.decode(word, type=Word) for member, word in told.items()}
        sockets = _dial(own, words, process, deadline)
        unless_met.callback(_close_all, sockets)
        dialled = call("/dialled", _encode(sockets))
        callers = [member for member, word in dialled.items() if process in _decode(word)]
        _take_calls(own, words, callers, deadline, store=store, into=sockets)
        found = {m: _decode(word) for m, word in call("/found", _encode(m for m in callers if m in sockets)).items()}
        apart = tuple((a, b) for a in members for b in members if a < b and b not in found[a])
        _refuse_misstated(apart, words)
        for member in list(sockets):
            if (min(member, process), max(member, process)) in apart:
                sockets.pop(member).close()
        peers = _try_reading(sockets, words, deadline, one_copy=one_copy)
        unless_met.pop_all()
        return Met(peers, apart, words)


def _close_all(sockets: dict[int, socket.socket]) -> None:
    for made in sockets.values():
        made.close()


def _encode(members: Iterator[int] | dict[int, socket.socket]) -> bytes:
    return msgspec.json.encode(sorted(members))


def _decode(word: bytes) -> frozenset[int]:
    return frozenset(msgspec.json.decode(word, type=list[int]))


def _refuse_misstated(apart: Sequence[tuple[int, int]], words: dict[int, Word]) -> None:
    for a, b in apart:
        if words[a].shares(words[b]):
            raise FabricError(
                f"REFIT_HOST is {words[a].host!r} at processes {a} and {b}, but {b} can't open what {a} made: state "
                "different hosts, or let them share a network namespace",
                peer=b,
            )


def _dial(own: _Own, words: dict[int, Word], process: int, deadline: Deadline) -> dict[int, socket.socket]:
    """Connect to the members below that may share this host; those that can be."""
    found = {}
    for member, word in words.items():
        if member < process and own.word.shares(word) is not False:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.settimeout(max(0.001, deadline.remaining()))
                made.connect(f"\0{word.name}")
                greeting = _GREETING.pack(bytes.fromhex(word.nonce), process)
                socket.send_fds(made, [greeting], [own.segment])
                found[member] = made
            except OSError:
                made.close()  # another kernel, or another network namespace: the pair is served otherwise
    return found


def _take_calls(
    own: _Own,
    words: dict[int, Word],
    callers: Sequence[int],
    deadline: Deadline,
    *,
    store: KeyValue,
    into: dict[int, socket.socket],
) -> None:
    """Add the connections of those who dialled and whose segment could be opened."""
    waiting = set(callers)
    while waiting:
        try:
            store.check([])  # an error if the session has ended meanwhile
            own.listener.settimeout(max(0.001, min(deadline.remaining(), _ASK_SECONDS)))
            made, _ = own.listener.accept()
        except TimeoutError:
            if deadline.remaining():
                continue
            raise FabricError(
                f"processes {sorted(waiting)} of this host dialled and didn't get through", peer=min(waiting)
            ) from None
        caller, nonce = _hear(made, own, min(_PATIENCE, deadline.remaining()))
        waiting.discard(caller)
        if caller in callers and nonce == bytes.fromhex(words[caller].nonce):
            into[caller] = made
        else:
            made.close()


def _hear(made: socket.socket, own: _Own, seconds: float) -> tuple[int, bytes]:
    """Who dialled, and the nonce in its segment; (-1, b"") for a stranger."""
    fds: list[int] = []
    try:
        made.settimeout(max(0.001, seconds))
        said, fds, _, _ = socket.recv_fds(made, _GREETING.size, 1)
        shown, caller = _GREETING.unpack(said)
        if not secrets.compare_digest(shown, own.nonce):
            return -1, b""
        return caller, os.pread(fds[0], NONCE_NBYTES, 0) if fds else b""
    except (OSError, struct.error):
        return -1, b""
    finally:
        for fd in fds:
            os.close(fd)


def _try_reading(
    sockets: dict[int, socket.socket], words: dict[int, Word], deadline: Deadline, *, one_copy: bool
) -> dict[int, Peer]:
    pids = {member: _pid(made) for member, made in sockets.items()}
    readable = {
        member: one_copy and can_read(pids[member], words[member].address, bytes.fromhex(words[member].nonce))
        for member in sockets
    }
    for member, made in sockets.items():
        with suppress(OSError):
            made.sendall(b"\1" if readable[member] else b"\0")
    return {m: Peer(made, pids[m], readable[m], _told(made, m, deadline)) for m, made in sockets.items()}


def _told(made: socket.socket, member: int, deadline: Deadline) -> bool:
    try:
        made.settimeout(max(0.001, deadline.remaining()))
        answer = made.recv(1)
    except OSError as error:
        raise FabricError(f"lost process {member} while connecting to it: {error}", peer=member) from error
    if not answer:
        raise FabricError(f"lost process {member} while connecting to it: it closed the connection", peer=member)
    made.setblocking(False)
    return answer == b"\1"


def _pid(made: socket.socket) -> int:
    """The process id at the other end as this process sees it; 0 if it doesn't."""
    credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
