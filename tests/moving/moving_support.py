"""What tests of moving share: tables to meet at, hand-made programs, values that give a wrong element away, threads.

Nothing here is taken from the planner: a program is made of moves that the test lists.
"""

from __future__ import annotations

import multiprocessing as mp
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import RendezvousError
from refit_sdk.executor import Executor, Moved
from refit_sdk.fabric import Clock, Deadline, Fabric, Group, SystemClock
from refit_sdk.program import Message, Piece, Program, Window
from refit_sdk.views import Views

POISON = 0xAA


class Table:
    """The shared table, for threads of one process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, *, timeout: float) -> bytes:
        deadline = Deadline.after(timeout, clock=self._clock)
        with self._changed:
            while key not in self._values:
                if not (remaining := deadline.remaining()):
                    raise RendezvousError(f"{key!r} was not set in {timeout:g} s")
                self._clock.wait(self._changed, remaining)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            self._changed.notify_all()
            return value

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None


class TcpTable:
    """The shared table, for processes: torch's own server."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    @classmethod
    def client(cls, port: int) -> TcpTable:
        return cls(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, *, timeout: float) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, timeout)))
        except dist.DistStoreError as error:
            raise RendezvousError(f"{key!r} was not set in {timeout:g} s") from error
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def delete(self, key: str) -> bool:
        return self._store.delete_key(key)


class HandClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Condition()
        self._waiting: list[threading.Condition] = []

    def monotonic(self) -> float:
        return self._now

    def wait(self, condition: threading.Condition, timeout: float) -> None:
        with self._lock:
            self._waiting.append(condition)
            self._lock.notify_all()
        condition.wait()

    def until_waiting(self, count: int) -> None:
        """Return once `count` waits have begun, in all."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self._waiting) >= count, 20)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        with self._lock:
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()


def context() -> ForkServerContext:
    """How tests start processes: torch is loaded once."""
    started = mp.get_context("forkserver")
    started.set_forkserver_preload(["torch", "torch._dynamo"])
    return started


Case = Callable[[int, int, Connection], None]
"""What a process does: its number, the port of the table, and its pipe."""


@contextmanager
def started(case: Case, count: int) -> Iterator[tuple[Sequence[BaseProcess], list[Connection]]]:
    """`count` processes that run a case, each with a pipe; none outlives the block."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pairs = [context().Pipe() for _ in range(count)]
    processes = [
        context().Process(target=case, args=(index, server.port, theirs), daemon=True)
        for index, (_, theirs) in enumerate(pairs)
    ]
    try:
        for process, (_, theirs) in zip(processes, pairs, strict=True):
            process.start()
            theirs.close()
        yield processes, [ours for ours, _ in pairs]
    finally:
        for process in processes:
            process.kill()
            process.join()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(60), "a process said nothing for 60 s"
    return pipe.recv()


def threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(i)` in a thread each; the results, or what was raised."""
    results: list[Any] = [None] * count

    def one(index: int) -> None:
        try:
            results[index] = work(index)
        except Exception as error:  # noqa: BLE001 - it is the result
            results[index] = error

    started = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return results


def connect(fabric: Fabric, count: int, *, group: str = "g", store: Any = None) -> list[Any]:
    """The ends of one group of threads 0 … count - 1, or what was raised."""
    table = store or Table()
    return threads(
        count,
        lambda i: fabric.connect(group=group, members=range(count), process=i, store=table, timeout=20),
    )


def truth(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor of random bits that depend on its name, each finite in its dtype."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    whole = torch.empty(shape, dtype=dtype)
    raw = whole.view(-1).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    if dtype.is_floating_point and dtype.itemsize > 1:
        whole.nan_to_num_(nan=1.0, posinf=2.0, neginf=3.0)
    return whole


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def poisoned(view: torch.Tensor) -> torch.Tensor:
    """The same view, with its elements' bytes set to a value that no test expects."""
    filler = torch.full((view.element_size(),), POISON, dtype=torch.uint8).view(view.dtype)
    if view.dtype == torch.bool:
        filler = torch.ones(1, dtype=torch.bool)
    return view.copy_(filler.reshape(()).expand(view.shape)) if view.numel() else view


def fragment(name: str, whole: tuple[int, ...], box: Box, view: torch.Tensor) -> Fragment:
    return Fragment(name, whole, box, view)


@frozen
class Leg:
    """One piece's way, in one window."""

    src: int
    dst: int
    piece: Piece
    engine: str = "e"
    window: int = 0


def programs(legs: Iterable[Leg], *, together: bool = True) -> dict[int, Program]:
    """Each process's program. Legs of a pair, engine and window share a message unless `together` is false."""
    windows: dict[tuple[int, int], list[tuple[str, Message]]] = defaultdict(list)
    copies: dict[tuple[int, int], list[tuple[str, Piece]]] = defaultdict(list)
    for (src, dst, engine, number, _), pieces in _grouped(legs, together).items():
        if src == dst:
            copies[src, number] += [(engine, piece) for piece in pieces]
        else:
            windows[src, number].append(("send", Message(dst, engine, tuple(pieces))))
            windows[dst, number].append(("recv", Message(src, engine, tuple(pieces))))
    made: dict[int, list[Window]] = defaultdict(list)
    for process, number in sorted({*windows, *copies}, key=lambda key: key[1]):
        messages = windows[process, number]
        sends, recvs = (tuple(m for kind, m in messages if kind == wanted) for wanted in ("send", "recv"))
        made[process].append(Window(number, sends, recvs, tuple(copies[process, number])))
    return {process: Program(process, tuple(of)) for process, of in made.items()}


def _grouped(legs: Iterable[Leg], together: bool) -> dict[tuple[int, int, str, int, int], list[Piece]]:
    grouped: dict[tuple[int, int, str, int, int], list[Piece]] = defaultdict(list)
    for index, leg in enumerate(legs):
        grouped[leg.src, leg.dst, leg.engine, leg.window, 0 if together else index].append(leg.piece)
    return grouped


Sides = Mapping[int, Sequence[Fragment]]


def executors(
    fabric: Fabric, legs: Sequence[Leg], sources: Sides, targets: Sides, *, together: bool = True
) -> dict[int, Executor]:
    """One executor a process, on groups of all processes, one an engine."""
    made = programs(legs, together=together)
    members, engines = sorted(made), sorted({leg.engine for leg in legs})
    table = Table()

    def groups(index: int) -> dict[str, Group]:
        return {
            engine: fabric.connect(group=engine, members=members, process=members[index], store=table, timeout=20)
            for engine in engines
        }

    connected = threads(len(members), groups)
    return {
        process: Executor(
            made[process],
            sources=Views(sources.get(process, ())),
            targets=Views(targets.get(process, ())),
            groups=connected[index],
        )
        for index, process in enumerate(members)
    }


def run(made: Mapping[int, Executor], *, seconds: float = 20, clock: Clock | None = None) -> dict[int, Moved]:
    """Run all executors at once; what each says (or raised)."""
    order = sorted(made)
    results = threads(len(order), lambda i: made[order[i]].run(Deadline.after(seconds, clock=clock)))
    return dict(zip(order, results, strict=True))
