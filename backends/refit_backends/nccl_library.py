"""NCCL's own functions, called through ctypes in the library that torch has loaded.

They are a dozen, and have been the same since NCCL 2.14. Communicators are non-blocking: a call only begins, and
`state` says how far it is. Calls give up Python's lock while they run.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Final

from refit_backends import native
from refit_sdk.fabric import FabricError

ID_NBYTES: Final = 128
OLDEST: Final = 21400
"""The first version with non-blocking communicators, 2.14."""

SUCCESS: Final = 0
IN_PROGRESS: Final = 7

_UINT8: Final = 1
_MAGIC: Final = 0xCAFEBEEF
_BLOCKING_UNSET: Final = -(1 << 31)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_NBYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` as far as it went in NCCL 2.14, by whose number later ones know where it ends."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("filler", c_int),
    )


_SIGNATURES: Final = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommAbort": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


def written(version: int) -> str:
    """A version as people write it.

    >>> written(22803)
    '2.28.3'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Nccl:
    """NCCL. `FabricError` with its own words where a call fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.path = native.path_of(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (c_int,), c_char_p
        library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = (c_void_p,), c_char_p
        value = c_int()
        self._call("ncclGetVersion", byref(value))
        self.version = value.value

    @classmethod
    def found(cls, path: str | None = None) -> Nccl:
        """The library that torch has loaded, or that of a path. `FabricError` where there is none, or an old one."""
        nccl = cls(ctypes.CDLL(path)) if path is not None else _loaded()
        if nccl is None:
            raise FabricError("no libnccl.so.2 is loaded or found; install nvidia-nccl-cu12 (or -cu13), as torch asks")
        if nccl.version < OLDEST:
            raise FabricError(f"NCCL {written(nccl.version)} at {nccl.path} is too old; it takes {written(OLDEST)}")
        return nccl

    def words(self, code: int, comm: int = 0) -> str:
        """What a result means, with the last thing that NCCL had to say of a communicator."""
        text = self._library.ncclGetErrorString(code).decode()
        last = (self._library.ncclGetLastError(comm or None) or b"").decode().strip()
        return f"{text} ({code}){f': {last}' if last else ''}"

    def _call(self, name: str, *arguments: object, comm: int = 0) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (SUCCESS, IN_PROGRESS):
            raise FabricError(f"{name} failed: {self.words(code, comm)}")

    def unique_id(self) -> bytes:
        """What all members of a new communicator have to know. This process answers those who use it."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def begin(self, unique_id: bytes, *, rank: int, size: int) -> int:
        """Begin to make a communicator on the current device."""
        comm = c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, OLDEST, 0, _BLOCKING_UNSET)
        known = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRankConfig", byref(comm), size, known, rank, byref(config))
        return comm.value or 0

    def state(self, comm: int) -> int:
        """`SUCCESS`, `IN_PROGRESS`, or what has gone wrong with a communicator."""
        value = c_int()
        self._call("ncclCommGetAsyncError", comm, byref(value))
        return value.value

    def abort(self, comm: int) -> None:
        """End all that a communicator does, and free it. Others may be in this call at the same time."""
        self._call("ncclCommAbort", comm)

    def group_start(self) -> None:
        """From here on sends and receives are only noted."""
        self._call("ncclGroupStart")

    def group_end(self) -> None:
        """Begin all that was noted, as one operation of each communicator."""
        self._call("ncclGroupEnd")

    def send(self, address: int, nbytes: int, *, peer: int, comm: int, stream: int) -> None:
        """Note a send of bytes, whatever they mean. Sizes have 64 bits."""
        self._call("ncclSend", address, nbytes, _UINT8, peer, comm, stream, comm=comm)

    def recv(self, address: int, nbytes: int, *, peer: int, comm: int, stream: int) -> None:
        """Note a receive of bytes."""
        self._call("ncclRecv", address, nbytes, _UINT8, peer, comm, stream, comm=comm)


@cache
def _loaded() -> Nccl | None:
    library = native.load("libnccl", ("2",), ("nccl",))
    return None if library is None else Nccl(library)
