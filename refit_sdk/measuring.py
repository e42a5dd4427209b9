"""How fast this machine is, measured: copies by one process, shared memory between processes, and a way to a peer.

1. Copies: one process copies a buffer that no cache holds.
2. Shared memory: pairs of processes send each other large messages over fabric `shm`, first one pair, then one for
   every two processors, and tiny ones back and forth.
3. The network: large and tiny messages over one TCP connection to a peer that takes them and answers (`serving`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from time import monotonic, perf_counter, sleep
from typing import Any, Final

import torch

from refit_sdk.control import Address, Client, connect, listen
from refit_sdk.errors import RefitError
from refit_sdk.joining import serve
from refit_sdk.plugins import registry

LARGE: Final = 16 << 20
"""Bytes of a message that shows how fast a link is."""
TIMES: Final = 24
"""Large messages of a measurement."""
BOUNCES: Final = 200
"""Tiny messages of a measurement, back and forth."""
PATIENCE: Final = 60.0
"""Seconds that anything here may take."""

STARTS: Final = 5.0
"""Seconds for which a peer that doesn't listen yet is called."""

Measure = tuple[str, Callable[[], dict[str, int]]]


def measures(peer: Address | None) -> list[Measure]:
    """What can be measured here, by name; each gives some of the fields of `Speeds`."""
    found: list[Measure] = [] if peer is None else [(f"the network to {peer}", lambda: _network(peer))]
    found.append(("copies", _copies))
    if registry().get("fabric", "shm").missing() is None:
        found.append(("shared memory", _inside))
    return found


def _copies() -> dict[str, int]:
    torch.set_num_threads(1)
    one, other = torch.ones(4 * LARGE, dtype=torch.uint8), torch.zeros(4 * LARGE, dtype=torch.uint8)
    best = float("inf")
    for _ in range(8):
        begun = perf_counter()
        other.copy_(one)
        best = min(best, perf_counter() - begun)
    return {"copy_bytes_per_s": int(one.numel() / best)}


