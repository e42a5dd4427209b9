"""Hosts emulated on one machine: how long pushes take by each transport, what NICs must take, and what is predicted.

1. Network namespaces, a host each, joined by veth pairs and a bridge; what leaves and enters a host is limited with
   `tc tbf`. Two ranks a host share memory (REFIT_HOST), as processes of their own, with real bytes.
2. `refit bench link` measures between two of the hosts, and writes the topology file that all plans read.
3. Two sources on one host hold half of everything each; every rank of the engine on the other hosts needs all experts
   and the norms, and half of what is dense. For each transport: a session, one push that isn't timed, some that are,
   and a last one of other values, which is compared element by element.

    python tests/campaigns/cluster.py                   # 2, 3 and 4 hosts: writes docs/explanation/emulated-cluster.md
    python tests/campaigns/cluster.py --slice ci        # 2 hosts, two transports, small

It needs root and iproute2; where it lacks either it says so and does nothing. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "emulated-cluster.md"
ROUTES: dict[str, list[tuple[str, str]]] = {
    "gather-broadcast": [("*", "broadcast")],
    "direct": [("*", "reshard")],
    "fanout": [("*", "fanout")],
    "hybrid": [("*.experts.*", "fanout"), ("*norm", "broadcast"), ("*", "reshard")],
    "auto": [("*", "auto")],
}
SOURCES = 2
RANKS_A_HOST = 2
PORT = 29600
PATIENCE = 240.0


@frozen
class Size:
    """A model's rows of 1,024 float32: experts, which every rank of the engine needs, and dense ones."""

    experts: int
    dense: int
    layers: int = 4


WHOLE, SMALL = Size(5120, 2048), Size(512, 256)
WIDTH = 1024


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


