"""One peer over TCP: messages go out of, and into, wherever their bytes lie. Runs on the group's own thread.

1. A message is its length, then its bytes. The sender's kernel gathers them from the runs of the message, and the
   receiver's scatters them to those of its oldest receive, so nothing is copied in between.
2. The receiver reads the length first: a message of another length than its receive ends the link, and isn't read.
3. What comes before its receive is posted stays in the kernel, which has little room, and then the sender waits.
4. A send has ended when the kernel has its bytes, a receive when its last byte is in place. A socket that ends is a
   peer that left or died.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import deque
from errno import EAGAIN, EINTR
from functools import cache
from select import EPOLLIN, EPOLLOUT
from typing import Any, Final

from attrs import define, field

from refit_backends.links import Kind, Listen, Lost, Operation, hang_up, mismatch
from refit_sdk.fabric import FabricError
from refit_sdk.runs import place_of

MOST_SPANS: Final = 1024
"""Runs that the kernel takes in one call."""

AT_ONCE: Final = 16 << 20
"""Bytes that one call is given at most: what an abort waits for."""

_LEAST_AT_ONCE: Final = 1 << 20
"""Bytes that one call is given at least, if the message has them."""

LENGTH: Final = struct.Struct("<Q")


@cache
def _call(name: str) -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    return call


@define(eq=False)
class TcpLink:
    """The pair of this process and a peer, on a socket that doesn't block."""

    process: int
    peer: int
    socket: socket.socket
    listen: Listen
    lost: FabricError | None = None
    _sends: deque[Operation] = field(factory=deque, init=False)
    _recvs: deque[Operation] = field(factory=deque, init=False)
    _length: bytearray = field(factory=bytearray, init=False)
    """What is still to be sent of the length of the oldest send."""
    _heard: bytearray = field(factory=bytearray, init=False)
    """What came of the length of the message that the oldest receive is for."""
    _is_full: bool = field(default=False, init=False)
    _has_bytes: bool = field(default=False, init=False)
    _events: int = field(default=EPOLLIN, init=False)
    _took: dict[Kind, int] = field(factory=lambda: {"send": 0, "recv": 0}, init=False)
    """Bytes that the kernel moved in the last call of each kind."""
    _writev: Any = field(factory=lambda: _call("writev"), init=False)
    _readv: Any = field(factory=lambda: _call("readv"), init=False)

    def post(self, operation: Operation) -> None:
        """Take an operation over."""
        if operation.kind == "recv":
            self._recvs.append(operation)
            return
        if not self._sends:
            self._length += LENGTH.pack(operation.nbytes)
        self._sends.append(operation)

    def step(self) -> bool:
        """Move what one call moves, each way; whether there was anything. `Lost` if it can't go on."""
        did = self._write()
        did = self._read() or did
        self._listen()
        return did

    def _listen(self) -> None:
        """Be called for what this link waits for. Bytes that nobody wants yet stay where they are."""
        hears = 0 if self._has_bytes and not self._recvs else EPOLLIN
        events = hears | (EPOLLOUT if self._is_full else 0)
        if events != self._events:
            self._events = events
            self.listen(self, events)

    def _write(self) -> bool:
        if not self._sends or self._is_full:
            return False
        if self._length and not self._write_length():
            return False
        send = self._sends[0]
        if send.nbytes:
            moved, self._is_full = self._move(self._writev, send)
            send.moved += moved
        if send.moved == send.nbytes:
            self._sends.popleft().end()
            if self._sends:
                self._length += LENGTH.pack(self._sends[0].nbytes)
        return True

    def _write_length(self) -> bool:
        """Whether the whole of it is gone."""
        try:
            del self._length[: self.socket.send(self._length, socket.MSG_MORE)]
        except BlockingIOError:
            self._is_full = True
        except OSError as error:
            raise Lost(f"the connection ended ({error.strerror})") from error
        return not self._length

    def _read(self) -> bool:
        if not self._recvs or not self._has_bytes:
            return False
        recv = self._recvs[0]
        if len(self._heard) < LENGTH.size and not self._read_length(recv):
            return False
        if recv.moved < recv.nbytes:
            moved, is_empty = self._move(self._readv, recv)
            if not moved and not is_empty:
                raise Lost("the connection ended: it closed its group or died")
            recv.moved += moved
            recv.touched = recv.moved > 0
            self._has_bytes = not is_empty
        if recv.moved == recv.nbytes:
            self._heard.clear()
            self._recvs.popleft().end()
            self._has_bytes = self._has_bytes and bool(self._recvs)  # else epoll tells, of an end as well
        return True

    def _read_length(self, recv: Operation) -> bool:
        """Whether the whole of it is there. `Lost` if it isn't the receive's."""
        said = self._peek(LENGTH.size - len(self._heard), 0)
        self._heard += said
        if len(self._heard) < LENGTH.size:
            return False
        (nbytes,) = LENGTH.unpack(self._heard)
        if nbytes != recv.nbytes:
            raise Lost(mismatch(self.peer, nbytes, self.process, recv.nbytes))
        return True

    def _peek(self, nbytes: int, flags: int) -> bytes:
        """Bytes from the socket; none if there are none now. `Lost` when the peer has left."""
        try:
            said = self.socket.recv(nbytes, flags)
        except BlockingIOError:
            self._has_bytes = False
            return b""
        except OSError as error:
            raise Lost(f"the connection ended ({error.strerror})") from error
        if not said:
            raise Lost("the connection ended: it closed its group or died")
        return said

    def _move(self, call: Any, operation: Operation) -> tuple[int, bool]:
        """Let the kernel copy from or to an operation's runs: the bytes, and whether it takes or has no more now.

        It is asked again only when epoll says so, and not for the few bytes that it may have room for meanwhile. It is
        given twice what it took last: to list runs that it won't get to costs more than another call.
        """
        most = min(AT_ONCE, max(_LEAST_AT_ONCE, 2 * self._took[operation.kind]))
        spans = operation.runs.spans(operation.moved, most=MOST_SPANS, most_nbytes=most)
        moved: int = call(self.socket.fileno(), place_of(spans), len(spans))
        if moved >= 0:
            self._took[operation.kind] = moved
            return moved, 0 < moved < int(spans[:, 1].sum())
        number = ctypes.get_errno()
        if number in (EAGAIN, EINTR):
            return 0, True
        raise Lost(f"the connection ended ({os.strerror(number)})")

    def has_room(self) -> None:
        """The socket takes bytes again."""
        self._is_full = False

    def hear(self) -> None:
        """There is something to read, or the peer is gone. `Lost` if it is."""
        self._has_bytes = True
        if not self._recvs:
            self._peek(1, socket.MSG_PEEK)
            if number := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise Lost(f"the connection ended ({os.strerror(number)})")
            self._listen()

    def end(self, error: FabricError) -> None:
        """Hang up, and only then end all that is pending. Nothing is copied any more."""
        if self.lost is not None:
            return
        self.lost = error
        hang_up(self.socket)
        for operation in (*self._sends, *self._recvs):
            operation.end(error)
