"""The authenticated, schema-checked channel between processes and the rendezvous, and the shared table on top of it.

1. A process connects to an address that the rendezvous bound explicitly; both prove that they know the token, by the
   challenge of `multiprocessing.connection`. Bodies are length-prefixed and capped; nothing is unpickled.
2. A reader thread a channel decodes messages and hands them over in order; a silence longer than the heartbeat, at
   either end, is a loss.
3. The shared table, through which fabrics find each other, travels on the same channel.

>>> parse_rendezvous("tcp://[::1]:29600")
Address(host='::1', port=29600)
>>> str(parse_rendezvous("tcp://10.0.0.1:29600")), parse_rendezvous("tcp://10.0.0.1:29600").is_loopback
('tcp://10.0.0.1:29600', False)
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from attrs import frozen

from refit_sdk import messages
from refit_sdk.errors import RefitError, RendezvousError
from refit_sdk.messages import (
    Beat,
    Down,
    Message,
    StoreAdd,
    StoreCheck,
    StoreDelete,
    StoreGet,
    StoreReply,
    StoreSet,
    WorldGet,
)  # fmt: skip

_Request = StoreGet | StoreAdd | StoreCheck | StoreDelete | WorldGet

MAX_BODY: Final = 1 << 28
"""Bytes of the largest control message that is read."""

HANDSHAKE_SECONDS: Final = 10.0
"""How long the other end may take to prove that it knows the token."""

OPEN_TOKEN: Final = b"refit: no token was set"
"""What both ends prove to know where no token was set: it keeps strangers' protocols out, not strangers."""

ANEW: Final = "close this session and make a new one"
"""What to do where the rendezvous can't be heard any more."""


@frozen
class Address:
    """Where a rendezvous listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        try:
            return ipaddress.ip_address(self.host.split("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_rendezvous(text: str) -> Address:
    """The address in `tcp://host:port`. `RendezvousError` if it isn't one."""
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path or parts.query:
        raise RendezvousError(
            f"rendezvous={text!r} is not an address; it looks like tcp://10.0.0.1:29600, or tcp://[::1]:29600 for IPv6"
        )
    return Address(parts.hostname, port)


def find_token(token: str | None, *, address: Address, insecure: bool) -> bytes:
    """The token as given, from REFIT_TOKEN, or from the file that REFIT_TOKEN_FILE names.

    `RendezvousError` where there is none and the rendezvous isn't on loopback; with `insecure`, a warning.
    """
    found = token or os.environ.get("REFIT_TOKEN") or _token_of_file(os.environ.get("REFIT_TOKEN_FILE"))
    if found:
        return found.encode()
    if not address.is_loopback and not insecure:
        raise RendezvousError(
            f"{address} can be reached from other hosts and no token was given: pass token=, set REFIT_TOKEN or "
            "REFIT_TOKEN_FILE to the same secret on every rank, or pass insecure=True to let anybody join"
        )
    if not address.is_loopback:
        warnings.warn(f"{address} is open: insecure=True lets anybody who reaches it join", stacklevel=2)
    return OPEN_TOKEN


def _token_of_file(file: str | None) -> str | None:
    if not file:
        return None
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RendezvousError(f"REFIT_TOKEN_FILE={file!r} can't be read: {error}; write the token there") from error


