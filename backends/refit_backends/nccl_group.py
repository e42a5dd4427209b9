"""One process's end of an NCCL communicator: works that are noted, begun together, asked for, and aborted.

A wait asks the event behind its work, and the communicator, until the deadline; then, or when the communicator has
failed, the group is aborted, and it waits until the device is through: what ended is written no more. A communicator is
one whole: who is lost is lost to all pairs, and NCCL doesn't say who it is.
"""

from __future__ import annotations

import math
import threading
from typing import ClassVar, Final, Literal

import torch
from attrs import define, field

from refit_backends.cudart import patiently
from refit_backends.nccl_lane import Lane, Launch
from refit_backends.nccl_library import IN_PROGRESS, SUCCESS, Nccl
from refit_sdk.fabric import Deadline, FabricError

Kind = Literal["send", "recv"]

ABORT_SECONDS: Final = 10.0
"""How long an abort may take on the device before what it was about is given up for lost, and never freed."""


@define(eq=False)
class NcclWork:
    """One send or receive. `touched`: the buffer of a receive may have been written."""

    _group: NcclGroup
    kind: Kind
    peer: int
    buffer: torch.Tensor
    is_noted: bool = field(default=True, init=False)
    launch: Launch | None = field(default=None, init=False)
    touched: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.buffer.numel()

    @property
    def is_through(self) -> bool:
        """Whether the device is through with it."""
        return self.launch is not None and self.launch.is_done

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds."""
        return self._group.finish(self, timeout)


@define(eq=False)
class NcclGroup:
    """One process's end of a communicator. A process may send to itself; what it sends meets what it receives in order.

    `_lock` guards the communicator, which `abort` takes away from the thread that uses it.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    name: str
    _members: tuple[int, ...]
    _process: int
    _nccl: Nccl
    _comm: int
    lane: Lane
    _noted: list[NcclWork] = field(factory=list, init=False)
    _kept: list[NcclWork] = field(factory=list, init=False)
    """What the device may still read or write, though it was aborted."""
    _ended: FabricError | None = field(default=None, init=False)
    _aborting: threading.Thread | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    @property
    def links(self) -> dict[tuple[int, int], str]:
        """What carries the bytes of each link of this process, by (sender, receiver)."""
        peers = [member for member in self._members if member != self._process]
        return {pair: "nccl" for peer in peers for pair in ((self._process, peer), (peer, self._process))}

    @property
    def ended(self) -> FabricError | None:
        """Why the whole group has ended at this process, or None."""
        return self._ended

    @property
    def communicator(self) -> int:
        """The `ncclComm_t`, for collectives; 0 once the group has ended."""
        return self._comm

    def send(self, buffer: torch.Tensor, *, peer: int) -> NcclWork:
        """Note a send. The buffer may change when the work has ended."""
        return self._note("send", buffer, peer)

    def recv(self, buffer: torch.Tensor, *, peer: int) -> NcclWork:
        """Note a receive of exactly the buffer's length."""
        return self._note("recv", buffer, peer)

    def _note(self, kind: Kind, buffer: torch.Tensor, peer: int) -> NcclWork:
        if self._ended is not None:
            raise FabricError(str(self._ended), peer=self._ended.peer)
        if peer not in self._members:
            raise FabricError(f"process {self._process} can't reach process {peer} in the group of {[*self._members]}")
        if buffer.device.type not in self.devices:
            raise FabricError(
                f"fabric nccl carries the memory of {', '.join(sorted(self.devices))} devices, the buffer of "
                f"{buffer.numel()} bytes to {kind} is on {buffer.device}; move the model there, or use fabric='mixed'"
            )
        work = NcclWork(self, kind, peer, buffer)
        self._noted.append(work)
        return work

    def flush(self) -> None:
        """Begin all that was noted, of all groups of the device, which then goes on by itself. Returns at once."""
        self.lane.flush()

    def take_noted(self) -> list[NcclWork]:
        """What was noted since the last time; the lane's from now on."""
        works, self._noted = self._noted, []
        for work in works:
            work.is_noted = False
        return works

    def begin(self, works: list[NcclWork]) -> None:
        """Give works to NCCL, and wait until it began, or the group has ended. Called by the lane's thread."""
        try:
            self._give(works)
            patiently(lambda: self._state() != IN_PROGRESS, Deadline.after(math.inf))
        except FabricError as error:
            self._end(error)
        launch = self.lane.marked()
        for work in works:
            work.launch = launch

    def _give(self, works: list[NcclWork]) -> None:
        with self._lock:
            if not self._comm:
                return
            self._nccl.group_start()
            try:
                for work in works:
                    if not work.nbytes:
                        continue  # nothing travels, and an empty tensor has no address
                    work.touched = True
                    call = self._nccl.send if work.kind == "send" else self._nccl.recv
                    rank = self._members.index(work.peer)
                    call(work.buffer.data_ptr(), work.nbytes, peer=rank, comm=self._comm, stream=self.lane.stream)
            finally:
                self._nccl.group_end()

    def _state(self) -> int:
        """The communicator's; of one that was aborted, that nothing is in progress."""
        with self._lock:
            state = self._nccl.state(self._comm) if self._comm else SUCCESS
            words = self._nccl.words(state, self._comm) if state not in (SUCCESS, IN_PROGRESS) else ""
        if words:
            self._end(FabricError(f"process {self._process} lost its group of {[*self._members]}: NCCL says {words}"))
        return state

    def finish(self, work: NcclWork, timeout: float) -> int:
        """Wait for a work; the bytes carried."""
        deadline = Deadline.after(timeout)
        if work.is_noted and self._ended is None:
            self.lane.flush()

        def is_over() -> bool:
            done = work.is_through
            self._state()
            return done or self._ended is not None

        if not patiently(is_over, deadline):
            verb = "take" if work.kind == "send" else "send"
            late = f"waited up to {timeout:g} s for process {work.peer} to {verb} {work.nbytes} bytes"
            self._end(FabricError(late, peer=work.peer))
        if self._ended is None:
            return work.nbytes
        self._let_go(work)
        raise FabricError(str(self._ended), peer=self._ended.peer)

    def _let_go(self, work: NcclWork) -> None:
        """Wait until the device is through with what was aborted. What it isn't through with is never freed."""
        deadline = Deadline.after(ABORT_SECONDS)
        if self._aborting is not None:
            self._aborting.join(deadline.remaining())
        if work.touched and not patiently(lambda: work.is_through, deadline):
            self._kept.append(work)

    def abort(self, reason: str) -> None:
        """End every pending and later operation with a `FabricError` that gives the reason. Returns at once."""
        self._end(FabricError(reason))

    def _end(self, error: FabricError) -> None:
        with self._lock:
            if self._ended is not None:
                return
            comm, self._comm = self._comm, 0
            # Other members may have to come into the same call, so nobody waits here for it.
            abort = threading.Thread(target=self._nccl.abort, args=(comm,), name="refit-nccl-abort", daemon=True)
            abort.start()
            self._aborting, self._ended = abort, error

    def close(self) -> None:
        """Free the communicator, and with the device's last group its stream. A second call does nothing."""
        self._end(FabricError(f"process {self._process} closed its group of {list(self._members)}"))
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)
        if not self._kept:
            self.lane.get_off(self)
