"""Two thousand ranks of DeepSeek-V3 joining: what the world weighs, what the rendezvous serves, and what a rank pays.

    python tests/benchmarks/bench_join.py [--case NAME ...] [--processes 16] [--per-host 8] [--plan] [--json FILE]

A rendezvous runs in a process of its own. Other processes each play many ranks: every rank has its own authenticated
connection and its own part of the protocol, and goes all the way from its first message until the epoch stands. Only
planning is left out there, since no machine has a processor for each of the ranks: all of them tell the world's digest
as their plan's. With `--plan`, one more process plans the world as a single rank would. No tensor has any bytes.

What is told, by case:

- `manifest`: bytes of the largest manifest that a rank posts, and of all;
- `world`: bytes of the world as it's served, and how often it was read at the rendezvous: once a host;
- `served`: bytes of pieces that the rendezvous served, and as a multiple of the world;
- `hub`: processor seconds and peak memory of the rendezvous;
- `rank`: seconds from the first message to the end of joining, median and last, among all that share this machine;
- `alone`: processor seconds and peak memory of one rank that takes and opens the world, in a process of its own;
- `plan`: processor seconds and peak memory of one rank that plans it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

from attrs import frozen

sys.path.append(str(Path(__file__).parent))
from deepseek_v3 import Engines, Sources

from refit_sdk import __version__, messages
from refit_sdk import manifest as wire
from refit_sdk.control import OPEN_TOKEN, Address, Client, connect, listen
from refit_sdk.coordinator import Coordinator
from refit_sdk.hub import Hub
from refit_sdk.messages import Claim, Form, Formed, Hello, Link, Planned, WorldGet
from refit_sdk.rounds import Sent
from refit_sdk.sharing import Sharing, this_host

PATIENCE = 900.0
"""Seconds that anything may take, and the heartbeat: this machine is shared by all ranks."""


@frozen
class Case:
    """Both sides of a world."""

    sources: Sources
    engines: Engines

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.sources.size + self.engines.count * self.engines.each

    def claim(self, rank: int) -> Claim:
        """The seat of one of all ranks, sources first."""
        if rank < self.sources.size:
            return Claim("source", "", rank, self.sources.size)
        target = rank - self.sources.size
        return Claim("target", self.engines.name(target), target % self.engines.each, self.engines.each)

    def body(self, rank: int) -> bytes:
        """The manifest of one of all ranks."""
        if rank < self.sources.size:
            return wire.encode(self.sources.manifest(rank))
        return wire.encode(self.engines.manifest(rank - self.sources.size))


CASES = {
    "wide": Case(Sources(), Engines(count=8, tp=8, dp=16)),
    "many": Case(Sources(), Engines(count=32, tp=4, dp=8)),
    "balanced": Case(Sources(), Engines(count=32, tp=4, dp=8, redundant=32, seed=1)),
    "small": Case(Sources(pp=2, dp=8, ep=16), Engines(count=4, tp=2, dp=4, redundant=32, seed=1)),
}
"""`wide`: 8 engines of 128 ranks; `many`: 32 of 32; `balanced`: those with 32 redundant experts, placed at random in
every layer and engine; `small`: 64 ranks, to see that it runs."""


class Rank:
    """One rank's part in joining, through the protocol's own rooms."""

    def __init__(self, claim: Claim, body: bytes, *, at: Address, host: str, engines: int) -> None:
        """Connect, and open the door for others of the host."""
        channel = connect(at, token=OPEN_TOKEN, seconds=PATIENCE)
        self._client = Client(channel, heartbeat=PATIENCE, urgent=lambda message: None)
        self._sharing = Sharing(host=host)
        source = claim.side == "source"
        self._hello = Hello(
            sdk=__version__, claims=(claim,), manifests=(body,), settings="{}" if source else None, plugins={},
            engines=engines if source else None, pid=os.getpid(), host=host, door=self._sharing.door,
        )  # fmt: skip

    def say(self) -> None:
        """Ask for the seat."""
        self.begun = time.monotonic()
        self._client.send(self._hello)
        self._hello = None  # type: ignore[assignment]
        self._hear(messages.Welcome)

    def take(self) -> None:
        """Read the world when it's announced, and say so."""
        form = self._hear(Form)
        self._form, self.world = form, self._read(form)
        self._client.send(Planned(epoch=form.epoch, input_digest=form.digest, plan_digest=form.digest))

    def _read(self, form: Form) -> bytes:
        def ask(start: int) -> bytes:
            return self._client.piece(form.epoch, start, timeout=PATIENCE)

        return self._sharing.read(form, ask, seconds=PATIENCE)

    def finish(self) -> float:
        """Go on to the end of joining; the seconds that it all took."""
        self._client.send(messages.Linked(epoch=self._hear(Link).epoch))
        self._hear(Formed)
        return time.monotonic() - self.begun

    def _hear(self, kind: type[Any]) -> Any:
        message = self._client.next(PATIENCE)
        if not isinstance(message, kind):
            raise RuntimeError(f"{message} came, not a {kind.__name__}")
        return message

    def close(self) -> None:
        """Leave."""
        self._client.close()
        self._sharing.close()


