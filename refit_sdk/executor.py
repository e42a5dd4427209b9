"""The executor: runs a program over groups. The only code that owns window buffers and waits for bytes.

1. Bind the program to live views, once, at the first run; later runs reuse tensors and window buffers.
2. Pack and post window 0. Then for each window k: pack and post k+1 (all receives, then all sends), wait for k, unpack
   k. So two windows are on the way at once, and while copies of one are made the wire has the other. Where k+1 sends on
   what k brings, it waits for k, which hangs on no later window.
3. Look at what was narrowed before it is sent: an overflow fails the engines that would get it.
4. What goes wrong with one engine's group drops that engine: its group is aborted, its steps are skipped from there on,
   and the others go on. An engine once dropped stays so; a new executor on new groups is the recovery.

Windows that are on the way together use different buffers (`refit_sdk.binding`).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Final, cast

import torch
from attrs import define, field, frozen

from refit_sdk.binding import Batch, Bound, BoundWindow, Carried, Finder, Transfer, bind
from refit_sdk.device import Lanes
from refit_sdk.errors import RefitError
from refit_sdk.fabric import Deadline, FabricError, Group, Work, flush, scatters
from refit_sdk.narrowing import NarrowingError
from refit_sdk.program import Program

ABORTED_SECONDS: Final = 10.0
"""How long a work of an aborted group is waited for, which ends after the copy that it is at."""


@frozen(kw_only=True)
class Moved:
    """What one run did. Per engine: bytes sent and arrived, as the fabric's completions count them (copies inside this
    process are neither); the cause if it failed, and the process that was lost if that was it.

    `seconds` has `pack`, `unpack` and `move`, which is from the first post to the last copy, whatever goes on in it.
    `mutated` are the engines of which live target storage on this rank may have been written.
    """

    seconds: Mapping[str, float]
    sent: Mapping[str, int]
    arrived: Mapping[str, int]
    failed: Mapping[str, str]
    lost: Mapping[str, int]
    mutated: frozenset[str]


@define(eq=False)
class _Tally:
    """What a run in progress has done so far."""

    seconds: dict[str, float] = field(factory=lambda: defaultdict(float))
    sent: Counter[str] = field(factory=Counter)
    arrived: Counter[str] = field(factory=Counter)
    mutated: set[str] = field(factory=set)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        begun = perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += perf_counter() - begun

    def moved(self, failed: Mapping[str, str], lost: Mapping[str, int]) -> Moved:
        """What was done, at the end."""
        return Moved(
            seconds={stage: self.seconds[stage] for stage in ("pack", "move", "unpack")},
            sent=self.sent,
            arrived=self.arrived,
            failed=dict(failed),
            lost=dict(lost),
            mutated=frozenset(self.mutated),
        )


@frozen(eq=False)
class _Posted:
    transfer: Transfer
    work: Work
    count: Counter[str]
    mutated: set[str]
    """Where to say that the engine's live storage was written."""

    def wait(self, seconds: float) -> None:
        """Wait, and count. A work that fails and doesn't know that it wrote nothing may have written."""
        engine = self.transfer.engine
        try:
            self.count[engine] += self.work.wait(seconds)
        finally:
            if getattr(self.work, "touched", True):
                self.mutated.add(engine)


