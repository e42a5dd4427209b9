"""What a plan costs, and the least that any plan of its class could: bytes in and out of the busiest process.

Egress: bytes that only processes of a set U hold, times the copies that must leave, leave from U; so one of U sends at
least that over the size of U. Any U gives a bound. The sets tried are those of the most loaded processes, of every
size: with the best loads, one of them is where it is tight.

Ingress: what a process needs and lacks must come in; where one copy a domain is enough, what a domain needs and lacks,
over the processes of the domain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from refit_sdk.balance import quotas
from refit_sdk.families import Processes
from refit_sdk.moves import MoveTable
from refit_sdk.topology import Topology
from refit_sdk.transport import Ints
from refit_sdk.windows import total


@frozen
class Bounds:
    """Bytes of the busiest process that no plan can go below: of the class of the plan's routes, and with relays."""

    egress: int
    ingress: int
    relayed_egress: int
    relayed_ingress: int


def egress_bound(sets: Sequence[Processes], weight: Ints, load: Ints) -> int:
    """The best bound from unions of the most loaded processes: bytes, rounded up.

    >>> egress_bound([(0,), (0, 1)], np.array([10, 30]), np.array([20, 20]))
    20
    """
    kept = [i for i, each in enumerate(sets) if each and weight[i]]
    if not kept:
        return 0
    inside = np.array([min(int(load[process]) for process in sets[i]) for i in kept])
    levels = np.unique(load)
    by_load = np.sort(load)
    size = len(load) - np.searchsorted(by_load, levels, side="left")
    order = np.argsort(inside)
    above = np.concatenate((np.cumsum(weight[kept][order][::-1])[::-1], [0]))
    held = above[np.searchsorted(inside[order], levels, side="left")]
    return int(np.max(-(-held // size)))


def bounds(table: MoveTable, nbytes: Ints, copies: Ints, topology: Topology, *, direct: bool) -> Bounds:
    """The bounds of a plan's moves. `nbytes` and `copies` are by move; `direct` says that all routes send directly."""
    ingress, relayed = _ingress(table, nbytes, topology, False), _ingress(table, nbytes, topology, True)
    return Bounds(
        _egress(table, nbytes * copies), ingress if direct else relayed, _egress(table, nbytes), relayed
    )  # fmt: skip


def _egress(table: MoveTable, weight: Ints) -> int:
    sets = table.holder_sets
    by_set = np.zeros(len(sets), np.int64)
    np.add.at(by_set, table.holders, weight)
    processes = 1 + max((each[-1] for each in sets), default=-1)
    load = np.zeros(processes, np.int64)
    for each, quota in zip(sets, quotas(sets, by_set.tolist(), processes=processes, quantum=1), strict=True):
        load[list(each)] += quota
    return egress_bound(sets, by_set, load)


def _ingress(table: MoveTable, nbytes: Ints, topology: Topology, by_domain: bool) -> int:
    """The most that comes into a process, or into a domain over its processes."""
    key = table.needs * len(table.holder_sets) + table.holders
    amount: dict[int, int] = {}
    size = np.bincount(topology.domain) if by_domain else np.ones(len(topology.domain), np.int64)
    for pair, each in zip(*_sums(key, nbytes), strict=True):
        needs, holders = (
            table.need_sets[pair // len(table.holder_sets)],
            table.holder_sets[pair % len(table.holder_sets)],
        )
        places = (
            {topology.domain_of(p) for p in needs} - {topology.domain_of(p) for p in holders} if by_domain else needs
        )
        for place in places:
            amount[place] = amount.get(place, 0) + each
    return max((-(-count // int(size[place])) for place, count in amount.items()), default=0)


def _sums(key: Ints, amount: Ints) -> tuple[list[int], list[int]]:
    """Different keys, and the sum of each one's amounts."""
    known, which = np.unique(key, return_inverse=True)
    return known.tolist(), total(which.reshape(-1), amount).tolist()
