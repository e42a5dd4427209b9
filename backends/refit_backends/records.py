"""A Unix socket to a process of this host on which the two ends tell each other what they did with bytes elsewhere.

Records of fixed size go both ways; the bytes themselves never do. A receive has ended only when the record that says so
is on the socket. A socket that closes is a peer that left or died.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from enum import IntEnum
from select import EPOLLIN, EPOLLOUT
from typing import Final

from attrs import define, field

from refit_backends.links import Listen, Lost, Operation, hang_up, mismatch
from refit_sdk.fabric import FabricError

RECORD: Final = struct.Struct("<BQQQ")

_HEARD_AT_ONCE: Final = 1 << 16
_MOST_DESCRIPTORS: Final = 4


class Tag(IntEnum):
    """What a record says, with three numbers."""

    OFFER = 1
    """A message: its bytes, the address, and the blocks of the table that is there; of 0 the bytes themselves are."""
    RING = 2
    """The ring's descriptor comes with this record."""
    CHUNK = 3
    """A slot is full: the chunk's bytes, and the whole message's."""
    FREED = 4
    """A slot is free again."""
    DONE = 5
    """The oldest message that hasn't ended has arrived."""
    MISMATCH = 6
    """A message has another length than its receive: the message's bytes, and the receive's."""


@define(eq=False)
class RecordLink:
    """The pair of this process and a peer, as far as records go. `_obey` takes what the peer says."""

    process: int
    peer: int
    socket: socket.socket
    listen: Listen
    lost: FabricError | None = field(default=None, init=False)
    _out: bytearray = field(factory=bytearray, init=False)
    _handed: deque[tuple[int, Operation]] = field(factory=deque, init=False)
    """Receives that end when so many more bytes of `_out` are on the socket."""
    _heard: bytearray = field(factory=bytearray, init=False)
    _fds: deque[int] = field(factory=deque, init=False)
    _is_full: bool = field(default=False, init=False)

    def _obey(self, tag: int, one: int, other: int, third: int) -> None:
        """Take a record. `Lost` for one that makes no sense."""
        if tag == Tag.MISMATCH:
            raise Lost(mismatch(self.process, one, self.peer, other))
        raise Lost(f"its records make no sense (tag {tag})")

    def _say(self, tag: Tag, one: int = 0, other: int = 0, third: int = 0) -> None:
        self._out += RECORD.pack(tag, one, other, third)

    def _say_done(self, recv: Operation) -> None:
        """A receive is whole: it ends when the peer was told."""
        self._say(Tag.DONE)
        self._handed.append((len(self._out), recv))

    def _match(self, nbytes: int, recv: Operation) -> None:
        """`Lost`, and so for the peer, if a message of so many bytes meets another receive."""
        if nbytes != recv.nbytes:
            self._say(Tag.MISMATCH, nbytes, recv.nbytes)
            self.flush()
            raise Lost(mismatch(self.peer, nbytes, self.process, recv.nbytes))

    def flush(self) -> None:
        """Put what was said on the socket, as far as it takes it. `Lost` if nobody is there."""
        while self._out and not self._is_full:
            try:
                gone = self.socket.send(self._out)
            except BlockingIOError:
                self._full(True)
                return
            except OSError as error:
                raise Lost(f"the connection ended ({error.strerror})") from error
            del self._out[:gone]
            self._handed = deque((left - gone, recv) for left, recv in self._handed)
            while self._handed and self._handed[0][0] <= 0:
                self._handed.popleft()[1].end()

    def has_room(self) -> None:
        """The socket takes records again."""
        if self._is_full:
            self._full(False)
            self.flush()

    def _full(self, is_full: bool) -> None:
        self._is_full = is_full
        self.listen(self, EPOLLIN | (EPOLLOUT if is_full else 0))

    def hear(self) -> None:
        """Take what the peer says. `Lost` when it has left."""
        while True:
            try:
                said, fds, _, _ = socket.recv_fds(self.socket, _HEARD_AT_ONCE, _MOST_DESCRIPTORS)
            except BlockingIOError:
                return
            except OSError as error:
                raise Lost(f"the connection ended ({error.strerror})") from error
            self._fds += fds
            if not said:
                raise Lost("the connection ended: it closed its group or died")
            self._heard += said
            self._take()
            if len(said) < _HEARD_AT_ONCE:
                return

    def _take(self) -> None:
        whole = len(self._heard) // RECORD.size * RECORD.size
        records = bytes(self._heard[:whole])
        del self._heard[:whole]
        for tag, one, other, third in RECORD.iter_unpack(records):
            self._obey(tag, one, other, third)

    def _hang_up(self) -> None:
        """Close the connection, and what came with it and nobody took."""
        hang_up(self.socket)
        for fd in self._fds:
            os.close(fd)
