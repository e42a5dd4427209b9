"""How near a whole push comes to the wire, which is the same processes' bytes per pair as one message each, at once.

    python tests/benchmarks/bench_push.py [--fabric mixed] [--mib 1024] [--makes 4] [--turns 3] [--json FILE]

What is timed is `RefitSession.push` and `receive` as users call them: agreeing, moving, installing, committing. The
floors are one contiguous message a pair, over the same fabric and over torch's gloo. Contenders of a case take turns;
what counts is the median of the ratios in a turn, and seconds are for orientation. What is made first may lie in memory
that is slower for as long as it lives: so all contenders are made several times, each time in another order. CPU
seconds are of all processes together. Cases:

- `rows to rows`: Shard(0) to Shard(0), contiguous at both ends;
- `one side packs`: Shard(0) to Shard(1): strided at the sources;
- `both sides pack`: the same out of and into columns of wider buffers, as in fused parameters;
- `narrowed`: float32 masters, packed as bfloat16 and checked for overflow;
- `small tensors`: 20,000 tensors against one tensor of the same bytes, both pushed;
- `gather-broadcast`: beside `one side packs`, each whole tensor gathered on source 0 and broadcast to all targets.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from refit_backends.gloo import GlooFabric

from refit_sdk import RefitSession
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.plugins import registry
from refit_sdk.settings import MIB, Settings

sys.path.append(str(Path(__file__).parents[1] / "moving"))
from moving_support import TcpTable

ENGINE = "e"


@frozen
class Case:
    """What is moved. `cuts` are the dims that sources and targets cut; `extra` are columns beside each view."""

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
class Process:
    """One process of the benchmark. Sources come first."""

    number: int
    sources: int
    targets: int

    @property
    def is_source(self) -> bool:
        """Whether it has the new weights."""
        return self.number < self.sources

    @property
    def rank(self) -> int:
        """Its number on its own side."""
        return self.number if self.is_source else self.number - self.sources

    def box(self, shape: Sequence[int], case: Case) -> Box:
        """What it holds of a tensor."""
        size = self.sources if self.is_source else self.targets
        return shard(shape, case.cuts[not self.is_source], self.rank, size)


def fragments(case: Case, process: Process) -> Iterator[Fragment]:
    """What a process holds, every byte of it touched."""
    dtype = getattr(torch, case.held) if process.is_source else torch.bfloat16
    for index, shape in enumerate(case.shapes):
        box = process.box(shape, case)
        value = index % 251 + process.number if process.is_source else 0
        wide = torch.full((box.shape[0], box.shape[1] + case.extra), value, dtype=dtype)
        yield Fragment(f"layers.{index}.weight", shape, box, wide[:, : box.shape[1]])


class Model:
    """A model that describes itself."""

    def __init__(self, held: list[Fragment]) -> None:
        self.held = held

    def refit_fragments(self) -> list[Fragment]:
        """The rank's fragments."""
        return self.held


@frozen
class Meeting:
    """Where the processes find each other, and how a push is to be."""

    table: int
    port: int
    fabric: str
    mib: int
    settings: Settings


def pushing(case: Case, process: Process, meeting: Meeting, turn: int) -> Callable[[], Any]:
    """A session that has pushed once; the next push. What arrived is checked."""
    model = Model(list(fragments(case, process)))
    where = {"rendezvous": f"tcp://127.0.0.1:{meeting.port + turn}", "rank": process.rank, "fabric": meeting.fabric}
    if process.is_source:
        session = RefitSession.source(model, size=process.sources, engines=[ENGINE], settings=meeting.settings, **where)
    else:
        session = RefitSession.target(model, size=process.targets, engine=ENGINE, **where)
    version = iter(range(1, 1_000_000))

    def run() -> Any:
        return session.push(version=next(version)) if process.is_source else session.receive()

    run()
    if not process.is_source:
        for index, fragment in enumerate(model.held):
            low, high = torch.aminmax(fragment.view)
            assert index % 251 <= float(low) <= float(high) < index % 251 + process.sources, (case, fragment.name)
    run.close = session.close  # type: ignore[attr-defined]
    return run


