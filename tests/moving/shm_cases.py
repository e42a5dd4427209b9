"""What the processes that `test_shm` starts do: `case(process, port, pipe)`, with a table at the port."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from moving_support import TcpTable
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric

from refit_sdk.fabric import FabricError, Group, Work

SIZES = (1, 70_001, 5_000_003, 17)
"""Bytes of the messages of a turn; one takes several slots."""


def fabric_of(name: str, process: int) -> Any:
    """A fabric by name; `two hosts` are told by the process's number."""
    return {
        "one copy": ShmFabric,
        "two copies": lambda: ShmFabric(one_copy=False),
        "two hosts": lambda: MixedFabric(shm=ShmFabric(host=f"h{process % 2}")),
    }[name]()


def held() -> tuple[int, int]:
    """Descriptors and threads of this process, the least in 0.1 s: a thread that was joined is still leaving."""
    end, found = time.monotonic() + 0.1, []
    while time.monotonic() < end:
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return min(found)


def exchange(group: Group, process: int, sizes: tuple[int, ...], seconds: float) -> None:
    """Send each size to each peer, receive the same from each, and look at every byte.

    As an executor does: after an error the group is aborted, and what was posted is waited for all the same.
    """
    peers = [peer for peer in range(3) if peer != process]
    into = {(peer, size): torch.zeros(size, dtype=torch.uint8) for peer in peers for size in sizes}
    sent = {size: torch.full((size,), 1 + process, dtype=torch.uint8) for size in sizes}
    works: list[Work] = []
    try:
        works += (group.recv(into[peer, size], peer=peer) for peer in peers for size in sizes)
        works += (group.send(sent[size], peer=peer) for peer in peers for size in sizes)
        assert [work.wait(seconds) for work in works] == [size for _ in (0, 1) for _ in peers for size in sizes]
    except FabricError:
        group.abort("a peer was lost")
        for work in works:
            with contextlib.suppress(FabricError):
                work.wait(seconds)
        raise
    assert all((buffer == 1 + peer).all() for (peer, _), buffer in into.items())


def exchanges_until_one_dies(process: int, port: int, pipe: Connection) -> None:
    """Say what is held, connect, exchange until an error comes; who it names, and what is held after closing."""
    torch.set_num_threads(1)
    table, name = TcpTable.client(port), pipe.recv()
    before = held()
    pipe.send(os.getpid())
    peer: int | None = None
    group: Group | None = None
    try:
        group = fabric_of(name, process).connect(group="g", members=range(3), process=process, store=table, timeout=3)
        pipe.send("connected")
        while True:
            exchange(group, process, SIZES, 30)
    except FabricError as error:
        peer = error.peer
    if group is not None:
        group.close()
    pipe.send(("lost", peer, before, held()))
    pipe.recv()


def twenty_cycles(process: int, port: int, pipe: Connection) -> None:
    """Connect, exchange, close; what is held after each cycle. Cycles end together."""
    torch.set_num_threads(1)
    table, name, found = TcpTable.client(port), pipe.recv(), []
    for cycle in range(20):
        group = fabric_of(name, process).connect(
            group=f"c{cycle}", members=range(3), process=process, store=table, timeout=20
        )
        exchange(group, process, SIZES, 20)
        pipe.send("done")
        pipe.recv()
        group.close()
        found.append(held())
    pipe.send(found)
