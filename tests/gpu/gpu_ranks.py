"""What the processes that cases start do: `case(process, port, pipe)`, with a table at the port.

The first word from the pipe says where: on a GPU, or on the stand-in of one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_cases import Place, held
from moving_support import TcpTable

from refit_sdk.fabric import FabricError, Group, Work, flush


def sizes_of(place: Place) -> tuple[int, ...]:
    """Bytes of the messages of a turn; the large one takes several slots, more than a ring has."""
    return (1, 70_001, place.large, 0, 17)


@contextmanager
def asleep() -> Iterator[None]:
    """The caller's stream has something to do for a second or two."""
    torch.cuda._sleep(3_000_000_000)  # cycles
    yield


def place_of(where: str) -> Place:
    """`cuda_ipc` or `nccl` on the current device; with ` (stand-in)` behind it, on the host."""
    name, _, standin = where.partition(" ")
    if standin:
        import gpu_standins

        made: Any = {"cuda_ipc": gpu_standins.StandinCudaIpc, "nccl": gpu_standins.StandinNccl}[name]
        return Place(torch.device("cpu"), made, gpu_standins.busy)
    from refit_backends.cuda_ipc import CudaIpcFabric
    from refit_backends.nccl import NcclFabric

    made = {"cuda_ipc": CudaIpcFabric, "nccl": NcclFabric}[name]
    return Place(torch.device("cuda", torch.cuda.current_device()), made, asleep, large=70_000_003)


def told(pipe: Connection) -> tuple[Place, int, int]:
    """Where, how many members, and how often; the environment that comes along is taken over first."""
    where, members, turns, environment = pipe.recv()
    os.environ.update(environment)
    return place_of(where), members, turns


def connected(process: int, port: int, place: Place, members: int, group: str = "g") -> Group:
    """This process's end of a group."""
    made: Group = place.make().connect(
        group=group, members=range(members), process=process, store=TcpTable.client(port), timeout=60
    )
    return made


def exchange(group: Group, process: int, members: int, place: Place, seconds: float) -> float:
    """Send each size to each peer, receive the same from each, and look at every byte, as an executor does; the seconds
    that it took without the looking."""
    peers, sizes = [peer for peer in range(members) if peer != process], sizes_of(place)
    into = {(peer, size): place.empty(size) for peer in peers for size in sizes}
    sent = {size: place.random(size, seed=process) for size in sizes}
    works: list[Work] = []
    begun = time.monotonic()
    try:
        works += (group.recv(into[peer, size], peer=peer) for peer in peers for size in sizes)
        works += (group.send(sent[size], peer=peer) for peer in peers for size in sizes)
        flush(group)
        assert [work.wait(seconds) for work in works] == [size for _ in (0, 1) for _ in peers for size in sizes]
    except FabricError:
        group.abort("a peer was lost")
        for work in works:
            with contextlib.suppress(FabricError):
                work.wait(seconds)
        raise
    took = time.monotonic() - begun
    right = {peer: place.random(place.large, seed=peer) for peer in peers}
    for (peer, size), buffer in into.items():
        assert torch.equal(buffer, right[peer] if size == place.large else place.random(size, seed=peer))
    return took


def exchanges(process: int, port: int, pipe: Connection) -> None:
    """A few turns of all with all; says "done", with the bytes per second of the fastest."""
    place, members, turns = told(pipe)
    group = connected(process, port, place, members)
    took = min(exchange(group, process, members, place, 60) for _ in range(turns))
    rate = sum(sizes_of(place)) * (members - 1) / took
    pipe.send(("done", rate, dict(group.links)))  # type: ignore[attr-defined]
    pipe.recv()
    group.close()
    pipe.send("closed")


def exchanges_until_one_dies(process: int, port: int, pipe: Connection) -> None:
    """Turn after turn; says "connected", and then which peer an error named, after how many seconds of waiting."""
    place, members, _ = told(pipe)
    group = connected(process, port, place, members)
    pipe.send("connected")
    try:
        while True:
            exchange(group, process, members, place, 5)
    except FabricError as error:
        pipe.send(("lost", error.peer, str(error)))
    group.close()
    pipe.send("closed")


def cycles(process: int, port: int, pipe: Connection) -> None:
    """Twelve groups, one after the other; says what each left held."""
    place, members, count = told(pipe)
    left = []
    for number in range(count):
        group = connected(process, port, place, members, f"g{number}")
        exchange(group, process, members, place, 60)
        group.close()
        left.append(held())
    pipe.send(left)
