"""Fabric `tcp`: CPU tensors over TCP, gathered and scattered by the kernel, so that strided views need no packing.

1. Each process listens on its own address, at a port that the system chooses, and makes a nonce. The roll call, which
   only members of the session hear, tells address, port and nonce.
2. Each dials the members below it, and shows the nonce of the one it dials and its own number; who can't is hung up on.
3. Serve all peers by one thread (`links`), call by call (`tcp_link`).

Bytes themselves are not authenticated and not encrypted.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Final

import msgspec
from attrs import define

from refit_backends.links import LinkGroup, Listen
from refit_backends.tcp_link import TcpLink
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue, local_host, roll_call
from refit_sdk.hookspecs import hookimpl

NONCE_NBYTES: Final = 16
GREETING: Final = struct.Struct(f"<{NONCE_NBYTES}sQ")
ASK_SECONDS: Final = 0.25
"""How often who waits for calls asks whether the session is still there."""

_PATIENCE: Final = 5.0
"""Seconds for which somebody who dialled may say nothing."""


class Word(msgspec.Struct, frozen=True):
    """Where a process listens, and what those who dial it have to show."""

    host: str
    port: int
    nonce: str


class TcpFabric:
    """TCP on the network that this process's address belongs to, given by `host` (a name or address, v4 or v6, of this
    machine) or by `interface` (its name). A session gives the address by which it reaches the rendezvous; without
    either it is loopback, which joins processes of one machine.

    >>> TcpFabric(host="::1").name
    'tcp'
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, *, host: str | None = None, interface: str | None = None) -> None:
        if host is not None and interface is not None:
            raise FabricError(f"fabric tcp got host={host!r} and interface={interface!r}; give one of them")
        self._host = host
        self._interface = interface

    @classmethod
    def missing(cls) -> str | None:
        """None, or that this isn't Linux."""
        return None if sys.platform == "linux" else f"it needs Linux, this is {sys.platform}; use fabric 'gloo'"

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> LinkGroup:
        """Connect to all members. `FabricError` naming who doesn't come or can't be reached."""
        if len(members) == 1:
            return LinkGroup(tuple(members), process)
        deadline = Deadline.after(timeout)
        host = address_of(self._interface) if self._interface else self._host or local_host(store)
        sockets = _connect(host, group=group, members=members, process=process, store=store, deadline=deadline)

        def make(listen: Listen) -> list[TcpLink]:
            return [TcpLink(process, peer, made, listen) for peer, made in sockets.items()]

        words = {pair: "tcp" for peer in sockets for pair in ((process, peer), (peer, process))}
        return LinkGroup.over(make, members=members, process=process, words=words)


