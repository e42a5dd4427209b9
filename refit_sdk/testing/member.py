"""A member of a group in the tests of a fabric: it connects groups, sends and receives, meets the others at a word, and
may leave for good or fall silent, as a process or as a thread in its place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field

from refit_sdk.fabric import Group, within_process
from refit_sdk.testing.meeting import Table
from refit_sdk.testing.rig import FabricLike, made

SURE = 20.0
"""Seconds in which everything that comes at all has come."""


@define(eq=False)
class Member:
    """A process of a talk: its world number and those of all."""

    process: int
    members: tuple[int, ...]
    fabric: FabricLike
    port: int
    prefix: str
    device: str = "cpu"
    _table: Table | None = None
    _groups: list[Group] = field(factory=list)

    @property
    def table(self) -> Table:
        """The shared table."""
        if self._table is None:
            self._table = Table.at(self.port, prefix=self.prefix)
        return self._table

    @property
    def peers(self) -> list[int]:
        """All others."""
        return [member for member in self.members if member != self.process]

    def connect(self, group: str = "g", *, members: Sequence[int] | None = None, timeout: float = SURE) -> Group:
        """One end of a group, closed at the end of the talk."""
        fabric = made(self.fabric)
        end: Group = fabric.connect(
            group=group, members=self.members if members is None else members, process=self.process,
            store=self.table, timeout=timeout,
        )  # fmt: skip
        self._groups.append(end)
        return end

    def meet(self, word: str, count: int | None = None) -> None:
        """Wait until all (or so many) have come to this word."""
        self.table.meet(word, len(self.members) if count is None else count)

    def leave(self) -> None:
        """Be gone, as a process that was killed is."""
        leave(self._groups, within_process(made(self.fabric)))

    def fall_silent(self) -> None:
        """Say and do nothing any more, as a process that was stopped."""
        fall_silent(self.table, within_process(made(self.fabric)))

    def numbers(self, *values: int) -> torch.Tensor:
        """A buffer."""
        return torch.tensor(values, dtype=torch.uint8, device=self.device)

    def filled(self, nbytes: int, seed: int) -> torch.Tensor:
        """A buffer of bytes that depend on a seed."""
        chance = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=chance).to(self.device)

    def close(self) -> None:
        """Close all ends."""
        for group in self._groups:
            group.close()


def converse(_: Any, member: Member, body: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A body, and what has to be closed after it."""
    try:
        return body(member, *args)
    finally:
        member.close()


class Gone(Exception):
    """A thread that leaves where a process would be killed."""


def leave(groups: Sequence[Any], is_thread: bool) -> None:
    """Be killed; a thread aborts what it has, and ends."""
    if not is_thread:
        os.kill(os.getpid(), signal.SIGKILL)
    for group in groups:
        group.abort("this thread is gone")
    raise Gone


def fall_silent(table: Table, is_thread: bool) -> None:
    """Be stopped; a thread waits until the others have seen that it is silent."""
    if not is_thread:
        os.kill(os.getpid(), signal.SIGSTOP)
    table.get("seen", timeout=SURE)
    raise Gone
