"""What fabrics need of the CUDA runtime: streams, events, plain allocations and their handles for other processes.

It's the library that torch has loaded, called through ctypes: torch's own classes offer no handles of allocations, and
no stream on which another library may work. Handles, streams and events are integers and bytes here.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Final

import torch

from refit_backends import native
from refit_sdk.fabric import Deadline, FabricError

HANDLE_NBYTES: Final = 64
NOT_READY: Final = 600

_NON_BLOCKING: Final = 1
_NO_TIMING: Final = 2
_ANY_DIRECTION: Final = 4
_PEER_ACCESS: Final = 1

_SHORTEST: Final = 20e-6
_LONGEST: Final = 500e-6
"""Seconds between two questions to the device: at first, and after some in vain."""


class MemoryHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`: bytes that another process of the host can open."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_NBYTES),)


_SIGNATURES: Final = {
    "cudaRuntimeGetVersion": (POINTER(c_int),),
    "cudaGetDevice": (POINTER(c_int),),
    "cudaSetDevice": (c_int,),
    "cudaDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cudaGetLastError": (),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
    "cudaEventDestroy": (c_void_p,),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaMemcpy": (c_void_p, c_void_p, c_size_t, c_int),
    "cudaIpcGetMemHandle": (POINTER(MemoryHandle), c_void_p),
    "cudaIpcOpenMemHandle": (POINTER(c_void_p), MemoryHandle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
}


def why_no_device() -> str | None:
    """Why this process has no CUDA device to use, or None if it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build from PyTorch's own index"
    if not torch.cuda.is_available():
        return "no CUDA device is visible; see `nvidia-smi`, and CUDA_VISIBLE_DEVICES"
    return None


def why_not(*found: Callable[[], object]) -> str | None:
    """Why a fabric for CUDA can't be used here, or None. `found` look for the libraries that it needs."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}; use fabric 'gloo'"
    if why := why_no_device():
        return why
    try:
        for look in found:
            look()
    except FabricError as error:
        return str(error)
    return None


class Cuda:
    """The CUDA runtime. `FabricError` with the runtime's own words where a call fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.path = native.path_of(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (c_int,), c_char_p

    @classmethod
    def found(cls, path: str | None = None) -> Cuda:
        """The runtime that torch has loaded, or that of a path. `FabricError` where there is none."""
        if path is not None:
            return cls(ctypes.CDLL(path))
        runtime = _runtime()
        if runtime is None:
            raise FabricError(
                "no CUDA runtime (libcudart.so.12 or .13) is loaded or found; install a CUDA build of torch, or "
                "nvidia-cuda-runtime"
            )
        return runtime

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(code).decode()
            raise FabricError(f"{name} failed: {text} ({code})")

    def version(self) -> int:
        """Of the runtime, as 12080 for 12.8."""
        value = c_int()
        self._call("cudaRuntimeGetVersion", byref(value))
        return value.value

    def device(self) -> int:
        """The device that this thread works on."""
        value = c_int()
        self._call("cudaGetDevice", byref(value))
        return value.value

    def use(self, device: int) -> None:
        """Let this thread work on a device."""
        self._call("cudaSetDevice", device)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Work on a device, and then on the one before again."""
        before = self.device()
        if before == device:
            yield
            return
        self.use(device)
        try:
            yield
        finally:
            self.use(before)

    def bus(self, device: int) -> str:
        """A device's PCI address, which is the same for all processes of a host."""
        text = ctypes.create_string_buffer(32)
        self._call("cudaDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode()

    def stream(self) -> int:
        """A new stream of the current device, which waits for no other."""
        made = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(made), _NON_BLOCKING)
        return made.value or 0

    def free_stream(self, stream: int) -> None:
        """Give a stream back; what is on it is done first."""
        self._call("cudaStreamDestroy", stream)

    def event(self) -> int:
        """A new event of the current device."""
        made = c_void_p()
        self._call("cudaEventCreateWithFlags", byref(made), _NO_TIMING)
        return made.value or 0

    def free_event(self, event: int) -> None:
        """Give an event back."""
        self._call("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that a stream was given so far."""
        self._call("cudaEventRecord", event, stream)

    def wait_for(self, stream: int, event: int) -> None:
        """Put what a stream is given from now on behind an event, on the device."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        """Whether what an event stands for is done. Asks, and waits for nothing."""
        code = self._library.cudaEventQuery(event)
        if code == NOT_READY:
            self._library.cudaGetLastError()  # else torch would find it, and take it for an error of its own
            return False
        if code:
            raise FabricError(f"cudaEventQuery failed: {self._library.cudaGetErrorString(code).decode()} ({code})")
        return True

    def allocate(self, nbytes: int) -> int:
        """The address of new device memory, of a plain kind that other processes can open."""
        made = c_void_p()
        self._call("cudaMalloc", byref(made), nbytes)
        return made.value or 0

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cudaFree", address)

    def copy(self, into: int, out_of: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two memories."""
        self._call("cudaMemcpyAsync", into, out_of, nbytes, _ANY_DIRECTION, stream)

    def write(self, into: int, data: bytes) -> None:
        """Copy bytes of the host to device memory, at once."""
        self._call("cudaMemcpy", into, data, len(data), _ANY_DIRECTION)

    def read(self, out_of: int, nbytes: int) -> bytes:
        """Copy device memory to the host, at once."""
        text = ctypes.create_string_buffer(nbytes)
        self._call("cudaMemcpy", text, out_of, nbytes, _ANY_DIRECTION)
        return text.raw

    def export(self, address: int) -> bytes:
        """The handle by which another process of the host opens memory that was allocated here."""
        handle = MemoryHandle()
        self._call("cudaIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address, in this process, of memory that another one exported."""
        made = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(made), MemoryHandle.from_buffer_copy(handle), _PEER_ACCESS)
        return made.value or 0

    def close(self, address: int) -> None:
        """Close memory that was opened."""
        self._call("cudaIpcCloseMemHandle", address)


def patiently(done: Callable[[], bool], deadline: Deadline) -> bool:
    """Ask until it's so; False if it isn't by the deadline. It asks at least once.

    >>> patiently(lambda: True, Deadline.after(0)), patiently(lambda: False, Deadline.after(0))
    (True, False)
    """
    pause = _SHORTEST
    while not done():
        if not deadline.remaining():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return True


@cache
def _runtime() -> Cuda | None:
    packages = ("cuda_runtime", "cu13", "cu12")
    library = native.load("libcudart", ("12", "13"), packages)
    return None if library is None else Cuda(library)


def callers_stream(device: int) -> int:
    """The stream that torch works on in this thread; the default one where torch doesn't use CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)
