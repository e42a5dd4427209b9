"""Transport `broadcast`: each tensor is gathered at one of its holders, and goes from there to every rank of an engine.

1. Of the processes that hold a part of a tensor, the one that has least to send so far gathers it.
2. Round 0: what that one lacks comes from whoever serves it.
3. From round 1 on: it sends all to one rank of its own domain, if the engine has ranks there, and to one of the first
   other domain, that one to one of the next, and so on; ranks take turns. So a tensor crosses into each domain once.
4. Each of these sends it to the engine's other ranks in its domain. Each rank keeps its part, and drops the rest.

So a rank takes in all that its engine needs, whatever it needs itself: the right transport for small and odd tensors,
and what others are to be measured against.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from attrs import define, field

from refit_sdk.hookspecs import hookimpl
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Moves, Steps, Transport

Row = tuple[int, int, int, int]
"""A step: move, sender, receiver, round."""


@define(eq=False)
class _Loads:
    """Bytes that each process has to send so far."""

    sent: dict[int, int] = field(factory=dict)

    def least(self, processes: set[int]) -> int:
        return min(processes, key=lambda process: (self.sent.get(process, 0), process))

    def add(self, process: int, nbytes: int) -> None:
        self.sent[process] = self.sent.get(process, 0) + nbytes


class Broadcast:
    """Gather to one holder, then to all.

    >>> one, two, served = np.array([0]), np.array([0, 0]), np.array([0, 1, 2])
    >>> moves = Moves(np.array([[0], [4]]), np.array([[4], [8]]), np.array([0, 1]), served, np.array([2, 3]), served,
    ...               np.array([0, 1]), 2)
    >>> steps = Broadcast().steps(moves, Topology.single(4))
    >>> list(zip(steps.round.tolist(), steps.src.tolist(), steps.dst.tolist()))
    [(1, 0, 2), (2, 2, 3), (0, 1, 0), (1, 0, 3), (2, 3, 2)]
    """

    name: ClassVar[str] = "broadcast"
    capabilities: ClassVar[Capabilities] = Capabilities(copies="one")

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        """To the holder, along one rank a domain, and to the others there."""
        holder = _gatherers(moves, topology)
        nbytes, holders, servers = moves.nbytes.tolist(), moves.holders, moves.server.tolist()
        passing, rows = _Loads(), []
        for i, engine in enumerate(moves.engine.tolist()):
            if holder[i] not in holders[i]:
                rows.append((i, servers[i], holder[i], 0))
            others = [p for p in moves.ranks[engine] if p != holder[i] and p not in holders[i]]
            rows += _inside(i, others, holder[i], passing, nbytes[i], topology)
        move, src, dst, turn = np.array(rows, np.int64).reshape(-1, 4).T
        return Steps(move, moves.start[move], moves.stop[move], src, dst, turn)


def _gatherers(moves: Moves, topology: Topology) -> list[int]:
    """For each move who gathers it: the same for all moves of a tensor, where boxes don't span several."""
    keys = [
        (family, tuple(start[:stacked]))
        for family, stacked, start in zip(
            moves.family.tolist(), moves.stacked.tolist(), moves.start.tolist(), strict=True
        )
    ]
    holding: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    nbytes: dict[tuple[int, tuple[int, ...]], int] = {}
    domains = [len({topology.domain_of(process) for process in ranks}) for ranks in moves.ranks]
    columns = (keys, moves.holders, moves.nbytes.tolist(), moves.engine.tolist())
    for key, holders, size, engine in zip(*columns, strict=True):
        holding.setdefault(key, set()).update(holders)
        nbytes[key] = nbytes.get(key, 0) + size * domains[engine]
    loads, chosen = _Loads(), {}
    for key in sorted(holding, key=lambda key: (-nbytes[key], key)):
        chosen[key] = loads.least(holding[key])
        loads.add(chosen[key], nbytes[key])
    return [chosen[key] for key in keys]


def _inside(move: int, ranks: list[int], holder: int, passing: _Loads, nbytes: int, topology: Topology) -> list[Row]:
    """From the holder to its own domain, and along a chain of one rank of each other domain, and on from these."""
    domains: dict[int, set[int]] = {}
    for process in ranks:
        domains.setdefault(topology.domain_of(process), set()).add(process)
    rows: list[Row] = []
    before, turn = holder, 1
    for domain, there in sorted(domains.items(), key=lambda each: (each[0] != topology.domain_of(holder), each[0])):
        first = passing.least(there)
        passing.add(first, nbytes)
        rows.append((move, before, first, turn))
        rows += [(move, first, process, turn + 1) for process in sorted(there - {first})]
        if domain != topology.domain_of(holder):
            before, turn = first, turn + 1
    return rows


@hookimpl
def refit_register_transports() -> list[type[Transport]]:
    """The transport of this module."""
    return [Broadcast]
