"""One peer of this host: what is posted with it, and how its bytes get across. Runs on the group's own thread.

Records of fixed size go both ways on a Unix socket; the bytes themselves never do. Where the receiver may read the
sender's memory, a message is one copy:

1. The sender offers a length, and the address of the bytes, or of the table of their runs.
2. The receiver meets the offer with its oldest receive, copies straight to where that wants them, and says `DONE`.

Otherwise it is two, through a ring that the sender makes at its first message and hands over as a descriptor:

1. The sender fills free slots, a chunk each, and tells of each.
2. The receiver copies each chunk into its oldest receive, and says which slots are free again, and `DONE` at the end.

A receive has ended only when its `DONE` is on the socket: a sender that aborts closes the socket before its buffer is
anybody else's, so bytes that were read too late are never taken for good ones. A socket that closes is a peer that left
or died.
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
from refit_backends.shm_memory import RING_NBYTES, SLOT_NBYTES, SLOTS, Reader, Ring, read_table, reserve
from refit_sdk.fabric import FabricError
from refit_sdk.runs import Runs, place_of

READ_NBYTES: Final = 16 << 20
"""Bytes read from a peer at once: what an abort waits for."""

_RECORD: Final = struct.Struct("<BQQQ")
_HEARD_AT_ONCE: Final = 1 << 16


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
class ShmLink:
    """The pair of this process and a peer. `readable`: this one may read its memory; `reads`: it may read ours."""

    process: int
    peer: int
    socket: socket.socket
    pid: int
    readable: bool
    reads: bool
    directory: str | None
    reader: Reader
    listen: Listen
    lost: FabricError | None = None
    _sends: deque[Operation] = field(factory=deque, init=False)
    """Not yet wholly offered or written."""
    _sent: deque[Operation] = field(factory=deque, init=False)
    _recvs: deque[Operation] = field(factory=deque, init=False)
    _incoming: deque[tuple[int, int, int]] = field(factory=deque, init=False)
    """Offers (bytes, address, blocks) or chunks (bytes, whole, 0), in order."""
    _offered: Runs | None = field(default=None, init=False)
    """Where the bytes of the oldest offer are, once its table is read."""
    _ours: Ring | None = field(default=None, init=False)
    _theirs: Ring | None = field(default=None, init=False)
    _free: int = field(default=SLOTS, init=False)
    _out: bytearray = field(factory=bytearray, init=False)
    _handed: deque[tuple[int, Operation]] = field(factory=deque, init=False)
    """Receives that end when so many more bytes of `_out` are on the socket."""
    _heard: bytearray = field(factory=bytearray, init=False)
    _fds: deque[int] = field(factory=deque, init=False)
    _is_full: bool = field(default=False, init=False)

    def post(self, operation: Operation) -> None:
        """Take an operation over."""
        if operation.kind == "recv":
            self._recvs.append(operation)
        elif self.reads:
            self._sent.append(operation)
            self._offer(operation)
        else:
            self._sends.append(operation)

    def _offer(self, send: Operation) -> None:
        table = send.runs.blocks
        if send.runs.address is not None or not len(table):
            self._say(Tag.OFFER, send.nbytes, send.runs.address or 0)
        else:
            self._say(Tag.OFFER, send.nbytes, place_of(table), len(table))

    def step(self) -> bool:
        """Copy at most one chunk each way, and say so; whether there was anything to do. `Lost` if it can't go on."""
        did = self._fill()
        did = (self._read_offer() if self.readable else self._empty()) or did
        self.flush()
        return did

    def _fill(self) -> bool:
        if not self._sends or not self._free or (self._ours is None and not self._hand_over()):
            return False
        assert self._ours is not None
        send = self._sends[0]
        chunk = min(SLOT_NBYTES, send.nbytes - send.moved)
        self._ours.write(send.runs, at=send.moved, nbytes=chunk)
        send.moved += chunk
        self._free -= 1
        self._say(Tag.CHUNK, chunk, send.nbytes)
        if send.moved == send.nbytes:
            self._sent.append(self._sends.popleft())
        return True

    def _hand_over(self) -> bool:
        """Make the ring and hand it over; False if the socket takes nothing now."""
        self.flush()
        if self._out:
            return False
        fd = reserve(RING_NBYTES, directory=self.directory)
        try:
            socket.send_fds(self.socket, [_RECORD.pack(Tag.RING, 0, 0, 0)], [fd])
        except BlockingIOError:
            self._full(True)
            return False
        except OSError as error:
            raise Lost(f"the connection ended ({error.strerror})") from error
        else:
            self._ours = Ring.of(os.dup(fd))
        finally:
            os.close(fd)
        return True

    def _read_offer(self) -> bool:
        if not self._recvs or not self._incoming:
            return False
        recv, (nbytes, address, blocks) = self._recvs[0], self._incoming[0]
        self._match(nbytes, recv)
        part = min(READ_NBYTES, nbytes - recv.moved)
        recv.touched = True
        try:
            if self._offered is None:
                self._offered = read_table(self.pid, address, blocks=blocks, nbytes=nbytes)
            self.reader.read(self.pid, self._offered, into=recv.runs, at=recv.moved, nbytes=part)
        except (OSError, ValueError) as error:
            raise Lost(f"it closed its group or died while its memory was read ({error})") from error
        self._arrived(recv, part)
        if recv.moved == nbytes:
            self._offered = None
            self._incoming.popleft()
        return True

    def _empty(self) -> bool:
        if not self._recvs or not self._incoming:
            return False
        recv, (chunk, nbytes, _) = self._recvs[0], self._incoming[0]
        self._match(nbytes, recv)
        if self._theirs is None or chunk > recv.nbytes - recv.moved:
            raise Lost("its records make no sense")
        recv.touched = True
        self._theirs.read(recv.runs, at=recv.moved, nbytes=chunk)
        self._incoming.popleft()
        self._say(Tag.FREED)
        self._arrived(recv, chunk)
        return True

    def _match(self, nbytes: int, recv: Operation) -> None:
        if nbytes != recv.nbytes:
            self._say(Tag.MISMATCH, nbytes, recv.nbytes)
            self.flush()
            raise Lost(mismatch(self.peer, nbytes, self.process, recv.nbytes))

    def _arrived(self, recv: Operation, nbytes: int) -> None:
        recv.moved += nbytes
        if recv.moved == recv.nbytes:
            self._say(Tag.DONE)
            self._handed.append((len(self._out), self._recvs.popleft()))

    def _say(self, tag: Tag, one: int = 0, other: int = 0, third: int = 0) -> None:
        self._out += _RECORD.pack(tag, one, other, third)

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
                said, fds, _, _ = socket.recv_fds(self.socket, _HEARD_AT_ONCE, SLOTS)
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
        whole = len(self._heard) // _RECORD.size * _RECORD.size
        records = bytes(self._heard[:whole])
        del self._heard[:whole]
        for tag, one, other, third in _RECORD.iter_unpack(records):
            self._obey(tag, one, other, third)

    def _obey(self, tag: int, one: int, other: int, third: int) -> None:
        if tag == Tag.OFFER or tag == Tag.CHUNK:
            self._incoming.append((one, other, third))
        elif tag == Tag.FREED and self._free < SLOTS:
            self._free += 1
        elif tag == Tag.DONE and self._sent:
            self._sent.popleft().end()
        elif tag == Tag.RING and self._fds and self._theirs is None:
            self._theirs = Ring.of(self._fds.popleft())
        elif tag == Tag.MISMATCH:
            raise Lost(mismatch(self.process, one, self.peer, other))
        else:
            raise Lost(f"its records make no sense (tag {tag})")

    def end(self, error: FabricError) -> None:
        """Hang up, and only then end all that is pending. Nothing is copied any more."""
        if self.lost is not None:
            return
        self.lost = error
        hang_up(self.socket)
        for fd in self._fds:
            os.close(fd)
        for ring in (self._ours, self._theirs):
            if ring is not None:
                ring.close()
        for operation in (*(recv for _, recv in self._handed), *self._sent, *self._sends, *self._recvs):
            operation.end(error)
