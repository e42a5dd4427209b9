"""Transport `fanout`: what a domain needs crosses into it once, spread over its ranks, which hand it on inside.

1. For each move and each domain in which it's needed: who needs it there. Who there passes it on is one of these,
   chosen so that the ranks of a domain take in as near as can be the same from outside, over all moves together.
2. Where those who need something would take in much more than their domain's other ranks of the engine could, these
   take in their part, and pass on what they don't need.
3. Round 0: the server, or a holder in the domain, if there is one, sends each part to the rank that passes it on.
   Round 1: that one sends it to all others of its domain that need it.

Windows (`refit_sdk.windows`) let round 0 of some moves go on beside round 1 of those before.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from attrs import frozen

from refit_sdk.balance import quotas, share
from refit_sdk.hookspecs import hookimpl
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Ints, Moves, Steps, Transport

Processes = tuple[int, ...]

MUCH = 5, 4
"""The load of a domain's busiest rank over their average, from which on all ranks of the engine there pass on."""
QUANTUM = 1 << 16
"""Bytes below which what is alike isn't spread over one more rank."""


@frozen(eq=False)
class _Groups:
    """A group is a move and a domain that needs it: number `who` in `sets`: (engine, domain, who needs it there)."""

    move: Ints
    who: Ints
    sets: list[tuple[int, int, Processes]]


class Fanout:
    """Once into each domain, then on inside.

    >>> one, served = np.array([0]), np.array([0, 1])
    >>> moves = Moves(np.array([[0]]), np.array([[8]]), one, np.array([0, 2]), np.array([1, 2]), served, one, 2)
    >>> steps = Fanout().steps(moves, Topology(("x", "y", "y"), (0, 1, 1)))
    >>> list(zip(steps.round.tolist(), steps.src.tolist(), steps.dst.tolist()))
    [(0, 0, 1), (1, 1, 2)]
    """

    name: ClassVar[str] = "fanout"
    capabilities: ClassVar[Capabilities] = Capabilities(copies="domain")

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        """Two rounds: into each domain, and on inside it."""
        groups = _grouped(moves, topology)
        if not len(groups.move):
            return Steps(groups.move, moves.start[:0], moves.stop[:0], groups.move, groups.move, groups.move)
        nbytes, relays = moves.nbytes[groups.move], _relays(moves, groups, topology)
        order = np.argsort([len(each) for each in relays], kind="stable")
        place = np.argsort(order, kind="stable")
        shares = share(
            moves.start[groups.move], moves.stop[groups.move], moves.granule[groups.move],
            weight=nbytes, who=place[groups.who], sets=[relays[i] for i in order.tolist()],
            line=np.arange(len(groups.move)), quantum=QUANTUM,
        )  # fmt: skip
        return _steps(moves, groups, shares.piece, shares.start, shares.stop, shares.server, topology)


def _grouped(moves: Moves, topology: Topology) -> _Groups:
    known: dict[tuple[int, Processes], list[tuple[int, Processes]]] = {}
    sets: dict[tuple[int, int, Processes], int] = {}
    move, who = [], []
    for i, (engine, needs) in enumerate(zip(moves.engine.tolist(), moves.needs, strict=True)):
        if (engine, needs) not in known:
            known[engine, needs] = _by_domain(needs, topology)
        for domain, those in known[engine, needs]:
            move.append(i)
            who.append(sets.setdefault((engine, domain, those), len(sets)))
    return _Groups(np.array(move, np.int64), np.array(who, np.int64), list(sets))


def _by_domain(processes: Processes, topology: Topology) -> list[tuple[int, Processes]]:
    found: dict[int, list[int]] = {}
    for process in processes:
        found.setdefault(topology.domain_of(process), []).append(process)
    return [(domain, tuple(those)) for domain, those in sorted(found.items())]


def _relays(moves: Moves, groups: _Groups, topology: Topology) -> list[Processes]:
    """For each set, who may pass on: those who need it, or every rank of the engine in the domain."""
    weight = np.zeros(len(groups.sets), np.int64)
    np.add.at(weight, groups.who, moves.nbytes[groups.move])
    order = sorted(range(len(groups.sets)), key=lambda i: len(groups.sets[i][2]))
    needing = [groups.sets[i][2] for i in order]
    parts = quotas(needing, weight[order].tolist(), processes=len(topology.domain), quantum=QUANTUM)
    load: dict[tuple[int, int], Ints] = {}
    for i, part in zip(order, parts, strict=True):
        engine, domain, those = groups.sets[i]
        there = load.setdefault((engine, domain), np.zeros(len(topology.domain), np.int64))
        there[list(those)] += part
    wide = {place: ranks for place, loads in load.items() if (ranks := _wide(moves, place, loads, topology))}
    return [wide.get((engine, domain), those) for engine, domain, those in groups.sets]


def _wide(moves: Moves, place: tuple[int, int], loads: Ints, topology: Topology) -> Processes:
    """All ranks of an engine in a domain, if those who need what comes in would take in much more than others."""
    engine, domain = place
    ranks = tuple(process for process in moves.ranks[engine] if topology.domain_of(process) == domain)
    several = len({topology.nic[process] for process in ranks}) > 1
    uneven = int(loads.max()) * len(ranks) * MUCH[1] > int(loads.sum()) * MUCH[0]
    return ranks if several and uneven else ()


def _steps(
    moves: Moves, groups: _Groups, piece: Ints, start: Ints, stop: Ints, relay: Ints, topology: Topology
) -> Steps:
    move = groups.move[piece]
    src = _senders(moves, move, [groups.sets[i][1] for i in groups.who[piece].tolist()], relay, topology)
    keep = src != relay  # a relay that holds it already has nothing to wait for
    needs = [groups.sets[i][2] for i in groups.who[piece].tolist()]
    more = [
        (k, dst) for k, (those, by) in enumerate(zip(needs, relay.tolist(), strict=True)) for dst in those if dst != by
    ]
    row = np.array([k for k, _ in more], np.int64)
    inside = np.array([dst for _, dst in more], np.int64)
    first = np.flatnonzero(keep)
    rows = np.concatenate((first, row))
    return Steps(
        move[rows], start[rows], stop[rows], np.concatenate((src[first], relay[row])),
        np.concatenate((relay[first], inside)), np.repeat(np.array([0, 1]), [len(first), len(row)]),
    )  # fmt: skip


def _senders(moves: Moves, move: Ints, domain: list[int], relay: Ints, topology: Topology) -> Ints:
    """Who sends a part into a domain: who passes it on, if that one holds it; a holder that is there, each in turn;
    else the server."""
    found = moves.server[move].copy()
    holders = moves.holders
    for k, (i, where) in enumerate(zip(move.tolist(), domain, strict=True)):
        near = [process for process in holders[i] if topology.domain_of(process) == where]
        if int(relay[k]) in near:
            found[k] = relay[k]
        elif near and int(found[k]) not in near:
            found[k] = near[k % len(near)]
    return found


@hookimpl
def refit_register_transports() -> list[type[Transport]]:
    """The transport of this module."""
    return [Fanout]
