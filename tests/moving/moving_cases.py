"""What the processes that `test_processes` starts do: `case(process, port, pipe)`, with a table at the port."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from moving_support import Leg, TcpTable, bits, fragment, poisoned, programs, truth
from refit_backends.gloo import GlooFabric
from torch.distributed import distributed_c10d

from refit_sdk.box import Box
from refit_sdk.executor import Executor
from refit_sdk.fabric import Deadline, FabricError
from refit_sdk.program import Piece
from refit_sdk.views import Views

ROWS, COLUMNS, WINDOWS = 8, 6, 4


def registry() -> dict[str, Any]:
    """Everything that torch knows of groups."""
    world = distributed_c10d._world
    return {
        "default": world.default_pg,
        "map": dict(world.pg_map),
        "names": dict(world.pg_names),
        "ranks": dict(world.pg_group_ranks),
        "tags": dict(world.tags_to_pg),
        "count": world.group_count,
        "is_initialized": dist.is_initialized(),
    }


@contextlib.contextmanager
def job_of_its_own(process: int, table: TcpTable) -> Iterator[str]:
    """0 and 1 have a default group, so has 2 (of one), and 3 has none."""
    if process == 3:
        yield "none"
        return
    job, rank, size = ("trainer", process, 2) if process < 2 else ("engine", 0, 1)
    dist.init_process_group("gloo", store=dist.PrefixStore(job, table._store), rank=rank, world_size=size)
    try:
        yield job
    finally:
        dist.destroy_process_group()


def registry_is_untouched(process: int, port: int, pipe: Connection) -> None:
    """A group across three jobs, moved over, used and closed while the jobs' own groups work."""
    table = TcpTable.client(port)
    with job_of_its_own(process, table) as job:
        before = registry()
        group = GlooFabric().connect(group="g", members=range(4), process=process, store=table, timeout=20)
        during = registry()
        peer = (process + 2) % 4
        received = torch.zeros(3, dtype=torch.uint8)
        recv = group.recv(received, peer=peer)
        group.send(torch.full((3,), process + 1, dtype=torch.uint8), peer=peer).wait(10)
        recv.wait(10)
        total = torch.tensor([process + 1.0])
        if job == "trainer":
            dist.all_reduce(total)
        group.close()
        pipe.send((before == during == registry(), received.tolist(), total.item(), job))
        pipe.recv()


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def twenty_cycles(process: int, port: int, pipe: Connection) -> None:
    """Connect, move, close; what is held after each cycle. Cycles end together."""
    table, found = TcpTable.client(port), []
    whole = truth("w", (ROWS, COLUMNS), torch.float32)
    for cycle in range(20):
        group = GlooFabric().connect(group=f"c{cycle}", members=range(3), process=process, store=table, timeout=20)
        view, executor = _crossing(process, group, whole)
        executor.run(Deadline.after(20))
        assert process == 0 or bits(view) == bits(whole[:, _columns(process)])
        executor.release()
        group.close()
        pipe.send("closed")
        pipe.recv()
        found.append((*held(), registry()["count"], len(registry()["map"])))
    pipe.send(found)


def _columns(process: int) -> slice:
    return slice(0, 2) if process == 1 else slice(2, COLUMNS)


def _crossing(process: int, group: Any, whole: torch.Tensor) -> tuple[torch.Tensor, Executor]:
    """0 has the rows, 1 and 2 want columns, row by row."""
    boxes = {1: Box((0, 0), (ROWS, 2)), 2: Box((0, 2), (ROWS, COLUMNS))}
    legs = [
        Leg(0, dst, Piece("w", box.narrow(0, 2 * window, 2 * window + 2), "float32"), window=window)
        for window in range(WINDOWS)
        for dst, box in boxes.items()
    ]
    view = whole.clone() if process == 0 else poisoned(torch.empty(boxes[process].shape).t().contiguous().t())
    views = Views([fragment("w", tuple(whole.shape), boxes.get(process, Box.whole(whole.shape)), view)])
    return view, Executor(programs(legs)[process], sources=views, targets=views, groups={"e": group})


def two_engines(process: int, port: int, pipe: Connection) -> None:
    """0 sends to engines a (1, 2) and b (3), a window at a time; 2 ends itself, or stops, before it receives."""
    table = TcpTable.client(port)
    how = pipe.recv()
    members = {"a": [0, 1, 2], "b": [0, 3]}
    groups = {
        engine: GlooFabric().connect(group=engine, members=those, process=process, store=table, timeout=20)
        for engine, those in members.items()
        if process in those
    }
    pipe.send("connected")
    pipe.recv()
    if process == 2:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    view, executor = _row_by_row(process, groups)
    if how == "stop" and process == 0:
        threading.Thread(target=_drop_when_told, args=(pipe, executor)).start()
    moved = executor.run(Deadline.after(50 if how == "kill" or process != 1 else 1.5))
    right = bits(view) == bits(truth("w", (WINDOWS, 1 << 16), torch.float32)) if process else True
    pipe.send((moved.failed, moved.lost, moved.arrived, moved.mutated, right))


def _drop_when_told(pipe: Connection, executor: Executor) -> None:
    executor.drop("a", pipe.recv())


def _row_by_row(process: int, groups: Any) -> tuple[torch.Tensor, Executor]:
    """Rows of 256 KiB, transposed at both ends, so that nothing is written before it is unpacked."""
    whole, box = truth("w", (WINDOWS, 1 << 16), torch.float32), Box.whole((WINDOWS, 1 << 16))
    legs = [
        Leg(0, dst, Piece("w", box.narrow(0, window, window + 1), "float32"), engine, window)
        for window in range(WINDOWS)
        for dst, engine in ((1, "a"), (2, "a"), (3, "b"))
    ]
    storage = torch.empty(1 << 16, WINDOWS)
    view = storage.t().copy_(whole) if process == 0 else poisoned(storage.t())
    views = Views([fragment("w", tuple(whole.shape), box, view)])
    return view, Executor(programs(legs)[process], sources=views, targets=views, groups=groups)


def dies_while_joining(process: int, port: int, pipe: Connection) -> None:
    """Everybody answers the roll call, then 2 ends itself while the others connect."""
    table = TcpTable.client(port)
    if process == 2:
        table.set("g/here/2", b"127.0.0.1")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        GlooFabric().connect(group="g", members=range(3), process=process, store=table, timeout=1.5)
        pipe.send("connected")
    except FabricError as error:
        pipe.send((type(error).__name__, str(error)))
