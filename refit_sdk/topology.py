"""Where processes are, and how fast what joins them is: in integers that every rank agrees on at joining.

1. Each process says where it is: its host, and its domain where it knows one (`refit_sdk.world.Location`).
2. The sources may state more, or otherwise (`refit_sdk.cluster.Cluster`): hosts, domains and NICs as sets of ranks, and
   speeds. What is stated wins over what was found.
3. A domain is a host where nothing else is known of it; a host has one NIC.

>>> Topology.single(4).domain_of(3)
0
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from refit_sdk.box import coordinates
from refit_sdk.cluster import Cluster, Speeds
from refit_sdk.world import Seat, World


def _hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(hosts)


def _number(places: Iterable[str]) -> tuple[int, ...]:
    """Equal places as equal numbers, in order of their first coming.

    >>> _number(["x", "y", "x"])
    (0, 1, 0)
    """
    known: dict[str, int] = {}
    return tuple(known.setdefault(place, len(known)) for place in places)


@frozen
class Topology:
    """The host, the domain and the NIC of each process, by world number. What joins a domain is much faster than the
    network. Processes of one host never need a NIC to reach each other.
    """

    host: tuple[str, ...] = field(converter=_hosts)
    domain: tuple[int, ...] = field(converter=coordinates)
    nic: tuple[int, ...] = field(converter=coordinates)
    speeds: Speeds = field(factory=Speeds)

    @nic.default
    def _one_a_host(self) -> tuple[int, ...]:
        return _number(self.host)

    @classmethod
    def single(cls, num_processes: int) -> Topology:
        """All processes on one host and in one domain."""
        return cls(("",) * num_processes, (0,) * num_processes)

    @classmethod
    def of(cls, world: World, cluster: Cluster | None = None) -> Topology:
        """What the processes of a world said, and what the sources state.

        A process that didn't say where it is shares its host with all others that didn't.
        """
        stated = cluster or Cluster()
        on, within, by = _Sets(stated.hosts), _Sets(stated.domains), _Sets(stated.nics)
        seats: dict[int, list[Seat]] = {}
        for seat in world.seats:
            seats.setdefault(seat.process, []).append(seat)
        said = {place.process: place for place in world.places}
        hosts, domains, nics = [], [], []
        for process in range(world.num_processes):
            mine, place = seats.get(process, []), said.get(process)
            hosts.append(on.of(mine) or (place.host if place else ""))
            found = within.of(mine) or (place.domain if place else "")
            domains.append(f"domain {found}" if found else f"host {hosts[-1]}")
            card = by.of(mine)
            nics.append(f"nic {hosts[-1]}/{card}" if card else f"host {hosts[-1]}")
        return cls(tuple(hosts), _number(domains), _number(nics), stated.speeds)

    def domain_of(self, process: int) -> int:
        """The number of the domain that a process is in."""
        return self.domain[process]

    @property
    def host_number(self) -> tuple[int, ...]:
        """Hosts as numbers, by process."""
        return _number(self.host)


class _Sets:
    """Sets of ranks, looked up by rank: one that is named by its number wins over one in a range, that over `*`."""

    def __init__(self, sets: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        self._numbers: dict[tuple[str, int], str] = {}
        self._ranges: dict[str, list[tuple[int, int, str]]] = {}
        self._sides: dict[str, str] = {}
        for place, ranks in sets:
            for rank in ranks:
                self._add(place, rank)

    def _add(self, place: str, rank: str) -> None:
        side, _, which = rank.rstrip("]").rpartition("[")
        first, dash, last = which.partition("-")
        if which == "*":
            self._sides[side] = place
        elif dash:
            self._ranges.setdefault(side, []).append((int(first), int(last), place))
        else:
            self._numbers[side, int(which)] = place

    def of(self, seats: Iterable[Seat]) -> str:
        """The set of the first of these seats that is in one, or nothing."""
        return next((found for seat in seats if (found := self._of(seat.engine or "source", seat.rank))), "")

    def _of(self, side: str, rank: int) -> str:
        among = (place for first, last, place in self._ranges.get(side, ()) if first <= rank <= last)
        return self._numbers.get((side, rank)) or next(among, "") or self._sides.get(side, "")
