"""Fabric `mixed`: shared memory between processes that share a host, gloo between all others, link by link.

1. Members find who shares their host, as fabric `shm` does, and all learn of all pairs.
2. If any pair shares no host, all members connect by gloo as well.
3. Each peer is served by one of the two, from connecting to closing: nothing is re-routed when something fails.
4. One that ends as a whole ends the other, so that the group is one group to its user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from attrs import define, frozen

from refit_backends.gloo import GlooFabric, GlooGroup, GlooWork
from refit_backends.shm import ShmFabric, ShmGroup
from refit_backends.shm_link import Operation
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue
from refit_sdk.hookspecs import hookimpl


@frozen(eq=False)
class MixedWork:
    """One posted send or receive, of either."""

    _group: MixedGroup
    _work: GlooWork | Operation

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds."""
        try:
            return self._work.wait(timeout)
        except FabricError:
            self._group.end_together()
            raise


@define(eq=False)
class MixedGroup:
    """One process's end of a group over both."""

    devices: ClassVar[frozenset[str]] = GlooGroup.devices & ShmGroup.devices
    _near: ShmGroup
    _far: GlooGroup
    _local: frozenset[int]

    @property
    def links(self) -> dict[tuple[int, int], str]:
        """How bytes of each link of this process travel, by (sender, receiver)."""
        return {**self._far.links, **self._near.links}

    def send(self, buffer: torch.Tensor, *, peer: int) -> MixedWork:
        """Start sending."""
        return MixedWork(self, self._of(peer).send(buffer, peer=peer))

    def recv(self, buffer: torch.Tensor, *, peer: int) -> MixedWork:
        """Start receiving exactly the buffer's length."""
        return MixedWork(self, self._of(peer).recv(buffer, peer=peer))

    def _of(self, peer: int) -> ShmGroup | GlooGroup:
        return self._near if peer in self._local else self._far

    def end_together(self) -> None:
        """End the one if the other has ended."""
        for one, other in ((self._near, self._far), (self._far, self._near)):
            if one.ended is not None:
                other.abort(str(one.ended))

    def abort(self, reason: str) -> None:
        """End every pending and later operation with a `FabricError` that gives the reason. Returns at once."""
        self._near.abort(reason)
        self._far.abort(reason)

    def close(self) -> None:
        """Free sockets, threads and memory. A second call does nothing."""
        self._near.close()
        self._far.close()


class MixedFabric:
    """Shared memory inside hosts, gloo between them. Give either where it needs arguments of its own.

    >>> MixedFabric(gloo=GlooFabric(interface="eth1")).name
    'mixed'
    """

    name: ClassVar[str] = "mixed"

    def __init__(self, *, gloo: GlooFabric | None = None, shm: ShmFabric | None = None) -> None:
        self._gloo = gloo or GlooFabric()
        self._shm = shm or ShmFabric()

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here, or None if both can."""
        return ShmFabric.missing() or GlooFabric.missing()

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> ShmGroup | MixedGroup:
        """Connect to all members. `FabricError` naming who doesn't come or can't be joined."""
        if len(members) == 1:
            return ShmGroup(tuple(members), process)
        deadline = Deadline.after(timeout)
        met = self._shm.meet(group=group, members=members, process=process, store=store, deadline=deadline)
        near = self._shm.over(met, members=members, process=process)
        if not met.apart:
            return near
        try:
            left = deadline.remaining()
            far = self._gloo.connect(group=group, members=members, process=process, store=store, timeout=left)
        except BaseException:
            near.close()
            raise
        return MixedGroup(near, far, frozenset(met.peers))


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [MixedFabric]
