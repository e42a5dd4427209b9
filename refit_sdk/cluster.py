"""What the sources state of the machines: sets of ranks, and speeds; as a value, and as the file that says it.

A topology file is one JSON object; every part of it may be left out:

    {"hosts": {"x": ["source[*]"], "y": ["rollout-0[0-7]"]},
     "domains": {"rack": ["rollout-0[*]", "rollout-1[*]"]},
     "nics": {"eth0": ["source[0-3]"], "eth1": ["source[4-7]"]},
     "speeds": {"nic_bytes_per_s": 12500000000, "nic_latency_ns": 20000}}

>>> parse({"hosts": {"x": ["source[*]"]}}).hosts
(('x', ('source[*]',)),)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import field, frozen

from refit_sdk import asked
from refit_sdk.errors import RefitError

RANKS: Final = re.compile(r"[A-Za-z0-9_.:-]+\[(\*|\d+|\d+-\d+)\]")
"""How ranks are named: `source[0]`, `rollout-0[0-7]`, `rollout-1[*]`."""

Sets = tuple[tuple[str, tuple[str, ...]], ...]
"""Sets of ranks, each with its name."""

FASTEST: Final = (1 << 50) - 1


def _speed(default: int) -> Any:
    def check(_: Any, attribute: Any, value: Any) -> None:
        asked.whole(value, attribute.name, least=1, most=FASTEST)

    return field(default=default, validator=check)


@frozen(kw_only=True)
class Speeds:
    """How fast things are: bytes a second, one way, and nanoseconds from posting to arriving.

    `nic_*` of one NIC in each direction; `inside_bytes_per_s` of one process's links inside a host or domain;
    `host_bytes_per_s` the most that all copies and links inside one host come to; `copy_bytes_per_s` of one process
    that packs or unpacks. The defaults stand for a network of 100 Gbit/s, and shape plans alone: `refit bench link`
    measures a machine's own.
    """

    nic_bytes_per_s: int = _speed(12_500_000_000)
    nic_latency_ns: int = _speed(30_000)
    inside_bytes_per_s: int = _speed(50_000_000_000)
    inside_latency_ns: int = _speed(10_000)
    host_bytes_per_s: int = _speed(200_000_000_000)
    copy_bytes_per_s: int = _speed(50_000_000_000)


@frozen(kw_only=True)
class Cluster:
    """What is stated: hosts, domains and NICs as sets of ranks, and speeds. Ranks in no set are where they say."""

    hosts: Sets = ()
    domains: Sets = ()
    nics: Sets = ()
    speeds: Speeds = field(factory=Speeds)


def given(topology: Any) -> Cluster | None:
    """A `topology=` argument: a path of a topology file, its content, a `Cluster`, or None.

    `RefitError` says what is wrong with it.
    """
    if topology is None or isinstance(topology, Cluster):
        return topology
    if isinstance(topology, Mapping):
        return parse(topology)
    if isinstance(topology, str | Path):
        return read(Path(topology))
    raise RefitError(f"topology={topology!r} is a {type(topology).__name__}: pass a path, a dict or a Cluster")


def read(path: Path) -> Cluster:
    """The content of a topology file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RefitError(f"the topology file {path} can't be read: {error}") from error
    return parse(found, where=f"the topology file {path}")


def parse(found: Any, *, where: str = "topology=") -> Cluster:
    """The value of a topology file's content."""
    fields = {"hosts", "domains", "nics", "speeds"}
    _check_keys(found, fields, where)
    sets = {kind: _sets(found.get(kind, {}), kind, where) for kind in ("hosts", "domains", "nics")}
    speeds = found.get("speeds", {})
    _check_keys(speeds, {each.name for each in attrs.fields(Speeds)}, f"{where}: speeds")
    try:
        return Cluster(**sets, speeds=Speeds(**speeds))
    except RefitError as error:
        raise RefitError(f"{where}: speeds: {error}") from error


def write(cluster: Cluster, path: Path) -> None:
    """Write a topology file; what was there is replaced in one step."""
    made = {
        kind: {name: list(ranks) for name, ranks in getattr(cluster, kind)} for kind in ("hosts", "domains", "nics")
    }
    text = json.dumps({**{k: v for k, v in made.items() if v}, "speeds": attrs.asdict(cluster.speeds)}, indent=2)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text + "\n")
    beside.replace(path)


def _check_keys(found: Any, known: set[str], where: str) -> None:
    if not isinstance(found, Mapping):
        raise RefitError(f"{where} is {found!r}: give an object with any of {', '.join(sorted(known))}")
    unknown = sorted(map(str, found.keys() - known))
    if unknown:
        raise RefitError(f"{where} has {', '.join(unknown)}: known are {', '.join(sorted(known))}")


def _sets(found: Any, kind: str, where: str) -> Sets:
    if not isinstance(found, Mapping):
        raise RefitError(f"{where}: {kind} is {found!r}: give an object from names to lists of ranks")
    made = []
    seen: list[tuple[str, range, str, str]] = []
    for name, ranks in sorted(found.items(), key=lambda each: str(each[0])):
        if not isinstance(name, str) or not name:
            raise RefitError(f"{where}: {kind}: {name!r} is no name of a set: give a string")
        for rank in asked.strings(ranks, f"{kind}: {name}"):
            side, these = _named(rank, f"{where}: {kind}: {name}")
            for other, those, text, taken in seen:
                alike = (len(these) == 1) == (len(those) == 1) and bool(these) == bool(those)
                both = range(max(these.start, those.start), min(these.stop, those.stop))
                if side == other and alike and (both or not these):
                    word = rank if rank == text else f"{text} and {rank}"
                    raise RefitError(f"{where}: {kind}: {word} is in {taken} and in {name}: a rank has one place")
            seen.append((side, these, rank, name))
        made.append((name, tuple(ranks)))
    return tuple(made)


def _named(rank: str, where: str) -> tuple[str, range]:
    """The side and the ranks of a word; of `*` no ranks."""
    if not RANKS.fullmatch(rank):
        raise RefitError(f"{where}: {rank!r} names no rank: source[0], e[0-7] and e[*] do")
    side, _, which = rank.rstrip("]").rpartition("[")
    first, _, last = which.partition("-")
    these = range(0) if which == "*" else range(int(first), 1 + int(last or first))
    if which != "*" and not these:
        raise RefitError(f"{where}: {rank!r} names no rank: the first of a range comes first, {side}[{last}-{first}]")
    return side, these
