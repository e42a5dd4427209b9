"""Fabric `cuda_ipc`: CUDA tensors between processes of one host, through device memory that they share.

1. Find who shares this host, and connect to each by a Unix socket, as fabric `shm` does. All members must.
2. Share one plain allocation each (`cuda_ipc_memory`), by handles that travel as bytes.
3. Serve all peers by one thread (`links`), chunk by chunk (`cuda_ipc_link`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from attrs import define, field

from refit_backends.cuda_ipc_link import CudaIpcLink, Streams
from refit_backends.cuda_ipc_memory import SLOT_NBYTES, SharedMemory
from refit_backends.cudart import Cuda, callers_stream, why_not
from refit_backends.links import Kind, Link, LinkGroup, Listen, Operation
from refit_backends.shm import ShmFabric
from refit_backends.shm_meeting import Met
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue
from refit_sdk.hookspecs import hookimpl
from refit_sdk.runs import Runs


@define(eq=False)
class CudaIpcGroup(LinkGroup):
    """One process's end of a group over device memory."""

    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    scatters: ClassVar[bool] = False
    _streams: Streams | None = field(default=None, init=False)
    _posting: threading.Lock = field(factory=threading.Lock, init=False)

    def _start(self, links: Sequence[Link]) -> None:
        assert isinstance(links[0], CudaIpcLink)
        self._streams = links[0].streams
        LinkGroup._start(self, links)

    def _post(self, kind: Kind, buffer: torch.Tensor | Runs, peer: int) -> Operation:
        if isinstance(buffer, Runs) or buffer.device.type not in self.devices or not buffer.is_contiguous():
            what = "runs" if isinstance(buffer, Runs) else f"a buffer on {buffer.device}"
            raise FabricError(
                f"fabric cuda_ipc carries contiguous memory of {', '.join(sorted(self.devices))} devices, and was "
                f"given {what} to {kind}; move the model there, or use fabric='mixed'"
            )
        if self._streams is not None:
            memory = self._streams.memory
            with self._posting, memory.cuda.on(memory.device):
                self._streams.follow(callers_stream(memory.device))
        return LinkGroup._post(self, kind, buffer, peer)

    def _serve(self) -> None:
        if self._streams is not None:
            self._streams.memory.cuda.use(self._streams.memory.device)
        LinkGroup._serve(self)


class CudaIpcFabric:
    """Device memory between all processes of a group, which must share a host, each on `device`, or on the one that is
    current when it connects. `host` overrides REFIT_HOST. Each peer takes four slots of `slot_nbytes` bytes of device
    memory. `runtime` is the path of libcudart, where it isn't to be the one that torch has loaded.

    >>> CudaIpcFabric(device=0).name
    'cuda_ipc'
    """

    name: ClassVar[str] = "cuda_ipc"
    group_class: ClassVar[type[CudaIpcGroup]] = CudaIpcGroup

    def __init__(
        self,
        *,
        device: int | None = None,
        host: str | None = None,
        slot_nbytes: int = SLOT_NBYTES,
        runtime: str | None = None,
    ) -> None:
        self._device = device
        self._meeting = ShmFabric(host=host, one_copy=False)
        self._slot_nbytes = slot_nbytes
        self._runtime = runtime

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here and what to install, or None if it can."""
        return why_not(Cuda.found)

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> CudaIpcGroup:
        """Connect to all members. `FabricError` naming who doesn't come, or who can't open whose memory."""
        if len(members) == 1:
            return self.group_class(tuple(members), process)
        deadline = Deadline.after(timeout)
        cuda = Cuda.found(self._runtime)
        device = cuda.device() if self._device is None else self._device
        about: dict[str, Any] = {"group": group, "members": members, "process": process, "store": store}
        about["deadline"] = deadline
        met = self._meeting.meet_all(**about, asks=self.name)
        with cuda.on(device):
            memory = SharedMemory.made(cuda, device, met.peers, slot_nbytes=self._slot_nbytes)
            try:
                memory.share(**about)
            except BaseException:
                memory.free()
                met.part()
                raise
            return self._over(met, Streams.made(memory), members=members, process=process)

    def _over(self, met: Met, streams: Streams, *, members: Sequence[int], process: int) -> CudaIpcGroup:
        def make(listen: Listen) -> list[CudaIpcLink]:
            return [CudaIpcLink(process, peer, each.socket, listen, streams) for peer, each in met.peers.items()]

        def close() -> None:
            streams.memory.free()
            streams.free()

        return self.group_class.over(make, members=members, process=process, words=_words(met, process), on_close=close)


def _words(met: Met, process: int) -> dict[tuple[int, int], str]:
    return {pair: "cuda_ipc" for peer in met.peers for pair in ((process, peer), (peer, process))}


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [CudaIpcFabric]
