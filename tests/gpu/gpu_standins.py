"""The stand-ins, compiled and loaded: libcudart and libnccl for machines without a GPU, and fabrics over them.

Each is the fabric of the product; what differs is the library it calls, and that its memory is the host's.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir
from typing import ClassVar

from refit_backends.cuda_ipc import CudaIpcFabric, CudaIpcGroup
from refit_backends.nccl import NcclFabric
from refit_backends.nccl_group import NcclGroup

SOURCE = Path(__file__).with_name("gpu_standin.c")


@cache
def library() -> str:
    """The path of the stand-in library, compiled if it isn't there."""
    made = Path(gettempdir(), f"gpu_standin-{blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()}.so")
    if not made.exists():
        partial = made.with_suffix(f".{id(made)}")
        flags = ["-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror"]
        subprocess.run(["cc", *flags, "-o", str(partial), str(SOURCE)], check=True)
        partial.rename(made)
    return str(made)


@cache
def standin() -> ctypes.CDLL:
    """The library, for what it counts."""
    loaded = ctypes.CDLL(library())
    loaded.standin_largest.restype = ctypes.c_uint64
    return loaded


@contextmanager
def busy() -> Iterator[None]:
    """No group of this process goes on meanwhile."""
    standin().standin_hold(1)
    try:
        yield
    finally:
        standin().standin_hold(0)


class StandinNcclGroup(NcclGroup):
    """A group whose device memory is the host's."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})


class StandinNccl(NcclFabric):
    """Fabric `nccl` over the stand-in."""

    name: ClassVar[str] = "nccl (stand-in)"
    group_class: ClassVar[type[NcclGroup]] = StandinNcclGroup

    def __init__(self) -> None:
        super().__init__(library=library(), runtime=library())

    @classmethod
    def missing(cls) -> str | None:
        """It is always there."""
        return None


class StandinCudaIpcGroup(CudaIpcGroup):
    """A group whose device memory is the host's."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})


class StandinCudaIpc(CudaIpcFabric):
    """Fabric `cuda_ipc` over the stand-in."""

    name: ClassVar[str] = "cuda_ipc (stand-in)"
    group_class: ClassVar[type[CudaIpcGroup]] = StandinCudaIpcGroup

    def __init__(self) -> None:
        super().__init__(runtime=library(), slot_nbytes=1 << 16)

    @classmethod
    def missing(cls) -> str | None:
        """It is always there."""
        return None
