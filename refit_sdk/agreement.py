"""Agreeing on an epoch: every participant plans the same world, the digests are compared, then all connect.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from refit_sdk.messages import Linked, Planned

Sums = tuple[tuple[str, str, int, int], ...]


@define
class Agreement:
    """One forming of an epoch. `kind` is what called for it: "join", "push" or "reform".

    `stands`: the epoch stands already, and only every participant's word is asked for.
    """

    epoch: int
    kind: str
    links: frozenset[int]
    engines: tuple[str, ...]
    stands: bool = False
    _planned: dict[int, Planned] = field(factory=dict, init=False)
    _linked: dict[int, Linked] = field(factory=dict, init=False)

    def planned(self, link: int, message: Planned) -> bool:
        """Take a plan's digests; whether all have come."""
        self._planned[link] = message
        return self._planned.keys() >= self.links

    def linked(self, link: int, message: Linked) -> bool:
        """Take word that a participant has connected; whether all have."""
        self._linked[link] = message
        return self._linked.keys() >= self.links

    @property
    def sums(self) -> Sums:
        """The parts of the digests of tied tensors that came with `linked`."""
        return tuple(entry for message in self._linked.values() for entry in message.sums)

    def waiting_for(self) -> list[int]:
        """The participants that the current step waits for."""
        return sorted(self.links - (self._linked.keys() if self._all_planned else self._planned.keys()))

    @property
    def _all_planned(self) -> bool:
        return self.stands or self._planned.keys() >= self.links

    def step(self) -> str:
        """What is waited for."""
        return "connect" if self._all_planned else "plan"

    def disagreement(self) -> tuple[int, int] | None:
        """Two participants whose digests differ, or None."""
        first, *others = sorted(self._planned)
        for other in others:
            if _digests(self._planned[first]) != _digests(self._planned[other]):
                return first, other
        return None


def _digests(message: Planned) -> tuple[str, str]:
    return message.input_digest, message.plan_digest


def unequal_sums(sums: Iterable[tuple[str, str, int, int]]) -> list[tuple[str, str]]:
    """The pairs of tied names whose digests, summed over all ranks, differ.

    >>> unequal_sums([("lm_head.weight", "embed.weight", 3, 1), ("lm_head.weight", "embed.weight", 2, 4)])
    []
    """
    totals: dict[tuple[str, str], list[int]] = {}
    for name, other, a, b in sums:
        total = totals.setdefault((name, other), [0, 0])
        total[0] += a
        total[1] += b
    return [pair for pair, (a, b) in sorted(totals.items()) if (a - b) % 2**64]
