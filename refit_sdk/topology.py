"""Where processes are: hosts and domains, in integers that every rank agrees on at joining.

>>> Topology.single(4).domain_of(3)
0
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from refit_sdk.box import coordinates


def _hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(hosts)


@frozen
class Topology:
    """The host and the domain of each process, by world number. What joins a domain is much faster than the network."""

    host: tuple[str, ...] = field(converter=_hosts)
    domain: tuple[int, ...] = field(converter=coordinates)

    @classmethod
    def single(cls, num_processes: int) -> Topology:
        """All processes on one host and in one domain."""
        return cls(("",) * num_processes, (0,) * num_processes)

    def domain_of(self, process: int) -> int:
        """The number of the domain that a process is in."""
        return self.domain[process]