def address_of(interface: str) -> str:
    """The address of a network interface of this machine, v4 before v6. `FabricError` if it has none.

    >>> address_of("lo")
    '127.0.0.1'
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            socket.if_nametoindex(interface)
            told = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", interface.encode()))  # SIOCGIFADDR
            return socket.inet_ntoa(told[20:24])
        except OSError as error:
            found = _v6_of(interface)
            if found is None:
                raise FabricError(
                    f"fabric tcp can't listen on interface {interface}: {error.strerror}; give host= (an address of "
                    "this machine) or interface= (see `ip address`)"
                ) from error
            return found


def _v6_of(interface: str) -> str | None:
    """Its first v6 address that others reach."""
    with open("/proc/net/if_inet6") as table:
        rows = [line.split() for line in table]
    addresses = [
        bytes.fromhex(row[0]) for row in rows if row[5] == interface and row[3] != "20"
    ]  # 20: of the link only
    return socket.inet_ntop(socket.AF_INET6, addresses[0]) if addresses else None


@contextmanager
def _listening(host: str, backlog: int) -> Iterator[tuple[socket.socket, Word]]:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, error) from error
    with listener:
        try:
            listener.bind(place)
            listener.listen(backlog)
        except OSError as error:
            raise _cannot_listen(host, error) from error
        address, port, *_ = listener.getsockname()
        yield listener, Word(address, port, secrets.token_hex(NONCE_NBYTES))


def _cannot_listen(host: str, error: OSError) -> FabricError:
    return FabricError(
        f"fabric tcp can't listen on {host}: {error.strerror}; give host= (an address of this machine) or interface= "
        "(see `ip address`)"
    )


def _connect(
    host: str, *, group: str, members: Sequence[int], process: int, store: KeyValue, deadline: Deadline
) -> dict[int, socket.socket]:
    """A socket for each peer."""
    with _listening(host, len(members)) as (listener, word), ExitStack() as unless_met:
        said = msgspec.json.encode(word)
        told = roll_call(store, group=f"{group}/tcp", members=members, process=process, deadline=deadline, word=said)
        words = {member: msgspec.json.decode(text, type=Word) for member, text in told.items()}
        sockets: dict[int, socket.socket] = {}
        unless_met.callback(_close_all, sockets)
        for member in members:
            if member < process:
                sockets[member] = _dial(words, member, process, deadline)
        _take_calls(listener, words, process, deadline, store=store, into=sockets)
        for made in sockets.values():
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setblocking(False)
        unless_met.pop_all()
        return sockets


def _close_all(sockets: Mapping[int, socket.socket]) -> None:
    for made in sockets.values():
        made.close()


def _dial(words: Mapping[int, Word], member: int, process: int, deadline: Deadline) -> socket.socket:
    word, left = words[member], max(0.001, deadline.remaining())
    try:
        made = socket.create_connection((word.host, word.port), left, (words[process].host, 0))
    except OSError as error:
        places = ", ".join(f"{number} at {each.host}" for number, each in words.items())
        gone = isinstance(error, (ConnectionError, TimeoutError))  # anything else is an address of this process
        raise FabricError(
            f"process {process} can't connect to process {member} at {word.host}:{word.port} ({places}): "
            f"{error.strerror or error}; give each a host= or interface= that the others reach",
            peer=member if gone else None,
        ) from error
    try:
        made.sendall(GREETING.pack(bytes.fromhex(word.nonce), process))
    except OSError as error:
        made.close()
        raise FabricError(f"lost process {member} while connecting to it: {error}", peer=member) from error
    return made


@define(eq=False)
class _Caller:
    """Somebody who dialled, and what was heard so far."""

    socket: socket.socket
    patience: Deadline
    said: bytes = b""

    def hear(self, nonce: bytes) -> int | None:
        """Who it is, -1 for a stranger, None as long as it hasn't said all."""
        try:
            more = self.socket.recv(GREETING.size - len(self.said))
        except BlockingIOError:
            return None
        except OSError:
            return -1
        self.said += more
        if len(self.said) < GREETING.size:
            return None if more else -1
        shown, caller = GREETING.unpack(self.said)
        return int(caller) if secrets.compare_digest(shown, nonce) else -1


def _take_calls(
    listener: socket.socket,
    words: Mapping[int, Word],
    process: int,
    deadline: Deadline,
    *,
    store: KeyValue,
    into: dict[int, socket.socket],
) -> None:
    """Add the connections of the members above. Callers are heard side by side, and strangers hung up on."""
    waiting = {member for member in words if member > process}
    nonce = bytes.fromhex(words[process].nonce)
    callers: dict[int, _Caller] = {}
    listener.setblocking(False)
    try:
        while waiting:
            if not (left := deadline.remaining()):
                raise _did_not_come(waiting, process, words[process].host)
            store.check([])  # an error if the session has ended meanwhile
            ready = _readable([listener.fileno(), *callers], min(left, ASK_SECONDS))
            if listener.fileno() in ready:
                _accept(listener, callers)
            for descriptor in list(callers):
                _settle(callers, descriptor, descriptor in ready, nonce, waiting, into)
    finally:
        for caller in callers.values():
            caller.socket.close()


def _readable(descriptors: Sequence[int], seconds: float) -> set[int]:
    polling = select.poll()
    for descriptor in descriptors:
        polling.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in polling.poll(1000 * seconds)}


def _did_not_come(waiting: set[int], process: int, host: str) -> FabricError:
    return FabricError(
        f"processes {sorted(waiting)} did not connect to process {process} at {host} in time; give each a host= or "
        "interface= that the others reach",
        peer=min(waiting),
    )


def _accept(listener: socket.socket, callers: dict[int, _Caller]) -> None:
    try:
        made, _ = listener.accept()
    except OSError:
        return  # it has hung up already, or there are no descriptors now: the deadline says so if it stays so
    made.setblocking(False)
    callers[made.fileno()] = _Caller(made, Deadline.after(_PATIENCE))


def _settle(
    callers: dict[int, _Caller],
    descriptor: int,
    is_ready: bool,
    nonce: bytes,
    waiting: set[int],
    into: dict[int, socket.socket],
) -> None:
    """Hear a caller that speaks; take it, or hang up on a stranger and on who has said nothing for too long."""
    caller = callers[descriptor]
    member = caller.hear(nonce) if is_ready else None
    if member is None and caller.patience.remaining():
        return
    del callers[descriptor]
    if member in waiting:
        waiting.discard(member)
        into[member] = caller.socket
    else:
        caller.socket.close()


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [TcpFabric]