class Cluster:
    """Emulated hosts. `run` starts a process on one."""

    def __init__(self, count: int, rate: str) -> None:
        self._tag = f"{os.getpid() % 100000}"
        self._bridge = f"rb{self._tag}"
        self._names = [f"refit-{self._tag}-{host}" for host in range(count)]
        self._rate = rate

    def up(self) -> None:
        """Make them."""
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "link", "set", self._bridge, "up")
        for host, name in enumerate(self._names):
            veth, limit = f"rv{self._tag}{host}", ("tbf", "rate", self._rate, "burst", "1mb", "latency", "50ms")
            run("ip", "netns", "add", name)
            run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", veth, "master", self._bridge, "up")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
            run("tc", "qdisc", "add", "dev", veth, "root", *limit)

    def down(self) -> None:
        """Remove them; what isn't there isn't missed."""
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def start(self, host: int, *command: str, **environ: str) -> subprocess.Popen[str]:
        """A process on a host; what it prints is kept."""
        given = {**os.environ, "REFIT_HOST": f"host-{host}", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **environ}
        netns = ("ip", "netns", "exec", self._names[host])
        return subprocess.Popen(
            [*netns, *command], env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def address(host: int) -> str:
    """A host's."""
    return f"10.77.0.{host + 1}"


@contextmanager
def cluster(count: int, rate: str) -> Iterator[Cluster]:
    """Hosts that are gone at the end."""
    made = Cluster(count, rate)
    try:
        made.up()
        yield made
    finally:
        made.down()


@contextmanager
def ending(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """None of these processes outlives the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measured(made: Cluster, folder: Path) -> Path:
    """The topology file of what `refit bench link` measures between the first two hosts."""
    where, file = f"tcp://{address(1)}:{PORT - 1}", folder / "topology.json"
    refit = str(Path(sys.executable).with_name("refit"))
    peer = made.start(1, refit, "bench", "link", "--serve", where)
    with ending([peer]):
        told = made.start(0, refit, "bench", "link", "--peer", where, "--out", str(file))
        with ending([told]):
            said = told.communicate(timeout=PATIENCE)
            if told.returncode:
                raise RuntimeError(f"refit bench link: {said[1]}")
    return file


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """All tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(size.layers):
        found[f"layers.{layer}.experts.w"] = (size.experts, WIDTH)
        found[f"layers.{layer}.dense.w"] = (size.dense, WIDTH)
        found[f"layers.{layer}.norm"] = (WIDTH,)
    return found


def value(name: str, shape: tuple[int, ...], version: int) -> Any:
    """What a tensor is in a version: whole numbers, other ones at every place."""
    import torch

    count = torch.Size(shape).numel()
    return (
        ((torch.arange(count, dtype=torch.int64) * 31 + version * 7 + sum(name.encode())) % 9973).float().reshape(shape)
    )


class Model:
    """Fragments for the adapter of the same name: rows on sources, what it needs on a rank of the engine."""

    def __init__(self, size: Size, rank: int, *, source: bool) -> None:
        import torch

        from refit_sdk.adapter import Fragment
        from refit_sdk.box import Box

        self.fragments = []
        for name, shape in shapes(size).items():
            box = Box.whole(shape)
            if len(shape) > 1 and (source or "dense" in name):
                half = shape[0] // 2
                box = box.narrow(0, rank % 2 * half, (rank % 2 + 1) * half)
            self.fragments.append(Fragment(name, shape, box, torch.zeros(box.shape)))

    def refit_fragments(self) -> Any:
        """What this rank holds."""
        return self.fragments

    def fill(self, version: int) -> None:
        """Put a version's values into all views."""
        for each in self.fragments:
            each.view.copy_(value(each.name, each.shape, version)[each.box.slices()])

    def wrong(self, version: int) -> list[str]:
        """Tensors that aren't those of a version."""
        return [
            each.name
            for each in self.fragments
            if not bool((each.view == value(each.name, each.shape, version)[each.box.slices()]).all())
        ]


def rank_body(about: dict[str, Any]) -> None:
    """A rank: a session for each of the routes; a source prints what it saw as JSON."""
    import torch

    from refit_sdk.errors import SessionClosed
    from refit_sdk.session import RefitSession

    torch.set_num_threads(1)
    rank, size, names = about["rank"], Size(*about["size"]), about["routes"]
    source = rank < SOURCES
    model = Model(size, rank if source else rank - SOURCES, source=source)
    for number, name in enumerate(names):
        common = {"rendezvous": f"tcp://{address(0)}:{PORT + number}", "deadline": 60}
        if source:
            with RefitSession.source(model, rank=rank, size=SOURCES, routes=ROUTES[name], **common) as session:
                print(json.dumps(pushed(session, model, name, about["pushes"])), flush=True)
        else:
            place = {"engine": "e", "rank": rank - SOURCES, "size": about["targets"]}
            with RefitSession.target(model, **place, **common) as session:
                last = 0
                try:
                    while True:
                        last = session.receive().version
                except SessionClosed:
                    print(json.dumps({"route": name, "wrong": model.wrong(last), "last": last}), flush=True)


def pushed(session: Any, model: Model, name: str, pushes: int) -> dict[str, Any]:
    """Seconds of pushes, but for the first, which makes buffers, and the last, before which values are made; and the
    plan's figures.
    """
    seconds, moved = [], []
    for version in range(1, pushes + 3):
        if version == pushes + 2:
            model.fill(version)
        begun = time.perf_counter()
        report = session.push(version=version)
        seconds.append(time.perf_counter() - begun)
        moved.append(report.seconds["move"])
    totals = session.plan.totals()
    return {
        "route": name, "seconds": seconds[1:-1], "move": moved[1:-1], "bound": totals.bound_ns / 1e9,
        "predicted": totals.predicted_ns / 1e9, "crossing": totals.load.crossing, "windows": totals.windows,
        "chosen": sorted({row.transport for row in session.plan.rows()}),
    }  # fmt: skip


def one(count: int, rate: str, size: Size, names: list[str], pushes: int) -> list[dict[str, Any]]:
    """All routes on so many hosts; a row each."""
    folder = Path(tempfile.mkdtemp(prefix="refit-cluster-"))
    try:
        with cluster(count, rate) as made:
            environ = {"REFIT_TOPOLOGY": str(measured(made, folder)), "REFIT_TOKEN": secrets.token_hex(16)}
            ranks = count * RANKS_A_HOST
            about = {"size": [size.experts, size.dense, size.layers], "routes": names, "pushes": pushes}
            about["targets"] = ranks - SOURCES
            started = [
                made.start(
                    rank // RANKS_A_HOST,
                    sys.executable,
                    __file__,
                    "--rank",
                    json.dumps({**about, "rank": rank}),
                    **environ,
                )
                for rank in range(ranks)
            ]
            with ending(started):
                told = [process.communicate(timeout=PATIENCE) for process in started]
            for process, (_, said) in zip(started, told, strict=True):
                if process.returncode:
                    raise RuntimeError(said)
    finally:
        shutil.rmtree(folder)
    return rows(count, [[json.loads(line) for line in out.splitlines()] for out, _ in told])


def rows(hosts: int, told: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the first source saw, if every target has what it should."""
    wrong = [each for of in told[SOURCES:] for each in of if each["wrong"]]
    if wrong:
        raise RuntimeError(f"targets differ: {wrong}")
    found = []
    for each in told[0]:
        took = statistics.median(each["seconds"])
        ratios = {"over_bound": took / each["bound"], "predicted_over": each["predicted"] / took}
        found.append({"hosts": hosts, **each, "took": took, **ratios})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| hosts | routes | enters domains | windows | NIC bound | measured | over bound | predicted over measured |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        chosen = f" ({', '.join(each['chosen'])})" if each["route"] == "auto" else ""
        lines.append(
            f"| {each['hosts']} | {each['route']}{chosen} | {each['crossing'] / 1e6:.0f} MB | {each['windows']} "
            f"| {each['bound']:.2f} s | {each['took']:.2f} s | {each['over_bound']:.2f} "
            f"| {each['predicted_over']:.2f} |"
        )
    return "\n".join(lines)


def page(found: list[dict[str, Any]], rate: str) -> str:
    """The whole page."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return (
        "# Transports on emulated hosts\n\n"
        "Written by `tests/campaigns/cluster.py`, which says how it goes: hosts are network namespaces of one\n"
        f"machine, each with a NIC of {rate} both ways and two ranks that share memory; two sources on the first\n"
        "host hold half of everything each, 118 MB in all, and every rank of an engine on the others needs all\n"
        "experts and half of what is dense. Seconds are of whole pushes, agreeing and committing among them, the\n"
        "median of three. The bound is what NICs take for the least that transports of that class can send;\n"
        "predictions are by the speeds that `refit bench link` measured between two of the hosts.\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {os.cpu_count()} virtual processors, no GPU.\n\n"
    ) + table(found) + "\n"  # fmt: skip


def lacks() -> str:
    """What this machine lacks for it, or nothing."""
    if os.geteuid():
        return "root"
    return ", ".join(tool for tool in ("ip", "tc") if shutil.which(tool) is None)


def main() -> int:
    """Run; 1 if a push was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", choices=["ci"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_body(args.rank)
        return 0
    if lack := lacks():
        print(f"cluster: not run, this lacks {lack}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found = []
    for hosts in [2] if args.slice else args.hosts:
        names = ["fanout", "hybrid"] if args.slice else list(ROUTES)
        found += one(hosts, args.rate, SMALL if args.slice else WHOLE, names, 2 if args.slice else 3)
        print(table(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if not args.slice and args.hosts == [2, 3, 4]:
        PAGE.write_text(page(found, args.rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