def pairs(case: Case, sources: int, targets: int) -> dict[tuple[int, int], int]:
    """Bytes of each pair of processes."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for shape in case.shapes:
        for s in range(sources):
            for t in range(targets):
                common = shard(shape, case.cuts[0], s, sources).intersect(shard(shape, case.cuts[1], t, targets))
                if common is not None:
                    found[s, sources + t] += 2 * prod(common.shape)
    return found


def floor(case: Case, process: Process, group: Any) -> Callable[[], None]:
    """The bytes of each pair as one contiguous message, all at once."""
    total = pairs(case, process.sources, process.targets)
    mine = {pair: torch.ones(nbytes, dtype=torch.uint8) for pair, nbytes in total.items() if process.number in pair}

    def run() -> None:
        works = [group.recv(buffer, peer=src) for (src, dst), buffer in mine.items() if dst == process.number]
        works += [group.send(buffer, peer=dst) for (src, dst), buffer in mine.items() if src == process.number]
        for work in works:
            work.wait(600)

    run()
    return run


def gather_broadcast(case: Case, process: Process, group: Any, relay: Any) -> Callable[[], None]:
    """Source 0 gathers each tensor and broadcasts it whole; each target keeps its part. Over gloo."""
    held = list(fragments(case, process))
    whole = torch.empty(case.shapes[0], dtype=torch.bfloat16)

    def gather(fragment: Fragment) -> None:
        whole[fragment.box.slices()] = fragment.view
        for source in range(1, process.sources):
            box = shard(whole.shape, case.cuts[0], source, process.sources)
            group.recv(whole[box.slices()].view(-1).view(torch.uint8), peer=source).wait(600)

    def run() -> None:
        for fragment in held:
            if 0 < process.number < process.sources:
                group.send(fragment.view.view(-1).view(torch.uint8), peer=0).wait(600)
                continue
            if process.number == 0:
                gather(fragment)
            relay._native.broadcast(whole, 0).wait()
            if process.number:
                fragment.view.copy_(whole[fragment.box.slices()])

    run()
    return run


class Bench:
    """One process: makes a case's contenders when told, and runs them when told."""

    def __init__(self, process: Process, meeting: Meeting) -> None:
        self._process = process
        self._meeting = meeting
        self._cases = cases(meeting.mib)
        self._turn = 0
        table = TcpTable.client(meeting.table)
        number, everybody = process.number, list(range(process.sources + process.targets))
        about = {"process": number, "store": table, "timeout": 60}
        fabric: Any = registry().get("fabric", meeting.fabric)()
        self._same = fabric.connect(group="same", members=everybody, **about)
        self._gloo = GlooFabric().connect(group="gloo", members=everybody, **about)
        relaying = [0, *everybody[process.sources :]]
        self._relay = GlooFabric().connect(group="relay", members=relaying, **about) if number in relaying else None

    def make(self, what: str) -> Callable[[], Any]:
        """A contender, run once."""
        kind, _, name = what.partition(": ")
        case = self._cases[name]
        if kind == "gather-broadcast":
            return gather_broadcast(case, self._process, self._gloo, self._relay)
        if kind == "push":
            self._turn += 1
            return pushing(case, self._process, self._meeting, self._turn)
        return floor(case, self._process, self._gloo if kind == "gloo" else self._same)


def rank(process: Process, meeting: Meeting, barrier: Any, pipe: Any) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    bench = Bench(process, meeting)
    made: dict[str, Callable[[], Any]] = {}
    while (told := pipe.recv()) is not None:
        verb, name = told
        if verb == "make":
            while made:
                getattr(made.popitem()[1], "close", lambda: None)()
            gc.collect()  # a closed session's parts know each other
            made = {what: bench.make(what) for what in name}
            pipe.send(None)
        else:
            barrier.wait()
            begun, used = time.monotonic(), time.process_time()
            made[name]()
            pipe.send((begun, time.monotonic(), time.process_time() - used))


ROUNDS: dict[str, tuple[str, ...]] = {
    "rows to rows": ("floor: rows to rows", "push: rows to rows", "gloo: rows to rows"),
    "one side packs": (
        "floor: one side packs",
        "push: one side packs",
        "gloo: one side packs",
        "gather-broadcast: one side packs",
    ),
    "both sides pack": ("floor: both sides pack", "push: both sides pack", "gloo: both sides pack"),
    "narrowed": ("floor: narrowed", "push: narrowed", "gloo: narrowed"),
    "small tensors": ("push: one tensor", "push: small tensors", "gloo: one tensor"),
}
"""What takes turns, the one that the others are compared with first."""


