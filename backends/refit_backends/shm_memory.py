"""Memory that processes of one host share: anonymous segments, rings of slots in them, and reading a peer's memory.

A segment has no name from its first moment on: it's a memfd, or a file made with O_TMPFILE in a directory. Others get
it as a descriptor, and it goes with the last process that has it, however that one ends. Its pages are reserved when it
is made, so a place that is too small is an error here and no SIGBUS at the first write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Final

import numpy as np
from attrs import define, field

from refit_sdk.fabric import FabricError
from refit_sdk.runs import Runs, place_of

SLOTS: Final = 4
SLOT_NBYTES: Final = 1 << 20
RING_NBYTES: Final = SLOTS * SLOT_NBYTES
"""Bytes of shared memory for each directed pair that can't read its peer, made at the first message."""

_MOST_SPANS: Final = 1024
"""Runs that the kernel takes in one call."""

SPLIT_NBYTES: Final = 2 << 20
"""Bytes from which on a peer's memory is read by two threads."""


def reserve(nbytes: int, *, directory: str | None) -> int:
    """The descriptor of a new segment whose pages are there. `FabricError` if there is no room.

    >>> fd = reserve(4096, directory=None)
    >>> os.fstat(fd).st_size, os.fstat(fd).st_nlink
    (4096, 0)
    >>> os.close(fd)
    """
    try:
        fd = os.memfd_create(f"refit-{os.getpid()}", os.MFD_CLOEXEC) if directory is None else _unnamed(directory)
    except OSError as error:
        raise FabricError(f"can't make shared memory in {_place(directory)}: {error}; {_advice(directory)}") from error
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise FabricError(
            f"no room for {nbytes} bytes of shared memory in {_place(directory)}{_free(directory)}: {error}; "
            f"{_advice(directory)}"
        ) from error
    return fd


def check_room(nbytes: int, *, directory: str | None) -> None:
    """`FabricError` if a directory has less room than that. What memfds take is known only when they are made."""
    if directory is not None and room(directory) < nbytes:
        raise FabricError(
            f"{nbytes} bytes of shared memory may be needed in {directory}{_free(directory)}; {_advice(directory)}"
        )


def room(directory: str) -> int:
    """Free bytes of the file system that a directory is in."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _unnamed(directory: str) -> int:
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _place(directory: str | None) -> str:
    return "memory (memfd)" if directory is None else directory


def _free(directory: str | None) -> str:
    return "" if directory is None else f", which has {room(directory)} free"


def _advice(directory: str | None) -> str:
    if directory is None:
        return "raise this container's memory limit, or use fabric='tcp'"
    return "make it larger (docker run --shm-size, an emptyDir of medium Memory), or use fabric='tcp'"


@define(eq=False)
class Ring:
    """Slots of one directed pair, in turn. The writer makes it; the reader maps it from the writer's descriptor."""

    _map: mmap.mmap
    _first: ctypes.c_char | None
    _turn: int = field(default=0, init=False)

    @classmethod
    def of(cls, fd: int) -> Ring:
        """Map a segment, and close its descriptor. `FabricError` if it isn't as large as a ring."""
        try:
            if (found := os.fstat(fd).st_size) != RING_NBYTES:
                raise FabricError(f"a ring has {RING_NBYTES} bytes, the segment has {found}")
            mapped = mmap.mmap(fd, RING_NBYTES)
        finally:
            os.close(fd)
        return cls(mapped, ctypes.c_char.from_buffer(mapped))

    def write(self, runs: Runs, *, at: int, nbytes: int) -> None:
        """Copy from runs of this process into the next slot."""
        runs.gather(at, into=self._next(), nbytes=nbytes)

    def read(self, runs: Runs, *, at: int, nbytes: int) -> None:
        """Copy from the next slot to runs of this process."""
        runs.scatter(at, out_of=self._next(), nbytes=nbytes)

    def _next(self) -> int:
        assert self._first is not None
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        return ctypes.addressof(self._first) + slot * SLOT_NBYTES

    def close(self) -> None:
        """Unmap. Nothing may be copied meanwhile."""
        self._first = None
        self._map.close()


def at_address(address: int, nbytes: int) -> Runs:
    """One run."""
    return Runs(np.array([[address, 1, 0, nbytes]], np.int64))


@cache
def _process_vm_readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    return call