class Counting(Coordinator):
    """A coordinator that counts the pieces that it serves."""

    pieces = served = reads = 0

    def receive(self, link: int, message: Any, *, now: float) -> Sent:
        """As it is, counted."""
        sent = super().receive(link, message, now=now)
        if isinstance(message, WorldGet):
            self.pieces += 1
            self.reads += message.start == 0
            self.served += sum(len(reply.value) for _, reply in sent if isinstance(reply, messages.StoreReply))
        return sent


def peak() -> int:
    """The most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rendezvous(engines: int, pipe: Any) -> None:
    """The process that hosts."""
    listener = listen(Address("127.0.0.1", 0))
    mind = Counting(engines=engines, deadline=PATIENCE, heartbeat=PATIENCE, now=time.monotonic())
    hub = Hub(listener, token=OPEN_TOKEN, coordinator=mind, heartbeat=PATIENCE)
    before = peak()
    pipe.send(listener.getsockname()[1])
    pipe.recv()
    pipe.send({
        "hub_cpu_s": time.process_time(), "hub_peak": peak(), "hub_idle": before, "served": mind.served,
        "reads": mind.reads, "pieces": mind.pieces, "world": len(mind._world), "state": str(mind.state),
    })  # fmt: skip
    pipe.recv()
    hub.close("the benchmark is over", normal=True)


def player(name: str, ranks: Sequence[int], per_host: int, port: int, pipe: Any) -> None:
    """A process that plays some ranks, each on a thread of its own where it must wait for others."""
    case = CASES[name]
    bodies = [case.body(rank) for rank in ranks]
    at, kernel = Address("127.0.0.1", port), this_host()
    played = [
        Rank(case.claim(rank), body, at=at, host=f"{kernel}/{rank // per_host}", engines=case.engines.count)
        for rank, body in zip(ranks, bodies, strict=True)
    ]
    pipe.send({"largest": max(map(len, bodies)), "posted": sum(map(len, bodies))})
    del bodies
    pipe.recv()
    for rank in played:
        rank.say()
    _all(rank.take for rank in played)
    seconds: list[float] = []
    _all(lambda rank=rank: seconds.append(rank.finish()) for rank in played)  # type: ignore[misc]
    worlds = {rank.world for rank in played}
    assert len(worlds) == 1
    pipe.send({"seconds": seconds, "world_digest": wire.digest(played[0].world), "peak": peak()})
    pipe.recv()
    pipe.send(played[0].world)
    for rank in played:
        rank.close()


def _all(steps: Iterator[Callable[[], None]] | Any) -> None:
    threads = [Thread(target=step) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def opener(data: bytes, plan: bool, pipe: Any) -> None:
    """One rank alone: it opens the world, and plans it if asked to."""
    before, used, begun = peak(), time.process_time(), time.monotonic()
    world = wire.decode_world(data)
    found = {"open_s": time.monotonic() - begun, "open_cpu_s": time.process_time() - used, "open_peak": peak() - before}
    if plan:
        from refit_backends.inproc import InprocFabric

        from refit_sdk.joining import _Planner
        from refit_sdk.plugins import registry

        planner = _Planner(registry(), InprocFabric())
        used = time.process_time()
        _, made = planner(world, "{}")
        found |= {"plan_s": time.process_time() - used, "plan_peak": peak() - before, "steps": len(made.steps)}
        used = time.process_time()
        made.program(0)
        found["program_s"] = time.process_time() - used
    pipe.send(found)


def measure(name: str, told: argparse.Namespace) -> dict[str, Any]:
    """Join one case; its figures."""
    case = CASES[name]
    context = get_context("forkserver")
    context.set_forkserver_preload(["refit_sdk.hub", "refit_sdk.sharing", "refit_sdk.fold"])
    hub_pipe, hub = _start(context, rendezvous, case.engines.count)
    port = hub_pipe.recv()
    each = -(-case.size // told.processes)
    started = [
        _start(context, player, name, range(first, min(first + each, case.size)), told.per_host, port)
        for first in range(0, case.size, each)
    ]
    described = [pipe.recv() for pipe, _ in started]
    begun = time.monotonic()
    for pipe, _ in started:
        pipe.send("join")
    joined = [pipe.recv() for pipe, _ in started]
    wall = time.monotonic() - begun
    hub_pipe.send("tell")
    row = {"case": name, "ranks": case.size, "hosts": -(-case.size // told.per_host), "wall_s": wall, **hub_pipe.recv()}
    for pipe, _ in started:
        pipe.send("leave")
    data, *_ = [pipe.recv() for pipe, _ in started]
    hub_pipe.send("close")
    assert {found["world_digest"] for found in joined} == {wire.digest(data)}
    for _, process in (*started, (None, hub)):
        process.join()
    alone, process = _start(context, opener, data, told.plan)
    seconds = [s for found in joined for s in found["seconds"]]
    row |= {
        "largest": max(found["largest"] for found in described),
        "posted": sum(found["posted"] for found in described),
        "rank_s": statistics.median(seconds), "last_s": max(seconds), "player_peak": max(f["peak"] for f in joined),
        **alone.recv(),
    }  # fmt: skip
    process.join()
    return row


def _start(context: Any, target: Callable[..., None], *args: Any) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    return ours, process


def show(row: dict[str, Any]) -> None:
    """A case in words."""
    mib = {name: value / (1 << 20) for name, value in row.items() if isinstance(value, int)}
    print(
        f"{row['case']}: {row['ranks']} ranks on {row['hosts']} hosts joined in {row['wall_s']:.1f} s ({row['state']})"
    )
    print(f"  manifest  largest {mib['largest'] * 1024:.1f} KiB, all {mib['posted']:.1f} MiB")
    print(f"  world     {mib['world'] * 1024:.1f} KiB, read {row['reads']} times")
    print(f"  served    {mib['served']:.1f} MiB in {row['pieces']} pieces: {row['served'] / row['world']:.0f} worlds")
    print(f"  hub       {row['hub_cpu_s']:.1f} CPU s, peak {mib['hub_peak']:.0f} MiB (idle {mib['hub_idle']:.0f})")
    print(f"  rank      median {row['rank_s']:.1f} s, last {row['last_s']:.1f} s")
    print(f"  alone     {row['open_cpu_s']:.2f} CPU s, peak {mib['open_peak']:.0f} MiB to open the world")
    if "plan_s" in row:
        print(f"  plan      {row['plan_s']:.1f} CPU s, peak {mib['plan_peak']:.0f} MiB, {row['steps']} steps")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=["wide", "many", "balanced"])
    parser.add_argument("--processes", type=int, default=16, help="processes that play the ranks")
    parser.add_argument("--per-host", type=int, default=8, help="ranks of a host, which share one reader")
    parser.add_argument("--plan", action="store_true", help="also plan each world once")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    told = parser.parse_args()
    rows = []
    for name in told.case:
        rows.append(measure(name, told))
        show(rows[-1])
    if told.json is not None:
        told.json.write_text(json.dumps({"processes": told.processes, "per_host": told.per_host, "rows": rows}))


if __name__ == "__main__":
    main()
