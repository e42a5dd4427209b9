"""How near the executor comes to the wire, which is the same processes' bytes per pair as one message each, at once.

    python tests/benchmarks/bench_push.py [--sources 2] [--targets 2] [--mib 1024] [--turns 7] [--json FILE]

Contenders of a case take turns, and what counts is the median of the ratios in a turn; seconds are for orientation.
CPU seconds are of all processes together: over loopback the wire is CPU too, so packing can't hide behind it for long.
Programs are cut by a simple rule here, so that this measures moving and not planning. Cases:

- `rows to rows`: Shard(0) to Shard(0), contiguous at both ends, so nothing is packed;
- `one side packs`: Shard(0) to Shard(1);
- `both sides pack`: the same into columns of wider buffers, as in fused parameters;
- `narrowed`: float32 masters, packed as bfloat16 and checked for overflow;
- `small tensors`: 20,000 tensors against one tensor of the same bytes (and not against the floor);
- `gather-broadcast`: beside `one side packs`, each whole tensor gathered on source 0 and broadcast to all targets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from refit_backends.gloo import GlooFabric

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.executor import Executor
from refit_sdk.fabric import Deadline
from refit_sdk.program import Message, Piece, Program, Window
from refit_sdk.settings import MIB, Settings
from refit_sdk.views import Views

sys.path.append(str(Path(__file__).parents[1] / "moving"))
from moving_support import TcpTable

ENGINE = "e"


@frozen
class Case:
    """What is moved. `cuts` are the dims that sources and targets cut; `extra` are columns beside a target's view."""

    shapes: tuple[tuple[int, int], ...]
    cuts: tuple[int, int]
    held: str = "bfloat16"
    extra: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(2 * prod(shape) for shape in self.shapes)


