"""Streams of the devices that views live on: the only place of the project that knows CUDA. On CPU it does nothing.

1. `begin`: packing and unpacking wait, on the device, for what the caller's stream was given before (the trainer's last
   step, the engine's last read).
2. `packing`, `unpacking`: copies are enqueued on a stream of their own and run beside the transfers.
3. `settle`: the host waits for both, so that what is sent is packed, and what is received anew was unpacked.
4. `end`: the caller's stream waits for what was unpacked, and so does the host: arrived means arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


class Lanes:
    """A stream for packing and one for unpacking on each CUDA device of a rank.

    >>> lanes = Lanes([torch.device("cpu")])
    >>> lanes.begin()
    >>> with lanes.packing():
    ...     pass
    >>> lanes.settle()
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({device for device in devices if device.type == "cuda"}, key=str)
        self._pack = [_stream(device) for device in self._devices]
        self._unpack = [_stream(device) for device in self._devices]

    def begin(self) -> None:
        """Put everything that follows behind what the caller's streams were given so far."""
        for device, pack, unpack in zip(self._devices, self._pack, self._unpack, strict=True):
            given = torch.cuda.current_stream(device).record_event()
            pack.wait_event(given)
            unpack.wait_event(given)

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Copies inside go to the packing streams."""
        with _on(self._pack):
            yield

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Copies inside go to the unpacking streams."""
        with _on(self._unpack):
            yield

    def packed(self) -> None:
        """Wait until what was enqueued for packing is done, so that the host may look at it."""
        for stream in self._pack:
            stream.synchronize()

    def settle(self) -> None:
        """Wait until everything enqueued is done."""
        for stream in (*self._pack, *self._unpack):
            stream.synchronize()

    def end(self) -> None:
        """Put what the caller's streams are given from now on behind everything that was unpacked, and wait for it."""
        for device, unpack in zip(self._devices, self._unpack, strict=True):
            torch.cuda.current_stream(device).wait_stream(unpack)
        self.settle()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _on(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def callers_streams() -> Callable[[], AbstractContextManager[None]]:
    """The CUDA device and streams that this thread works on now, to be entered in another thread, whose own would be
    the defaults. Nothing where CUDA isn't in use, and no device is brought into use by it.

    >>> with callers_streams()():
    ...     pass
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    current = torch.cuda.current_device()
    streams = [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]
    own = [s for s in streams if s.device.index == current or s != torch.cuda.default_stream(s.device)]

    @contextmanager
    def entered() -> Iterator[None]:
        with torch.cuda.device(current), _on(own):
            yield

    return entered


def window_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes; on the host they are pinned where there is a CUDA device to copy from."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