def measure(told: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """Run all cases; a row per contender."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    count = told.sources + told.targets
    barrier = context.Barrier(count)  # lives here: processes open it by a name that goes with it
    meeting = Meeting(server.port, told.port, told.fabric, told.mib, settings)
    pipes, processes = [], []
    for number in range(count):
        ours, theirs = context.Pipe()
        about = (Process(number, told.sources, told.targets), meeting, barrier, theirs)
        processes.append(context.Process(target=rank, args=about, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    rows: list[dict[str, Any]] = []
    for name, contenders in ROUNDS.items():
        if told.only in (None, name):
            print(f"{name} …", file=sys.stderr, flush=True)
            rows += _take_turns(name, contenders, pipes, told)
    for pipe, started in zip(pipes, processes, strict=True):
        pipe.send(None)
        started.join()
    return rows


def _rotated(contenders: Sequence[str], by: int) -> tuple[str, ...]:
    by %= len(contenders)
    return (*contenders[by:], *contenders[:by])


def _take_turns(
    name: str, contenders: Sequence[str], pipes: Sequence[Any], told: argparse.Namespace
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {what: [] for what in contenders}
    processor: dict[str, list[float]] = {what: [] for what in contenders}
    for make in range(told.makes):
        _tell(pipes, ("make", _rotated(contenders, make)))
        for turn in range(told.turns):
            for what in _rotated(contenders, make + turn):
                spans = _tell(pipes, ("run", what))
                seconds[what].append(max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans))
                processor[what].append(sum(used for _, _, used in spans))
    nbytes = cases(told.mib)[contenders[0].partition(": ")[2]].nbytes
    base, gloo = seconds[contenders[0]], seconds[next(what for what in contenders if what.startswith("gloo"))]
    return [
        {
            "case": name,
            "what": what,
            "seconds": statistics.median(took),
            "gb_per_s": nbytes / statistics.median(took) / 1e9,
            "ratio": statistics.median(a / b for a, b in zip(took, base, strict=True)),
            "to_gloo": statistics.median(a / b for a, b in zip(took, gloo, strict=True)),
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
    """The rows as a table: `ratio` is to the first of the case, `gloo` to one message a pair over gloo."""
    print(f"{'what':34} {'seconds':>8} {'GB/s':>6} {'ratio':>6} {'gloo':>6} {'CPU s':>6}   fastest..slowest")
    for row in rows:
        low, high = row["spread"]
        ratios = " ".join(f"{value:6.2f}" if value != 1 else "     1" for value in (row["ratio"], row["to_gloo"]))
        speed = f"{row['seconds']:8.3f} {row['gb_per_s']:6.2f} {ratios} {row['cpu_seconds']:6.2f}"
        print(f"{row['what']:34} {speed}   {low:.3f}..{high:.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", default="tcp", choices=["mixed", "shm", "tcp", "gloo"], help="default: tcp")
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--mib", type=int, default=1024, help="MiB on the wire in a case")
    parser.add_argument("--makes", type=int, default=4, help="how often the contenders are made")
    parser.add_argument("--turns", type=int, default=3, help="turns that they take each time")
    parser.add_argument("--window-mib", type=float, default=Settings().window_bytes / MIB)
    parser.add_argument("--coalesce-kib", type=float, default=Settings().coalesce_bytes / 1024)
    parser.add_argument("--port", type=int, default=29700, help="rendezvous are at this port and those that follow")
    parser.add_argument("--only", choices=sorted(ROUNDS))
    parser.add_argument("--json", type=Path, help="also write the rows here")
    told = parser.parse_args()
    settings = Settings(window_bytes=int(told.window_mib * MIB), coalesce_bytes=int(told.coalesce_kib * 1024))
    rows = measure(told, settings)
    show(rows)
    if told.json is not None:
        told.json.write_text(
            json.dumps({"window_bytes": settings.window_bytes, "sizes": [told.sources, told.targets], "rows": rows})
        )


if __name__ == "__main__":
    main()