def _inside() -> dict[str, int]:
    alone = _pairs(1)
    pairs = max(1, (os.cpu_count() or 2) // 2)
    together = _pairs(pairs) if pairs > 1 else alone
    speed = int(sum(LARGE * TIMES / seconds for seconds, _ in together))
    return {
        "inside_bytes_per_s": int(LARGE * TIMES / alone[0][0]),
        "inside_latency_ns": int(alone[0][1] * 1e9),
        "host_bytes_per_s": speed,
    }


def _pairs(count: int) -> list[tuple[float, float]]:
    """Seconds for the large messages and for a tiny one, of each of so many pairs at once."""
    with _hub() as port, _children([(port, pair, end) for pair in range(count) for end in range(2)]) as pipes:
        for pipe in pipes:
            _heard(pipe)
        for pipe in pipes:
            pipe.send("go")
        return [_heard(pipe) for pipe in pipes][1::2]


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise RefitError(f"a process that measures said nothing for {PATIENCE:g} s: see what else this machine does")
    try:
        found = pipe.recv()
    except EOFError as error:
        raise RefitError("a process that measures ended: see what it printed") from error
    return found


@contextmanager
def _hub() -> Iterator[int]:
    """A table for processes to meet at."""
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    hub = serve(listener, token=b"", engines=1, deadline=PATIENCE, heartbeat=PATIENCE, hosted_by="refit bench")
    try:
        yield port
    finally:
        hub.close("measured", normal=True)


@contextmanager
def _children(places: list[tuple[int, int, int]]) -> Iterator[list[Connection]]:
    """Processes that measure; none outlives the block."""
    context = mp.get_context("spawn")
    pairs = [context.Pipe() for _ in places]
    made = [
        context.Process(target=_end, args=(*place, theirs), daemon=True)
        for place, (_, theirs) in zip(places, pairs, strict=True)
    ]
    try:
        for process, (_, theirs) in zip(made, pairs, strict=True):
            process.start()
            theirs.close()
        yield [ours for ours, _ in pairs]
    finally:
        for process in made:
            if process.pid is not None:
                process.kill()
                process.join()


def _end(port: int, pair: int, end: int, pipe: Connection) -> None:
    """One end of a pair: 0 sends, 1 receives and times it."""
    torch.set_num_threads(1)
    channel = connect(Address("127.0.0.1", port), token=b"", seconds=PATIENCE)
    client = Client(channel, heartbeat=PATIENCE, urgent=lambda message: None)
    fabric: Any = registry().get("fabric", "shm")()
    group = fabric.connect(group=f"{pair}", members=range(2), process=end, store=client, timeout=PATIENCE)
    with suppress(EOFError, KeyboardInterrupt):
        pipe.send("here")
        pipe.recv()
        pipe.send((_stream(group, end), _bounce(group, end)))
    group.close()
    client.close()


def _stream(group: Any, end: int) -> float:
    buffer = torch.ones(LARGE, dtype=torch.uint8)
    verb = group.recv if end else group.send
    verb(buffer, peer=1 - end).wait(PATIENCE)
    begun = perf_counter()
    for work in [verb(buffer, peer=1 - end) for _ in range(TIMES)]:
        work.wait(PATIENCE)
    return perf_counter() - begun


def _bounce(group: Any, end: int) -> float:
    tiny = torch.zeros(8, dtype=torch.uint8)
    begun = perf_counter()
    for _ in range(BOUNCES):
        for turn in range(2):
            (group.recv if turn ^ end else group.send)(tiny, peer=1 - end).wait(PATIENCE)
    return (perf_counter() - begun) / (2 * BOUNCES)


@contextmanager
def serving(address: Address) -> Iterator[threading.Thread]:
    """Take what comes at an address, and answer each byte that asks; the thread that does."""
    try:
        listener = listen(address)
    except OSError as error:
        raise RefitError(f"this host can't listen at {address}: {error}; give an address of its own") from error
    thread = threading.Thread(target=_serve, args=(listener,), name="refit-bench", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        with caller, suppress(OSError):
            caller.settimeout(PATIENCE)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(caller)


def _answer(caller: socket.socket) -> None:
    """Eight bytes say how many follow; they are taken, and one byte is the answer."""
    room = memoryview(bytearray(1 << 20))
    while len(head := caller.recv(8, socket.MSG_WAITALL)) == 8:
        left = int.from_bytes(head)
        while left:
            left -= caller.recv_into(room, min(left, len(room))) or left
        caller.sendall(b".")


def _network(peer: Address) -> dict[str, int]:
    try:
        with _called(peer) as way:
            way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _sent(way, LARGE)
            seconds = _sent(way, TIMES * LARGE)
            latency = min(_sent(way, 1) for _ in range(BOUNCES)) / 2
    except OSError as error:
        raise RefitError(f"{peer} can't be reached ({error}): run `refit bench link --serve` there") from error
    return {"nic_bytes_per_s": int(TIMES * LARGE / seconds), "nic_latency_ns": int(latency * 1e9)}


def _called(peer: Address) -> socket.socket:
    """A connection, tried again for a while where nobody listens yet."""
    end = monotonic() + STARTS
    while True:
        try:
            return socket.create_connection((peer.host, peer.port), PATIENCE)
        except ConnectionRefusedError:
            if monotonic() >= end:
                raise
            sleep(0.2)


def _sent(way: socket.socket, nbytes: int) -> float:
    """Seconds until so many bytes are taken and answered."""
    piece, begun = bytes(1 << 20), perf_counter()
    way.sendall(nbytes.to_bytes(8))
    for start in range(0, nbytes, len(piece)):
        way.sendall(piece[: min(len(piece), nbytes - start)])
    if not way.recv(1):
        raise OSError("it hung up")
    return perf_counter() - begun
