"""Fabric `shm`: CPU tensors between processes of one host, through memory that they share.

1. Find who shares this host, and connect to each by a Unix socket (`shm_meeting`). All members must.
2. Serve all peers by one thread (`links`), chunk by chunk (`shm_link`).

Where the kernel lets the receiver read the sender's memory (tried at connecting), a message is one copy, else two.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import ClassVar, Final

from refit_backends.links import LinkGroup, Listen
from refit_backends.shm_link import ShmLink
from refit_backends.shm_meeting import Met, meet
from refit_backends.shm_memory import RING_NBYTES, Reader, check_room
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue
from refit_sdk.hookspecs import hookimpl

ONE_COPY: Final = "shm (one copy)"
TWO_COPIES: Final = "shm"


def words(met: Met, *, process: int) -> dict[tuple[int, int], str]:
    """What serves the links with those that were met: `shm (one copy)` or `shm`, by (sender, receiver)."""
    found = {}
    for peer, about in met.peers.items():
        found[process, peer] = ONE_COPY if about.reads else TWO_COPIES
        found[peer, process] = ONE_COPY if about.readable else TWO_COPIES
    return found


class ShmFabric:
    """Shared memory between all processes of a group, which must share a host. `host` overrides REFIT_HOST, which
    states the host instead of having it found. `one_copy=False` leaves peers' memory alone. Segments are memfds, or
    unnamed files in `directory`.

    >>> ShmFabric(host="rack-3").name
    'shm'
    """

    name: ClassVar[str] = "shm"

    def __init__(self, *, host: str | None = None, one_copy: bool = True, directory: str | None = None) -> None:
        self._host = host
        self._one_copy = one_copy
        self._directory = directory

    @property
    def host(self) -> str | None:
        """The host that was given, if one was."""
        return self._host

    @classmethod
    def missing(cls) -> str | None:
        """None, or that this isn't Linux."""
        return None if sys.platform == "linux" else f"it needs Linux, this is {sys.platform}; use fabric 'gloo'"

    def meet(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, deadline: Deadline) -> Met:
        """Find and connect the members that share this host."""
        check_room(RING_NBYTES, directory=self._directory)
        return meet(
            group=group,
            members=members,
            process=process,
            store=store,
            deadline=deadline,
            host=os.environ.get("REFIT_HOST", "") if self._host is None else self._host,
            one_copy=self._one_copy,
            directory=self._directory,
        )

    def meet_all(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, deadline: Deadline, asks: str
    ) -> Met:
        """As `meet`; `FabricError` naming the fabric that `asks` if there is a member that doesn't share this host."""
        met = self.meet(group=group, members=members, process=process, store=store, deadline=deadline)
        if not met.apart:
            return met
        met.part()
        raise FabricError(
            f"fabric {asks} joins processes of one host only, and {len(met.apart)} pairs of group {group!r} share "
            f"none: {met.why_apart(met.apart[0])}; use fabric 'mixed', which takes TCP between hosts",
            peer=next((peer for pair in met.apart if process in pair for peer in pair if peer != process), None),
        )

    def over(self, met: Met, *, members: Sequence[int], process: int) -> LinkGroup:
        """The group of those that were met."""
        reader = Reader()

        def make(listen: Listen) -> list[ShmLink]:
            return [
                ShmLink(process, peer, p.socket, listen, p.pid, p.readable, p.reads, self._directory, reader)
                for peer, p in met.peers.items()
            ]

        found = words(met, process=process)
        return LinkGroup.over(make, members=members, process=process, words=found, on_close=reader.close)

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> LinkGroup:
        """Connect to all members. `FabricError` naming who doesn't come, or those that are on different hosts."""
        if len(members) == 1:
            return LinkGroup(tuple(members), process)
        deadline = Deadline.after(timeout)
        met = self.meet_all(group=group, members=members, process=process, store=store, deadline=deadline, asks="shm")
        return self.over(met, members=members, process=process)


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [ShmFabric]