class Channel:
    """An authenticated connection that carries whole bodies. Sending is safe from any thread."""

    def __init__(self, sock: socket.socket, *, token: bytes, server: bool, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Prove the token to the other end and have it prove it, each message in `seconds`, or `RendezvousError`."""
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self.local_host = socket.getnameinfo(sock.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
        """The address of this host as seen on the way to the other end."""
        self._lock = threading.Lock()
        try:
            self._handshake(token, server=server, seconds=seconds)
        except BaseException:
            self.close()
            raise

    def _handshake(self, token: bytes, *, server: bool, seconds: float) -> None:
        self._patience(seconds)
        try:
            for step in (deliver_challenge, answer_challenge) if server else (answer_challenge, deliver_challenge):
                step(self._connection, token)
        except AuthenticationError as error:
            raise RendezvousError("the token here is not the token there: set the same one on every rank") from error
        except BlockingIOError as error:
            raise RendezvousError(f"the other end said nothing for {seconds:.1f} s") from error
        except (OSError, EOFError, AssertionError) as error:
            raise RendezvousError(f"the other end doesn't speak refit's protocol ({error or 'closed'})") from error
        self._patience(0)

    def _patience(self, seconds: float) -> None:
        """How long a read may wait; 0: for ever."""
        whole, part = divmod(round(seconds * 1_000_000), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))

    def send(self, body: bytes) -> None:
        """Send one body. `OSError` if the other end is gone."""
        with self._lock:
            self._connection.send_bytes(body)

    def send_if_free(self, body: bytes) -> None:
        """Send one body, unless another is just being sent. `OSError` if the other end is gone."""
        if self._lock.acquire(blocking=False):
            try:
                self._connection.send_bytes(body)
            finally:
                self._lock.release()

    def recv(self) -> bytes:
        """The next body. `EOFError` or `OSError` if the other end is gone or the body is over the cap."""
        return self._connection.recv_bytes(MAX_BODY)

    def close(self) -> None:
        """Hang up; a reader blocked in `recv` wakes with `EOFError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def free(self) -> None:
        """Free the descriptor, once nobody reads any more."""
        with self._lock:
            if not self._connection.closed:
                self._connection.close()


def listen(address: Address) -> socket.socket:
    """A socket that listens on exactly this address. `OSError` if it can't be had."""
    family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family[0], socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(family[4])
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock


def connect(address: Address, *, token: bytes, seconds: float) -> Channel:
    """A channel to the rendezvous, tried again while nobody listens there, for at most `seconds`.

    `RendezvousError` after that, or at once if whoever listens isn't a rendezvous with this token.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            sock = socket.create_connection((address.host, address.port), timeout=max(0.1, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() >= end:
                raise RendezvousError(
                    f"nobody answers at {address} after {seconds:g} s ({error}): start source rank 0 or the controller "
                    "there, and see that this host can reach the address"
                ) from error
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))
            continue
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left = max(0.1, min(HANDSHAKE_SECONDS, end - time.monotonic()))
        try:
            return Channel(sock, token=token, server=False, seconds=left)
        except RendezvousError as error:
            raise RendezvousError(
                f"joining at {address}, where source rank 0 or a controller should be: {error}"
            ) from error


class Client:
    """A process's end of the control channel. It implements `refit_sdk.fabric.KeyValue`."""

    def __init__(self, channel: Channel, *, heartbeat: float, urgent: Callable[[Down], None]) -> None:
        """Start the threads. `urgent` is called on the reader's thread with each message before it is queued."""
        self.host = "the rendezvous host"
        self.heartbeat = heartbeat
        self._channel = channel
        self._urgent = urgent
        self._inbox: deque[Down] = deque()
        self._replies: dict[int, StoreReply | None] = {}
        self._changed = threading.Condition()
        self._failure: RefitError | None = None
        self._heard = time.monotonic()
        self._ids = count(1)
        self._threads = [
            threading.Thread(target=target, name=f"refit-{target.__name__.strip('_')}", daemon=True)
            for target in (self._read, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def local_host(self) -> str:
        """The address of this host as seen on the way to the rendezvous."""
        return self._channel.local_host

    @property
    def failure(self) -> RefitError | None:
        """Why the channel is down, or None."""
        return self._failure

    def send(self, message: Message) -> None:
        """Send a message. `RendezvousError` if the rendezvous is gone."""
        if self._failure is not None:
            raise self._failure
        try:
            self._channel.send(messages.encode(message))
        except OSError as error:
            raise self._fail(f"the connection is closed ({error})") from error

    def next(self, seconds: float | None) -> Down | None:
        """The next message, or None after `seconds` without one. `RendezvousError` if the rendezvous is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._failure, seconds)
            if self._inbox:
                return self._inbox.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        """Hang up and end the threads."""
        with self._changed:
            self._failure = self._failure or RendezvousError("this session is closed")
            self._changed.notify_all()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._channel.free()

    def _fail(self, reason: str) -> RefitError:
        with self._changed:
            failure = self._failure = self._failure or RendezvousError(f"{self.host} is gone: {reason}; {ANEW}")
            self._changed.notify_all()
        self._channel.close()
        return failure

    def _read(self) -> None:
        try:
            while True:
                self._take(messages.decode_down(self._channel.recv()))
        except (EOFError, OSError):
            self._fail("it closed the connection")
        except RendezvousError as error:
            self._fail(str(error))
        finally:
            self._urgent(messages.Closed(reason=str(self._failure), normal=False))

    def _take(self, message: Down) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Beat):
            return
        if not isinstance(message, StoreReply):
            self._urgent(message)
        with self._changed:
            if isinstance(message, StoreReply):
                if message.id in self._replies:
                    self._replies[message.id] = message
            else:
                self._inbox.append(message)
            self._changed.notify_all()

    def _beat(self) -> None:
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, self.heartbeat / 4)
            silent = time.monotonic() - self._heard
            if silent > self.heartbeat:
                self._fail(f"no sign of life for {silent:.1f} s")
            elif self._failure is None:
                try:
                    # A body that the other end doesn't take must not keep this thread from looking at the silence.
                    self._channel.send_if_free(messages.encode(Beat()))
                except OSError as error:
                    self._fail(f"the connection is closed ({error})")

    def _ask(self, request: _Request, seconds: float) -> StoreReply | None:
        with self._changed:
            self._replies[request.id] = None
        try:
            self.send(request)
            with self._changed:
                self._changed.wait_for(lambda: self._replies[request.id] or self._failure, seconds)
                if self._replies[request.id] is None and self._failure is not None:
                    raise self._failure
                return self._replies[request.id]
        finally:
            with self._changed:
                del self._replies[request.id]

    def _answer(self, request: StoreAdd | StoreCheck | StoreDelete) -> int:
        reply = self._ask(request, self.heartbeat)
        if reply is None:
            raise RendezvousError(f"{self.host} gave no answer to {request} in {self.heartbeat:g} s; {ANEW}")
        return reply.number

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.send(StoreSet(key=key, value=value))

    def get(self, key: str, *, timeout: float) -> bytes:
        """The value, waited for at most `timeout` seconds."""
        reply = self._ask(StoreGet(id=next(self._ids), key=key), timeout)
        if reply is None:
            raise RendezvousError(f"{key!r} was not set within {timeout:g} s: the rank that sets it hasn't come")
        return reply.value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._answer(StoreAdd(id=next(self._ids), key=key, amount=amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys are set."""
        return bool(self._answer(StoreCheck(id=next(self._ids), keys=tuple(keys))))

    def piece(self, epoch: int, start: int, *, timeout: float) -> bytes:
        """A piece of the epoch's world, from a byte on; empty if the rendezvous has it no more."""
        reply = self._ask(WorldGet(id=next(self._ids), epoch=epoch, start=start), timeout)
        if reply is None:
            raise RendezvousError(f"{self.host} gave no piece of the world in {timeout:g} s")
        return reply.value

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._answer(StoreDelete(id=next(self._ids), key=key)))
