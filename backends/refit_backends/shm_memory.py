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
from typing import Final

from attrs import define, field

from refit_sdk.fabric import FabricError

SLOTS: Final = 4
SLOT_NBYTES: Final = 1 << 20
RING_NBYTES: Final = SLOTS * SLOT_NBYTES
"""Bytes of shared memory for each directed pair that can't read its peer, made at the first message."""

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
        return "raise this container's memory limit, or use fabric='gloo'"
    return "make it larger (docker run --shm-size, an emptyDir of medium Memory), or use fabric='gloo'"


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

    def write(self, address: int, nbytes: int) -> None:
        """Copy from an address of this process into the next slot."""
        ctypes.memmove(self._next(), address, nbytes)

    def read(self, address: int, nbytes: int) -> None:
        """Copy from the next slot to an address of this process."""
        ctypes.memmove(address, self._next(), nbytes)

    def _next(self) -> int:
        assert self._first is not None
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        return ctypes.addressof(self._first) + slot * SLOT_NBYTES

    def close(self) -> None:
        """Unmap. Nothing may be copied meanwhile."""
        self._first = None
        self._map.close()


class _Span(ctypes.Structure):
    """What the C library calls an iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_peer(pid: int, address: int, *, into: int, nbytes: int) -> None:
    """Copy from another process's memory to an address of this one. `OSError` if the kernel refuses or it isn't there.

    >>> there, here = ctypes.create_string_buffer(b"abc"), ctypes.create_string_buffer(4)
    >>> read_peer(os.getpid(), ctypes.addressof(there), into=ctypes.addressof(here), nbytes=3)
    >>> here.value
    b'abc'
    """
    libc = ctypes.CDLL(None, use_errno=True)
    ours, theirs = _Span(into, nbytes), _Span(address, nbytes)
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    found = call(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    if found != nbytes:
        number = ctypes.get_errno() if found < 0 else errno.EFAULT
        raise OSError(number, f"read {max(found, 0)} of {nbytes} bytes of process id {pid}: {os.strerror(number)}")


class Reader:
    """Reads peers' memory on two threads where there is much of it: the kernel copies page by page, which one thread
    can't do at the speed of memory, and the sender's processor has nothing to do meanwhile.

    >>> reader, there, here = Reader(), ctypes.create_string_buffer(b"x" * SPLIT_NBYTES), bytearray(SPLIT_NBYTES)
    >>> into = ctypes.addressof(ctypes.c_char.from_buffer(here))
    >>> reader.read(os.getpid(), ctypes.addressof(there), into=into, nbytes=SPLIT_NBYTES)
    >>> here == b"x" * SPLIT_NBYTES
    True
    >>> reader.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def read(self, pid: int, address: int, *, into: int, nbytes: int) -> None:
        """As `read_peer`. When it returns or raises, neither thread writes any more."""
        if nbytes < SPLIT_NBYTES:
            read_peer(pid, address, into=into, nbytes=nbytes)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="refit-shm-read")
        half = nbytes // 2
        other = self._pool.submit(read_peer, pid, address + half, into=into + half, nbytes=nbytes - half)
        try:
            read_peer(pid, address, into=into, nbytes=half)
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
        read_peer(pid, address, into=ctypes.addressof(found), nbytes=len(expected))
    except (OSError, AttributeError):
        return False  # an old C library has no such call
    return found.raw == expected