class Executor:
    """One process's part of a push. `groups` are the engines' groups by name; both sides' views are of this process.

    `run` is called by one thread at a time; `drop` by any, at any time. `after_window` is told how many windows are
    through, their copies and all, of how many.
    """

    def __init__(
        self,
        program: Program,
        *,
        sources: Finder | None,
        targets: Finder | None,
        groups: Mapping[str, Group],
        after_window: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        engines = {message.engine for window in program.windows for message in (*window.sends, *window.recvs)}
        if missing := sorted(engines - groups.keys()):
            raise RefitError(f"the program has messages for engines {missing}, groups are for {sorted(groups)}")
        self._program = program
        self._sources = sources
        self._targets = targets
        self._groups = dict(groups)
        self._after_window = after_window
        self._bound: Bound | None = None
        self._lanes = Lanes(())
        self._lock = threading.Lock()
        self._failed: dict[str, str] = {}
        self._lost: dict[str, int] = {}
        self._pending: deque[_Posted] = deque()

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the window buffers that are held now."""
        return self._bound.buffer_nbytes if self._bound is not None else 0

    def drop(self, engine: str, cause: str) -> None:
        """Leave an engine out from now on: what is pending with it ends at once. The first cause is kept."""
        self._drop(engine, cause, None)

    def _drop(self, engine: str, cause: str, peer: int | None) -> None:
        with self._lock:
            if engine in self._failed:
                return
            self._failed[engine] = cause
            if peer is not None:
                self._lost[engine] = peer
        if engine in self._groups:
            self._groups[engine].abort(cause)

    def release(self) -> None:
        """Free the window buffers; the next run makes new ones."""
        self._bound = None

    def run(self, deadline: Deadline) -> Moved:
        """Move everything, waiting no longer than the deadline. What fails is in the result, engine by engine.

        Anything but a fabric's error or an overflow is raised, after all groups were aborted: peers don't wait for it.
        """
        try:
            return self._run(self._ready(), deadline)
        except BaseException as error:
            for engine in self._groups:
                self.drop(engine, f"process {self._program.process} failed: {type(error).__name__}: {error}")
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Let what is pending end, which an abort made short, so that nothing is written after an error was raised.
        That error stands, whatever the works say."""
        deadline = Deadline.after(ABORTED_SECONDS)
        while self._pending:
            with suppress(Exception):
                self._pending.popleft().work.wait(deadline.remaining())
        self._lanes.settle()

    def _ready(self) -> Bound:
        if self._bound is None:
            carried = _carried(list(self._groups.values()))
            self._bound = bind(self._program, sources=self._sources, targets=self._targets, carried=carried)
            self._lanes = Lanes(self._bound.devices)
        return self._bound

    def _run(self, bound: Bound, deadline: Deadline) -> Moved:
        tally = _Tally()
        self._lanes.begin()
        total = len(bound.windows)
        self._after_window(0, total)
        self._start(bound.windows[:1], tally)
        with tally.timed("move"):
            for number, window in enumerate(bound.windows):
                due = len(self._pending)
                following = bound.windows[number + 1 : number + 2]
                self._start([each for each in following if each.after < number], tally)
                self._wait(due, deadline)
                self._unpack(window, tally)
                self._start([each for each in following if each.after == number], tally)
                self._after_window(number + 1, total)
        self._lanes.end()
        with self._lock:
            return tally.moved(self._failed, self._lost)

    def _start(self, windows: Sequence[BoundWindow], tally: _Tally) -> None:
        for window in windows:
            if window.after >= 0:
                self._lanes.settle()
            self._pack(window, tally)
            self._lanes.settle()
            self._post(window, tally)

    def _batches(self, window: BoundWindow) -> Iterator[tuple[str, Batch]]:
        """The batches of a window whose engines are still there."""
        for engine, batch in window.batches.items():
            if engine not in self._failed:
                yield engine, batch

    def _pack(self, window: BoundWindow, tally: _Tally) -> None:
        with tally.timed("pack"), self._lanes.packing():
            for engine, batch in self._batches(window):
                try:
                    self._pack_batch(batch)
                except NarrowingError as error:
                    self.drop(engine, str(error))

    def _pack_batch(self, batch: Batch) -> None:
        for tensor in batch.narrowed_locally:
            tensor.check()
        batch.pack.make()
        if batch.narrowed:
            self._lanes.packed()
        for run in batch.narrowed:
            run.check()

    def _unpack(self, window: BoundWindow, tally: _Tally) -> None:
        with tally.timed("unpack"), self._lanes.unpacking():
            for engine, batch in self._batches(window):
                if batch.live:
                    tally.mutated.add(engine)
                batch.local.make()
                batch.unpack.make()

    def _post(self, window: BoundWindow, tally: _Tally) -> None:
        pending = self._pending.append
        for transfer in window.recvs:
            mutated = tally.mutated if transfer.live else set()
            with self._guarded(transfer.engine) as group:
                if group is not None:
                    pending(
                        _Posted(transfer, group.recv(_buffer(transfer), peer=transfer.peer), tally.arrived, mutated)
                    )
        for transfer in window.sends:
            with self._guarded(transfer.engine) as group:
                if group is not None:
                    pending(_Posted(transfer, group.send(_buffer(transfer), peer=transfer.peer), tally.sent, set()))
        for engine in self._groups:
            with self._guarded(engine) as group:
                if group is not None:
                    flush(group)

    @contextmanager
    def _guarded(self, engine: str) -> Iterator[Group | None]:
        """The engine's group, or None if it was dropped. A fabric's error inside drops the engine."""
        try:
            yield self._groups[engine] if engine not in self._failed else None
        except FabricError as error:
            self._drop(engine, str(error), error.peer)

    def _wait(self, count: int, deadline: Deadline) -> None:
        """Wait for the oldest, those of dropped engines too: their works end at once, and then nothing writes any
        more. None is forgotten before it was waited for."""
        for _ in range(count):
            with self._guarded(self._pending[0].transfer.engine):
                self._pending[0].wait(deadline.remaining())
            self._pending.popleft()


def _buffer(transfer: Transfer) -> torch.Tensor:
    """Its bytes. Runs are only bound where every group takes them."""
    return cast(torch.Tensor, transfer.buffer)


def _carried(groups: Sequence[Group]) -> Carried:
    if not groups:
        return Carried()
    devices = frozenset.intersection(*(group.devices for group in groups))
    return Carried(devices=devices, scatters=all(scatters(group) for group in groups))
