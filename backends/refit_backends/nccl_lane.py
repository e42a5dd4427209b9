"""The one stream of a device on which NCCL works for this process, and the order in which groups come onto it.

1. A send or receive is only noted. `flush` hands over what was noted since the last, of all groups of the device: what
   an executor posted for one window. The first wait does the same where nobody called it.
2. A thread gives it to NCCL: window by window, and in each group by group in the order of their names. All processes
   have the same windows in the same order, and groups the same names, so whatever one waits for was begun, or comes
   before what it begins.
3. A group's part is one operation of NCCL: behind what the caller's stream was given at the flush, and before an event,
   which is all that is asked from then on. Nobody waits for a device or a stream.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from refit_backends.cudart import Cuda, callers_stream

if TYPE_CHECKING:
    from refit_backends.nccl_group import NcclGroup, NcclWork


@define(eq=False)
class Launch:
    """What a group began at once. `event` comes behind it on the stream."""

    _lane: Lane
    _event: int
    _is_done: bool = field(default=False, init=False)

    @property
    def is_done(self) -> bool:
        """Whether the device is through with it."""
        if not self._is_done and self._lane.cuda.is_done(self._event):
            self._is_done = True
            self._lane.take_back(self._event)
        return self._is_done


@frozen(eq=False)
class Batch:
    """What was noted for one window, group by group. `event` stands for what the caller's stream was given before."""

    event: int
    parts: tuple[tuple[NcclGroup, list[NcclWork]], ...]


@define(eq=False)
class Lane:
    """A device's stream and thread, made when the first group gets on and freed when the last gets off."""

    cuda: Cuda
    device: int
    stream: int = field(default=0, init=False)
    _riders: dict[str, NcclGroup] = field(factory=dict, init=False)
    _free: list[int] = field(factory=list, init=False)
    _events: list[int] = field(factory=list, init=False)
    _batches: deque[Batch | None] = field(factory=deque, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def get_on(self, rider: NcclGroup) -> None:
        """A group that has a communicator now."""
        with self._changed, self.cuda.on(self.device):
            if self._thread is None:
                self.stream = self.cuda.stream()
                self._thread = threading.Thread(target=self._serve, name="refit-nccl", daemon=True)
                self._thread.start()
            self._riders[rider.name] = rider

    def get_off(self, rider: NcclGroup) -> None:
        """A group that is closed. Nothing of it is on the stream."""
        with self._changed:
            if self._riders.pop(rider.name, None) is None or self._riders:
                return
            thread, self._thread = self._thread, None
            self._batches.append(None)
            self._changed.notify()
        if thread is not None:
            thread.join()
        with self.cuda.on(self.device):
            self.cuda.free_stream(self.stream)
            for event in self._events:
                self.cuda.free_event(event)
        self._free.clear()
        self._events.clear()

    def flush(self) -> None:
        """Hand over all that was noted, of all groups. Returns at once."""
        with self._changed, self.cuda.on(self.device):
            parts = [(rider, rider.take_noted()) for _, rider in sorted(self._riders.items())]
            if not any(works for _, works in parts):
                return
            event = self._taken()
            self.cuda.record(event, callers_stream(self.device))
            self._batches.append(Batch(event, tuple(parts)))
            self._changed.notify()

    def _serve(self) -> None:
        self.cuda.use(self.device)
        while (batch := self._next()) is not None:
            self.cuda.wait_for(self.stream, batch.event)
            self.take_back(batch.event)
            for group, works in batch.parts:
                if works:
                    group.begin(works)

    def _next(self) -> Batch | None:
        with self._changed:
            while not self._batches:
                self._changed.wait()
            return self._batches.popleft()

    def marked(self) -> Launch:
        """All that the lane was given so far."""
        event = self._taken()
        self.cuda.record(event, self.stream)
        return Launch(self, event)

    def _taken(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            self._events.append(self.cuda.event())
            return self._events[-1]

    def take_back(self, event: int) -> None:
        """An event that is asked no more."""
        self._free.append(event)