def cases(mib: int) -> dict[str, Case]:
    """The cases, each of `mib` MiB on the wire."""
    tensors = ((4096, 4096),) * max(1, mib // 32)
    rows = max(4, mib // 40)
    small = ((rows, 1024),) * 20_000
    return {
        "rows to rows": Case(tensors, (0, 0)),
        "one side packs": Case(tensors, (0, 1)),
        "both sides pack": Case(tensors, (0, 1), extra=64),
        "narrowed": Case(tensors, (0, 1), held="float32"),
        "small tensors": Case(small, (0, 0)),
        "one tensor": Case(((rows * 20_000, 1024),), (0, 0)),
    }


def shard(shape: Sequence[int], dim: int, rank: int, size: int) -> Box:
    """The rank's part of a tensor cut in one dim."""
    step = -(-shape[dim] // size)
    return Box.whole(shape).narrow(dim, min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim]))


@frozen
class Leg:
    """A piece's way in a window."""

    src: int
    dst: int
    piece: Piece


def windows(case: Case, sources: int, targets: int, settings: Settings) -> Iterator[list[Leg]]:
    """Pieces in order of tensors, the pairs of each in turn; a new window when a process has no room in this one."""
    room: dict[tuple[str, int], int] = defaultdict(lambda: settings.window_bytes)
    window: list[Leg] = []
    for index, shape in enumerate(case.shapes):
        for leg in _legs(f"w.{index}", shape, case.cuts, (sources, targets), settings.window_bytes // 4):
            ends = (("out", leg.src), ("in", leg.dst))
            if any(room[end] < leg.piece.nbytes for end in ends):
                yield window
                window = []
                room.clear()
            for end in ends:
                room[end] -= leg.piece.nbytes
            window.append(leg)
    yield window


def _legs(name: str, shape: Sequence[int], cuts: tuple[int, int], sizes: tuple[int, int], limit: int) -> Iterator[Leg]:
    pairs = [
        [Leg(s, sizes[0] + t, Piece(name, part, "bfloat16")) for part in common.cut(limit=limit // 2)]
        for s in range(sizes[0])
        for t in range(sizes[1])
        if (common := shard(shape, cuts[0], s, sizes[0]).intersect(shard(shape, cuts[1], t, sizes[1]))) is not None
    ]
    for turn in zip_longest(*pairs):
        yield from (leg for leg in turn if leg is not None)


def program(case: Case, process: int, sources: int, targets: int, settings: Settings) -> Program:
    """One process's program."""
    made = []
    for number, legs in enumerate(windows(case, sources, targets, settings)):
        out = _messages([leg for leg in legs if leg.src == process], lambda leg: leg.dst, settings)
        into = _messages([leg for leg in legs if leg.dst == process], lambda leg: leg.src, settings)
        if out or into:
            made.append(Window(number, out, into))
    return Program(process, tuple(made))


def _messages(legs: list[Leg], peer_of: Callable[[Leg], int], settings: Settings) -> tuple[Message, ...]:
    of: dict[int, list[Piece]] = defaultdict(list)
    for leg in legs:
        of[peer_of(leg)].append(leg.piece)
    messages = []
    for peer, pieces in of.items():
        small = tuple(piece for piece in pieces if piece.nbytes < settings.coalesce_bytes)
        messages += [Message(peer, ENGINE, small)] if small else []
        messages += [Message(peer, ENGINE, (piece,)) for piece in pieces if piece.nbytes >= settings.coalesce_bytes]
    return tuple(messages)


def pushing(case: Case, process: int, sizes: tuple[int, int], group: Any, settings: Settings) -> Callable[[], None]:
    """The executor on a case, bound and run once."""
    is_source = process < sizes[0]
    fragments = list(_fragments(case, process, sizes))
    executor = Executor(
        program(case, process, *sizes, settings),
        sources=Views(fragments) if is_source else None,
        targets=None if is_source else Views(fragments),
        groups={ENGINE: group},
    )

    def run() -> None:
        moved = executor.run(Deadline.after(600))
        assert not moved.failed, moved.failed

    run()
    _check(case, fragments, is_source)
    return run


def _fragments(case: Case, process: int, sizes: tuple[int, int]) -> Iterator[Fragment]:
    is_source = process < sizes[0]
    for index, shape in enumerate(case.shapes):
        if is_source:
            box = shard(shape, case.cuts[0], process, sizes[0])
            view = torch.full(box.shape, index % 251 + process, dtype=getattr(torch, case.held))
        else:
            box = shard(shape, case.cuts[1], process - sizes[0], sizes[1])
            wide = torch.zeros(box.shape[0], box.shape[1] + case.extra, dtype=torch.bfloat16)
            view = wide[:, : box.shape[1]]
        yield Fragment(f"w.{index}", tuple(shape), box, view)


def _check(case: Case, fragments: Sequence[Fragment], is_source: bool) -> None:
    for index, fragment in enumerate(fragments):
        low, high = torch.aminmax(fragment.view)
        assert is_source or index % 251 <= float(low) <= float(high), (case, fragment.name)


def floor(case: Case, process: int, sizes: tuple[int, int], group: Any, settings: Settings) -> Callable[[], None]:
    """The bytes of each pair as one contiguous message, all at once."""
    total: dict[tuple[int, int], int] = defaultdict(int)
    for legs in windows(case, *sizes, settings):
        for leg in legs:
            total[leg.src, leg.dst] += leg.piece.nbytes
    mine = {pair: torch.ones(nbytes, dtype=torch.uint8) for pair, nbytes in total.items() if process in pair}

    def run() -> None:
        works = [group.recv(buffer, peer=src) for (src, dst), buffer in mine.items() if dst == process]
        works += [group.send(buffer, peer=dst) for (src, dst), buffer in mine.items() if src == process]
        for work in works:
            work.wait(600)

    run()
    return run


def gather_broadcast(case: Case, process: int, sizes: tuple[int, int], group: Any, relay: Any) -> Callable[[], None]:
    """Source 0 gathers each tensor and broadcasts it whole; each target keeps its part."""
    fragments = list(_fragments(case, process, sizes))
    whole = torch.empty(case.shapes[0], dtype=torch.bfloat16)

    def gather(fragment: Fragment) -> None:
        whole[fragment.box.slices()] = fragment.view
        for source in range(1, sizes[0]):
            box = shard(whole.shape, case.cuts[0], source, sizes[0])
            group.recv(whole[box.slices()].view(-1).view(torch.uint8), peer=source).wait(600)

    def run() -> None:
        for fragment in fragments:
            if 0 < process < sizes[0]:
                group.send(fragment.view.view(-1).view(torch.uint8), peer=0).wait(600)
                continue
            if process == 0:
                gather(fragment)
            relay._native.broadcast(whole, 0).wait()
            if process:
                fragment.view.copy_(whole[fragment.box.slices()])

    run()
    return run


def rank(process: int, port: int, sizes: tuple[int, int], plan: dict[str, Any], barrier: Any, pipe: Any) -> None:
    """One process: makes a case's contenders when told, and runs them when told."""
    torch.set_num_threads(1)
    table = TcpTable.client(port)
    members = list(range(sum(sizes)))
    group = GlooFabric().connect(group="all", members=members, process=process, store=table, timeout=60)
    relaying = [0, *range(sizes[0], sum(sizes))]
    relay = None
    if process in relaying:
        relay = GlooFabric().connect(group="relay", members=relaying, process=process, store=table, timeout=60)
    settings = Settings(**plan["settings"])
    made: dict[str, Callable[[], None]] = {}
    while (told := pipe.recv()) is not None:
        verb, name = told
        if verb == "make":
            made = {what: _contender(what, plan, process, sizes, group, relay, settings) for what in name}
            pipe.send(None)
        else:
            barrier.wait()
            begun, used = time.monotonic(), time.process_time()
            made[name]()
            pipe.send((begun, time.monotonic(), time.process_time() - used))


def _contender(
    what: str, plan: dict[str, Any], process: int, sizes: tuple[int, int], group: Any, relay: Any, settings: Settings
) -> Callable[[], None]:
    kind, _, name = what.partition(": ")
    case = cases(plan["mib"])[name]
    if kind == "gather-broadcast":
        return gather_broadcast(case, process, sizes, group, relay)
    return (floor if kind == "floor" else pushing)(case, process, sizes, group, settings)


ROUNDS: dict[str, tuple[str, ...]] = {
    "rows to rows": ("floor: rows to rows", "push: rows to rows"),
    "one side packs": ("floor: one side packs", "push: one side packs", "gather-broadcast: one side packs"),
    "both sides pack": ("floor: both sides pack", "push: both sides pack"),
    "narrowed": ("floor: narrowed", "push: narrowed"),
    "small tensors": ("push: one tensor", "push: small tensors", "floor: one tensor"),
}
"""What takes turns, the one that the others are compared with first."""


def measure(told: argparse.Namespace, settings: dict[str, int]) -> list[dict[str, Any]]:
    """Run all cases; a row per contender."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plan = {"mib": told.mib, "settings": settings}
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    barrier = context.Barrier(told.sources + told.targets)  # lives here: processes open it by a name that goes with it
    processes, pipes = _start(context, (told.sources, told.targets), (server.port, plan, barrier))
    rows: list[dict[str, Any]] = []
    for name, contenders in ROUNDS.items():
        if told.only in (None, name):
            rows += _take_turns(name, contenders, pipes, told)
    for pipe, started in zip(pipes, processes, strict=True):
        pipe.send(None)
        started.join()
    return rows


def _start(
    context: Any, sizes: tuple[int, int], shared: tuple[int, dict[str, Any], Any]
) -> tuple[list[Any], list[Any]]:
    port, plan, barrier = shared
    pipes = [context.Pipe() for _ in range(sum(sizes))]
    processes = [
        context.Process(target=rank, args=(process, port, sizes, plan, barrier, theirs), daemon=True)
        for process, (_, theirs) in enumerate(pipes)
    ]
    for started in processes:
        started.start()
    return processes, [ours for ours, _ in pipes]


def _take_turns(
    name: str, contenders: Sequence[str], pipes: Sequence[Any], told: argparse.Namespace
) -> list[dict[str, Any]]:
    _tell(pipes, ("make", contenders))
    seconds: dict[str, list[float]] = {what: [] for what in contenders}
    processor: dict[str, list[float]] = {what: [] for what in contenders}
    for turn in range(told.turns):
        for what in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
            spans = _tell(pipes, ("run", what))
            seconds[what].append(max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans))
            processor[what].append(sum(used for _, _, used in spans))
    nbytes = cases(told.mib)[contenders[0].partition(": ")[2]].nbytes
    base = seconds[contenders[0]]
    return [
        {
            "case": name,
            "what": what,
            "seconds": statistics.median(took),
            "gb_per_s": nbytes / statistics.median(took) / 1e9,
            "ratio": statistics.median(a / b for a, b in zip(took, base, strict=True)),
            "spread": [min(took), max(took)],
            "cpu_seconds": statistics.median(processor[what]),
        }
        for what, took in seconds.items()
    ]


def _tell(pipes: Sequence[Any], message: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(message)
    return [pipe.recv() for pipe in pipes]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table."""
    print(f"{'what':36} {'seconds':>8} {'GB/s':>6} {'ratio':>6} {'CPU s':>6}   fastest..slowest")
    for row in rows:
        low, high = row["spread"]
        ratio = f"{row['ratio']:6.2f}" if row["ratio"] != 1 else "     1"
        speed = f"{row['seconds']:8.3f} {row['gb_per_s']:6.2f} {ratio} {row['cpu_seconds']:6.2f}"
        print(f"{row['what']:36} {speed}   {low:.3f}..{high:.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024, help="MiB on the wire in a case")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--window-mib", type=float, default=Settings().window_bytes / MIB)
    parser.add_argument("--coalesce-kib", type=float, default=Settings().coalesce_bytes / 1024)
    parser.add_argument("--only", choices=sorted(ROUNDS))
    parser.add_argument("--json", type=Path, help="also write the rows here")
    told = parser.parse_args()
    settings = {
        "window_bytes": int(told.window_mib * MIB),
        "coalesce_bytes": int(told.coalesce_kib * 1024),
        "window_ops": 1 << 30,
    }
    rows = measure(told, settings)
    show(rows)
    if told.json is not None:
        told.json.write_text(json.dumps({"settings": settings, "sizes": [told.sources, told.targets], "rows": rows}))


if __name__ == "__main__":
    main()