def read_peer(pid: int, theirs: Runs, *, into: Runs, at: int, nbytes: int) -> None:
    """Copy the stretch `at:at + nbytes` of another process's runs to the same of this one's.

    `OSError` if the kernel refuses or they aren't there.

    >>> there, here = ctypes.create_string_buffer(b"abc"), ctypes.create_string_buffer(4)
    >>> theirs, ours = at_address(ctypes.addressof(there), 3), at_address(ctypes.addressof(here), 3)
    >>> read_peer(os.getpid(), theirs, into=ours, at=1, nbytes=2)
    >>> here.raw
    b'\\x00bc\\x00'
    """
    call = _process_vm_readv()
    while nbytes:
        room = into.spans(at, most=_MOST_SPANS, most_nbytes=nbytes)
        remote = theirs.spans(at, most=_MOST_SPANS, most_nbytes=int(room[:, 1].sum()))
        part = int(remote[:, 1].sum())
        local = into.spans(at, most=_MOST_SPANS, most_nbytes=part)
        found = call(pid, place_of(local), len(local), place_of(remote), len(remote), 0)
        if found != part:
            number = ctypes.get_errno() if found < 0 else errno.EFAULT
            raise OSError(number, f"read {max(found, 0)} of {part} bytes of process id {pid}: {os.strerror(number)}")
        at, nbytes = at + part, nbytes - part


def read_table(pid: int, address: int, *, blocks: int, nbytes: int) -> Runs:
    """What a peer offers: the runs in a table of its memory, or one run if it has no blocks. `ValueError` unless they
    are of so many bytes.

    >>> runs = at_address(4096, 10)
    >>> read_table(os.getpid(), place_of(runs.blocks), blocks=1, nbytes=10).spans(0, most=9, most_nbytes=99).tolist()
    [[4096, 10]]
    """
    if not blocks:
        return at_address(address, nbytes)
    if blocks > nbytes:
        raise ValueError(f"{blocks} blocks were offered for {nbytes} bytes")
    table = np.empty((blocks, 4), np.int64)
    whole = at_address(place_of(table), table.nbytes)
    read_peer(pid, at_address(address, table.nbytes), into=whole, at=0, nbytes=table.nbytes)
    count, length = table[:, 1], table[:, 3]
    if ((count < 1) | (length < 1) | (count > nbytes) | (length > nbytes)).any() or Runs(table).nbytes != nbytes:
        raise ValueError(f"the runs that were offered aren't of {nbytes} bytes")
    return Runs(table)


class Reader:
    """Reads peers' memory on two threads where there is much of it: the kernel copies page by page, which one thread
    can't do at the speed of memory, and the sender's processor has nothing to do meanwhile.

    >>> reader, there, here = Reader(), ctypes.create_string_buffer(b"x" * SPLIT_NBYTES), bytearray(SPLIT_NBYTES)
    >>> into = at_address(ctypes.addressof(ctypes.c_char.from_buffer(here)), SPLIT_NBYTES)
    >>> theirs = at_address(ctypes.addressof(there), SPLIT_NBYTES)
    >>> reader.read(os.getpid(), theirs, into=into, at=0, nbytes=SPLIT_NBYTES)
    >>> here == b"x" * SPLIT_NBYTES
    True
    >>> reader.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def read(self, pid: int, theirs: Runs, *, into: Runs, at: int, nbytes: int) -> None:
        """As `read_peer`. When it returns or raises, neither thread writes any more."""
        if nbytes < SPLIT_NBYTES:
            read_peer(pid, theirs, into=into, at=at, nbytes=nbytes)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="refit-shm-read")
        half = nbytes // 2
        other = self._pool.submit(read_peer, pid, theirs, into=into, at=at + half, nbytes=nbytes - half)
        try:
            read_peer(pid, theirs, into=into, at=at, nbytes=half)
        finally:
            wait([other])
        other.result()

    def close(self) -> None:
        """End the second thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown()


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """Whether the kernel lets this process read that one's memory, tried on bytes that are known.

    >>> known = ctypes.create_string_buffer(b"known")
    >>> can_read(os.getpid(), ctypes.addressof(known), b"known"), can_read(os.getpid(), 0, b"known")
    (True, False)
    """
    found = ctypes.create_string_buffer(len(expected))
    try:
        into = at_address(ctypes.addressof(found), len(expected))
        read_peer(pid, at_address(address, len(expected)), into=into, at=0, nbytes=len(expected))
    except (OSError, AttributeError):
        return False  # an old C library has no such call
    return found.raw == expected
