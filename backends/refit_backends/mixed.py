"""Fabric `mixed`: shared memory between processes that share a host, TCP between all others, link by link.

1. Members find who shares their host, as fabric `shm` does, and all learn of all pairs.
2. If any pair shares no host, all members connect by the other fabric (`tcp`, or the one that was given) as well.
3. Each peer is served by one of the two, from connecting to closing: nothing is re-routed when something fails.
4. One that ends as a whole ends the other, so that the group is one group to its user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from attrs import define, frozen

from refit_backends.gloo import GlooFabric, GlooGroup
from refit_backends.links import LinkGroup
from refit_backends.shm import ShmFabric
from refit_backends.tcp import TcpFabric
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue, Work
from refit_sdk.hookspecs import hookimpl
from refit_sdk.runs import Runs


@frozen(eq=False)
class MixedWork:
    """One posted send or receive, of either."""

    _group: MixedGroup
    _work: Work

    @property
    def touched(self) -> bool:
        """Whether a receive's buffer may have been written."""
        return getattr(self._work, "touched", True)

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds."""
        try:
            return self._work.wait(timeout)
        except FabricError:
            self._group.end_together()
            raise


@define(eq=False)
class MixedGroup:
    """One process's end of a group over both. It takes runs in place of buffers if both do."""

    devices: ClassVar[frozenset[str]] = GlooGroup.devices & LinkGroup.devices
    _near: LinkGroup
    _far: LinkGroup | GlooGroup
    _local: frozenset[int]

    @property
    def scatters(self) -> bool:
        """Whether runs can be sent and received in place of buffers."""
        return isinstance(self._far, LinkGroup)

    @property
    def links(self) -> dict[tuple[int, int], str]:
        """How bytes of each link of this process travel, by (sender, receiver)."""
        return {**self._far.links, **self._near.links}

    def send(self, buffer: torch.Tensor | Runs, *, peer: int) -> MixedWork:
        """Start sending."""
        return MixedWork(self, self._of(peer).send(buffer, peer=peer))  # type: ignore[arg-type]

    def recv(self, buffer: torch.Tensor | Runs, *, peer: int) -> MixedWork:
        """Start receiving exactly the buffer's length."""
        return MixedWork(self, self._of(peer).recv(buffer, peer=peer))  # type: ignore[arg-type]

    def _of(self, peer: int) -> LinkGroup | GlooGroup:
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
    """Shared memory inside hosts, TCP between them. Give either where it needs arguments of its own; `far` may be
    `GlooFabric()` as well, over which strided views are packed.

    >>> MixedFabric(far=TcpFabric(interface="eth1")).name
    'mixed'
    """

    name: ClassVar[str] = "mixed"

    def __init__(self, *, far: TcpFabric | GlooFabric | None = None, shm: ShmFabric | None = None) -> None:
        self._far = far or TcpFabric()
        self._shm = shm or ShmFabric()

    @property
    def host(self) -> str | None:
        """The host that its shared memory was given, if one was."""
        return self._shm.host

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here, or None if both can."""
        return ShmFabric.missing() or TcpFabric.missing()

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> LinkGroup | MixedGroup:
        """Connect to all members. `FabricError` naming who doesn't come or can't be joined."""
        if len(members) == 1:
            return LinkGroup(tuple(members), process)
        deadline = Deadline.after(timeout)
        met = self._shm.meet(group=group, members=members, process=process, store=store, deadline=deadline)
        near = self._shm.over(met, members=members, process=process)
        if not met.apart:
            return near
        try:
            left = deadline.remaining()
            far = self._far.connect(group=group, members=members, process=process, store=store, timeout=left)
        except BaseException:
            near.close()
            raise
        return MixedGroup(near, far, frozenset(met.peers))


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [MixedFabric]
