"""Shared memory beside plain copies by as many processes, and beside gloo: message by message, in the same run.

    python tests/benchmarks/bench_shm.py [--pairs 1] [--mib 256] [--message-mib 16] [--turns 21] [--json FILE]

Sources each send their bytes to one target, in messages of one size, all posted at once. Contenders take turns; what
counts is the median of the ratios in a turn, seconds are for orientation. Contenders:

- `two plain copies`: each source copies its bytes into memory that both share, each target as much out of it, all
  at once, and nobody waits for anybody: what a perfectly overlapped pipeline through shared memory would take;
- `shm`: the fabric where no peer's memory is read, compared with that;
- `one plain copy`: each target copies as much out of shared memory, and sources do nothing;
- `shm (one copy)`: the fabric where the kernel lets targets read, compared with that;
- `gloo`: compared with `two plain copies`.

A plain copy is `Tensor.copy_`, a message at a time, on one thread: what packing and unpacking are made of.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from refit_backends.gloo import GlooFabric
from refit_backends.shm import ShmFabric

sys.path.append(str(Path(__file__).parents[1] / "moving"))
from moving_support import TcpTable

MIB = 1 << 20
AGAINST = {
    "two plain copies": "two plain copies",
    "shm": "two plain copies",
    "gloo": "two plain copies",
    "one plain copy": "one plain copy",
    "shm (one copy)": "one plain copy",
}
"""Each contender, and the one that it is compared with."""


def carrying(fabric: Any, name: str, process: int, told: argparse.Namespace, table: TcpTable) -> Callable[[], None]:
    """The bytes as messages of a fabric."""
    members = range(2 * told.pairs)
    group = fabric.connect(group=name, members=members, process=process, store=table, timeout=60)
    peer = (process + told.pairs) % (2 * told.pairs)
    whole = torch.full((told.mib * MIB,), process + 1, dtype=torch.uint8)
    messages = whole.split(int(told.message_mib * MIB))

    def run() -> None:
        post = group.send if process < told.pairs else group.recv
        for work in [post(message, peer=peer) for message in messages]:
            work.wait(600)

    run()
    assert process < told.pairs or bool((whole == peer + 1).all())
    return run


def copying(process: int, told: argparse.Namespace, *, sources_too: bool) -> Callable[[], None]:
    """The same bytes as plain copies: into shared memory at sources, out of it at targets."""
    nbytes = told.mib * MIB
    shared = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    own = torch.ones(nbytes, dtype=torch.uint8)
    shared.fill_(1)
    size = int(told.message_mib * MIB)
    pairs = list(zip(shared.split(size), own.split(size), strict=True))
    if process >= told.pairs:
        pairs = [(mine, ours) for ours, mine in pairs]
    elif not sources_too:
        pairs = []

    def run() -> None:
        for into, source in pairs:
            into.copy_(source)

    run()
    return run


def rank(process: int, port: int, told: argparse.Namespace, barrier: Any, pipe: Any) -> None:
    """One process: runs a contender when told."""
    torch.set_num_threads(1)
    table = TcpTable.client(port)
    made = {
        "two plain copies": copying(process, told, sources_too=True),
        "shm": carrying(ShmFabric(one_copy=False), "two", process, told, table),
        "one plain copy": copying(process, told, sources_too=False),
        "shm (one copy)": carrying(ShmFabric(), "one", process, told, table),
        "gloo": carrying(GlooFabric(), "gloo", process, told, table),
    }
    pipe.send(None)
    while (name := pipe.recv()) is not None:
        barrier.wait()
        begun, used = time.monotonic(), time.process_time()
        made[name]()
        pipe.send((begun, time.monotonic(), time.process_time() - used))


def measure(told: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all contenders in turns; a row each."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    barrier = context.Barrier(2 * told.pairs)
    pipes = [context.Pipe() for _ in range(2 * told.pairs)]
    processes = [
        context.Process(target=rank, args=(process, server.port, told, barrier, theirs), daemon=True)
        for process, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    for pipe in ours:
        pipe.recv()
    rows = _take_turns(ours, told)
    for pipe, process in zip(ours, processes, strict=True):
        pipe.send(None)
        process.join()
    return rows


def _take_turns(pipes: Sequence[Any], told: argparse.Namespace) -> list[dict[str, Any]]:
    names = list(AGAINST)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(told.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for pipe in pipes:
                pipe.send(name)
            spans = [pipe.recv() for pipe in pipes]
            seconds[name].append(max(end for _, end, _ in spans) - min(begun for begun, _, _ in spans))
            processor[name].append(sum(used for _, _, used in spans))
    return [
        {
            "what": name,
            "against": against,
            "seconds": statistics.median(seconds[name]),
            "gb_per_s": told.pairs * told.mib * MIB / statistics.median(seconds[name]) / 1e9,
            "ratio": statistics.median(a / b for a, b in zip(seconds[name], seconds[against], strict=True)),
            "spread": [min(seconds[name]), max(seconds[name])],
            "cpu_seconds": statistics.median(processor[name]),
        }
        for name, against in AGAINST.items()
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table."""
    print(f"{'what':18} {'seconds':>8} {'GB/s':>6} {'CPU s':>6} {'ratio':>6}   against            fastest..slowest")
    for row in rows:
        low, high = row["spread"]
        numbers = f"{row['seconds']:8.3f} {row['gb_per_s']:6.2f} {row['cpu_seconds']:6.2f} {row['ratio']:6.2f}"
        print(f"{row['what']:18} {numbers}   {row['against']:18} {low:.3f}..{high:.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1, help="sources, and as many targets")
    parser.add_argument("--mib", type=int, default=256, help="MiB that each source sends")
    parser.add_argument("--message-mib", type=float, default=16.0)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    told = parser.parse_args()
    rows = measure(told)
    show(rows)
    if told.json is not None:
        told.json.write_text(json.dumps({"pairs": told.pairs, "mib": told.mib, "rows": rows}))


if __name__ == "__main__":
    main()
