"""`"auto"`: which transport carries a family, chosen at planning by what each would take, and why.

1. Serve all moves as they would be if every family that is left open went by one transport, and ask that transport for
   the steps; do so for each that is there and can carry the family.
2. What a family's steps take by themselves: the slowest of NICs, links inside, hosts and copies (`refit_sdk.estimate`),
   and a latency a round.
3. The fastest is taken; one with more rounds only if it is at least a twentieth faster than those with fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from attrs import evolve, frozen

from refit_sdk.errors import UnsupportedMoveError
from refit_sdk.estimate import Load, loads
from refit_sdk.families import Sides
from refit_sdk.moves import MoveTable, refuse, serve, sizes_of, steps_of
from refit_sdk.overlap import volume
from refit_sdk.pieces import Family, Pieces
from refit_sdk.settings import AUTO, MOST, Settings
from refit_sdk.topology import Topology
from refit_sdk.transport import Ints, Transport

OPEN: Final = ("reshard", "fanout", "broadcast")
"""What it chooses among, those with fewer rounds first."""
BETTER: Final = 20
"""More rounds have to save at least one part in so many."""

ROUGH: Final = 1024
"""Windows' worth into which what is tried is cut at most: loads are sums, and small parts make many steps."""


def expanded(transport: str) -> tuple[str, ...]:
    """The transports that a route may come to."""
    return OPEN if transport == AUTO else (transport,)


@frozen
class _Tried:
    """What a family would take by a transport."""

    load: Load
    rounds: int

    def time(self, topology: Topology) -> tuple[str, int]:
        """What takes longest, and nanoseconds."""
        part, nanoseconds = self.load.slowest(topology.speeds)
        speeds = topology.speeds
        latency = speeds.nic_latency_ns if self.load.nic_in else speeds.inside_latency_ns
        return (part, nanoseconds + self.rounds * latency) if nanoseconds else (part, 0)


@frozen
class Chosen:
    """A family's transport, and why where it was chosen."""

    transport: str
    why: str


def choose(
    sides: Sides, pieces: Pieces, families: tuple[Family, ...], number: Ints, *,
    settings: Settings, transports: Mapping[str, Transport], topology: Topology,
) -> list[Chosen]:  # fmt: skip
    """The transport of each family."""
    if all(family.transport != AUTO for family in families):
        return [Chosen(family.transport, "") for family in families]
    tried: dict[str, list[_Tried | None]] = {}
    for name in (name for name in OPEN if name in transports):
        alike = tuple(evolve(f, transport=name) if f.transport == AUTO else f for f in families)
        tried[name] = _tried(
            sides, pieces, alike, number, name, settings=settings, transports=transports, topology=topology
        )
    return [
        Chosen(family.transport, "")
        if family.transport != AUTO
        else _best({n: t[i] for n, t in tried.items()}, topology)
        for i, family in enumerate(families)
    ]


def _tried(
    sides: Sides, pieces: Pieces, families: tuple[Family, ...], number: Ints, name: str, *,
    settings: Settings, transports: Mapping[str, Transport], topology: Topology,
) -> list[_Tried | None]:  # fmt: skip
    """What each family would take by a transport; None for one that it can't carry."""
    table, local = serve(sides, pieces, families, number, settings=settings, transports=transports, topology=topology)
    able = np.array([_can(transports, family, table, i) for i, family in enumerate(families)], bool)
    mine = np.array([family.transport == name for family in families], bool) & able
    rows = np.flatnonzero(mine[table.family])
    sizes = sizes_of(families)
    nbytes = int((volume(table.start, table.stop) * sizes.itemsize[table.family])[rows].sum())
    rough = evolve(settings, window_bytes=min(MOST, max(settings.window_bytes, nbytes // ROUGH)))
    steps, _ = steps_of(table, families, rows, sides, transport=transports[name], settings=rough, topology=topology)
    found = loads(
        steps, local, topology, nbytes=(sizes.nbytes(steps), sizes.nbytes(local)), key=(steps.family, local.family),
        count=len(families),
    )  # fmt: skip
    rounds = np.zeros(len(families), np.int64)
    np.maximum.at(rounds, steps.family, steps.round + 1)
    return [_Tried(load, int(rounds[i])) if able[i] else None for i, load in enumerate(found)]


def _can(transports: Mapping[str, Transport], family: Family, table: MoveTable, number: int) -> bool:
    try:
        refuse((family,), table, transports, first=number)
    except UnsupportedMoveError:
        return False
    return True


def _best(tried: Mapping[str, _Tried | None], topology: Topology) -> Chosen:
    times = {name: each.time(topology) for name, each in tried.items() if each is not None}
    best = min(times, key=lambda name: (times[name][1], OPEN.index(name)), default=OPEN[0])
    near = (n for n in OPEN if n in times and times[n][1] * (BETTER - 1) <= times[best][1] * BETTER)
    best = next(near, best)
    told = ", ".join(f"{name} {ns / 1e6:.3g} ms ({part})" for name, (part, ns) in times.items())
    return Chosen(best, told)
