"""What steps take, by the topology's speeds: bytes of NICs, of links inside, of hosts and of copies; then nanoseconds.

1. A step crosses the network unless both ends are on one host or in one domain. What crosses loads the NIC that it
   leaves and the one that it enters, each once; what doesn't loads both processes' links inside.
2. A host carries everything that is copied or sent inside it, and a process packs and unpacks what it sends and
   receives.
3. The slowest of these says how long it takes. A transport that relays takes some windows more: those until its last
   round has begun. No window takes less than a latency.

The least that a class of transports can load a NIC with: see `nic_bounds`. Integers throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from attrs import frozen

from refit_sdk.balance import quotas
from refit_sdk.cluster import Speeds
from refit_sdk.cost import egress_bound
from refit_sdk.families import Processes
from refit_sdk.moves import MoveTable
from refit_sdk.topology import Topology
from refit_sdk.transport import Ints
from refit_sdk.windows import LAG, StepTable, total
from refit_sdk.world import World

SECOND: Final = 10**9
"""Nanoseconds."""


@frozen
class Load:
    """Bytes: out of and into the busiest NIC; that the busiest process sends or receives inside its host or domain; of
    all inside the busiest host; that the busiest process packs and unpacks. `crossing` is all that enters a domain from
    another, and `links` are directed pairs inside hosts or domains, and between."""

    nic_out: int
    nic_in: int
    inside: int
    host: int
    copied: int
    crossing: int
    links: tuple[int, int]

    def parts(self, speeds: Speeds) -> dict[str, int]:
        """What each takes by itself, in nanoseconds."""
        return {
            "NIC out": _time(self.nic_out, speeds.nic_bytes_per_s),
            "NIC in": _time(self.nic_in, speeds.nic_bytes_per_s),
            "inside": _time(self.inside, speeds.inside_bytes_per_s),
            "host": _time(self.host, speeds.host_bytes_per_s),
            "copies": _time(self.copied, speeds.copy_bytes_per_s),
        }

    def slowest(self, speeds: Speeds) -> tuple[str, int]:
        """The part that takes longest, and its nanoseconds."""
        return max(self.parts(speeds).items(), key=lambda part: part[1])

    def nanoseconds(self, speeds: Speeds, *, windows: int, rounds: int) -> int:
        """What it takes in so many windows and rounds."""
        busy = self.slowest(speeds)[1]
        latency = speeds.nic_latency_ns if self.nic_in else speeds.inside_latency_ns
        waiting = busy * LAG * (rounds - 1) // max(windows, 1) if rounds else 0
        return max(busy, latency * windows) + waiting


def _time(nbytes: int, speed: int) -> int:
    return nbytes * SECOND // speed


def loads(
    steps: StepTable, copies: StepTable, topology: Topology, *, nbytes: tuple[Ints, Ints], key: tuple[Ints, Ints],
    count: int,
) -> list[Load]:  # fmt: skip
    """The loads of steps, and of copies inside processes, by key from 0 to `count`; both come with their bytes."""
    host, domain, nic = (np.array(each, np.int64) for each in (topology.host_number, topology.domain, topology.nic))
    (sent, local), (of, of_local) = nbytes, key
    near = (host[steps.src] == host[steps.dst]) | (domain[steps.src] == domain[steps.dst])
    far, here = np.flatnonzero(~near), np.flatnonzero(near)
    both = np.concatenate
    entering = np.flatnonzero(domain[steps.src] != domain[steps.dst])
    columns = (
        _most(of[far], nic[steps.src[far]], sent[far], count),
        _most(of[far], nic[steps.dst[far]], sent[far], count),
        np.maximum(*(_most(of[here], end[here], sent[here], count) for end in (steps.src, steps.dst))),
        _most(both((of[here], of_local)), host[both((steps.src[here], copies.src))], both((sent[here], local)), count),
        _most(both((of, of, of_local)), both((steps.src, steps.dst, copies.src)), both((sent, sent, 2 * local)), count),
        _most(of[entering], np.zeros(len(entering), np.int64), sent[entering], count),
    )
    inside, between = (_pairs(steps, of, rows, count) for rows in (here, far))
    a, b, c, d, e, f = (column.tolist() for column in columns)
    return [Load(a[i], b[i], c[i], d[i], e[i], f[i], (inside[i], between[i])) for i in range(count)]


def _most(key: Ints, place: Ints, amount: Ints, count: int) -> Ints:
    """For each key the most that any place has."""
    places = 1 + int(place.max(initial=0))
    sums = np.zeros(count * places, np.int64)
    np.add.at(sums, key * places + place, amount)
    found: Ints = sums.reshape(count, places).max(axis=1, initial=0)
    return found


def _pairs(steps: StepTable, key: Ints, rows: Ints, count: int) -> list[int]:
    """How many directed pairs of processes each key has in some rows."""
    known = np.unique(np.stack((key[rows], steps.src[rows], steps.dst[rows])), axis=1)[0]
    counts: list[int] = np.bincount(known, minlength=count).tolist()
    return counts


@frozen
class NicBounds:
    """Bytes that the busiest NIC has to send, and to receive, at least, whatever is sent by whom."""

    egress: int
    ingress: int

    def nanoseconds(self, speeds: Speeds) -> int:
        """What that takes."""
        return _time(max(self.egress, self.ingress), speeds.nic_bytes_per_s)


@frozen(order=True)
class _Kind:
    """Moves that are alike to the network."""

    how: str
    engine: int
    needs: Processes
    holders: Processes


def nic_bounds(table: MoveTable, nbytes: Ints, hows: Sequence[str], world: World, topology: Topology) -> NicBounds:
    """The least for moves of families that travel as `hows` say: once into each rank that needs them (`"direct"`), into
    each domain (`"domain"`), or into each domain in which their engine has a rank (`"one"`), where nobody has them yet.

    What enters a domain is spread over its NICs. Egress is as in `refit_sdk.cost`, with NICs in place of processes.
    """
    kinds = _kinds(table, nbytes, hows)
    near = _Near(topology)
    ranks = [tuple(sorted({s.process for s in world.seats if s.engine == engine})) for engine in world.engines]
    into: dict[int, dict[str, int]] = {}
    leaving: dict[Processes, int] = {}
    entering = np.zeros(1 + max(topology.nic, default=0), np.int64)
    for kind, amount in kinds.items():
        cards = tuple(sorted({topology.nic[process] for process in kind.holders}))
        wanted = ranks[kind.engine] if kind.how == "one" else kind.needs
        lacking = [process for process in wanted if not near.has(process, kind.holders)]
        domains = {topology.domain_of(process) for process in lacking}
        copies = len(lacking) if kind.how == "direct" else len(domains)
        leaving[cards] = leaving.get(cards, 0) + amount * (min(copies, 1) if kind.how == "one" else copies)
        if kind.how == "direct":
            for process in lacking:
                entering[topology.nic[process]] += amount
        for domain in domains if kind.how != "direct" else ():
            into.setdefault(domain, {"nbytes": 0})["nbytes"] += amount
    spread = [-(-each["nbytes"] // len(near.cards[domain])) for domain, each in into.items()]
    return NicBounds(_egress(leaving), max([int(entering.max(initial=0)), *spread]))


class _Near:
    """Who is near to whom: on one host or in one domain; and the NICs of each domain."""

    def __init__(self, topology: Topology) -> None:
        self._host, self._domain = topology.host_number, topology.domain
        self.cards: dict[int, set[int]] = {}
        for process, domain in enumerate(topology.domain):
            self.cards.setdefault(domain, set()).add(topology.nic[process])

    def has(self, process: int, holders: Iterable[int]) -> bool:
        """Whether a process holds something, or gets it without the network."""
        host, domain = self._host, self._domain
        return any(host[each] == host[process] or domain[each] == domain[process] for each in holders)


def _kinds(table: MoveTable, nbytes: Ints, hows: Sequence[str]) -> dict[_Kind, int]:
    which = sorted(set(hows))
    how = np.array([which.index(each) for each in hows], np.int64)[table.family]
    columns = np.stack((how, table.engine, table.needs, table.holders))
    known, of = np.unique(columns, axis=1, return_inverse=True)
    sums = total(of.reshape(-1), nbytes).tolist()
    return {
        _Kind(which[a], engine, table.need_sets[needs], table.holder_sets[holders]): amount
        for (a, engine, needs, holders), amount in zip(known.T.tolist(), sums, strict=True)
    }


def _egress(leaving: dict[Processes, int]) -> int:
    sets = sorted(leaving, key=lambda each: (len(each), each))
    weight = [leaving[each] for each in sets]
    count = 1 + max((each[-1] for each in sets), default=-1)
    load = np.zeros(count, np.int64)
    for each, quota in zip(sets, quotas(sets, weight, processes=count, quantum=1), strict=True):
        load[list(each)] += quota
    return egress_bound(sets, np.array(weight, np.int64), load)
