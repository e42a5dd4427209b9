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
from collections import deque
from typing import Final

from attrs import define, field

from refit_backends.links import Lost, Operation
from refit_backends.records import RECORD, RecordLink, Tag
from refit_backends.shm_memory import RING_NBYTES, SLOT_NBYTES, SLOTS, Reader, Ring, read_table, reserve
from refit_sdk.fabric import FabricError
from refit_sdk.runs import Runs, place_of

READ_NBYTES: Final = 16 << 20
"""Bytes read from a peer at once: what an abort waits for."""


@define(eq=False)
class ShmLink(RecordLink):
    """The pair of this process and a peer. `readable`: this one may read its memory; `reads`: it may read ours."""

    pid: int
    readable: bool
    reads: bool
    directory: str | None
    reader: Reader
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
            socket.send_fds(self.socket, [RECORD.pack(Tag.RING, 0, 0, 0)], [fd])
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

    def _arrived(self, recv: Operation, nbytes: int) -> None:
        recv.moved += nbytes
        if recv.moved == recv.nbytes:
            self._say_done(self._recvs.popleft())

    def _obey(self, tag: int, one: int, other: int, third: int) -> None:
        if tag == Tag.OFFER or tag == Tag.CHUNK:
            self._incoming.append((one, other, third))
        elif tag == Tag.FREED and self._free < SLOTS:
            self._free += 1
        elif tag == Tag.DONE and self._sent:
            self._sent.popleft().end()
        elif tag == Tag.RING and self._fds and self._theirs is None:
            self._theirs = Ring.of(self._fds.popleft())
        else:
            RecordLink._obey(self, tag, one, other, third)

    def end(self, error: FabricError) -> None:
        """Hang up, and only then end all that is pending. Nothing is copied any more."""
        if self.lost is not None:
            return
        self.lost = error
        self._hang_up()
        for ring in (self._ours, self._theirs):
            if ring is not None:
                ring.close()
        for operation in (*(recv for _, recv in self._handed), *self._sent, *self._sends, *self._recvs):
            operation.end(error)
