"""Fabrics that are wrong on purpose, each a wrapper around `inproc`."""

from __future__ import annotations

from typing import Any

import torch
from refit_backends.inproc import InprocFabric


class Done:
    """A work that says that it is done."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def wait(self, timeout: float) -> int:
        return self._nbytes


class Group:
    """A group as it should be; mutants replace a method."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Stale(Group):
    """A send is read from the buffer that was sent before it, where they are as long."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.before: dict[tuple[int, int], torch.Tensor] = {}

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        key = (peer, buffer.numel())
        old = self.before.get(key, buffer)
        self.before[key] = buffer.clone()
        return self.inner.send(old, peer=peer)


class Early(Group):
    """A receive is acknowledged before its bytes are there."""

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        self.inner.recv(buffer, peer=peer)
        return Done(buffer.numel())


class EarlySend(Group):
    """A send is acknowledged before anybody has read it."""

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        self.inner.send(buffer, peer=peer)
        return Done(buffer.numel())


class Silent(Group):
    """Nothing is carried, and everything is done."""

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        return Done(buffer.numel())

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        return Done(buffer.numel())


class Short(Group):
    """The last byte of a message of more than 64 doesn't come; the count says that it did."""

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        return self.inner.send(self._cut(buffer), peer=peer)

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        work, nbytes = self.inner.recv(self._cut(buffer), peer=peer), buffer.numel()

        class Told:
            def wait(self, timeout: float) -> int:
                work.wait(timeout)
                return nbytes

        return Told()

    def _cut(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[:-1] if buffer.numel() > 64 else buffer


class Reordering(Group):
    """The second of two messages overtakes the first, where both are as long."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        inner, held, key = self.inner, self.held, (peer, buffer.numel())
        if key in held:
            first, late = held.pop(key)
            made = inner.send(buffer, peer=peer)
            late.work = inner.send(first, peer=peer)
            return made

        class Late:
            work: Any = None

            def wait(self, timeout: float) -> int:
                if self.work is None:
                    held.pop(key, None)
                    self.work = inner.send(buffer, peer=peer)
                nbytes: int = self.work.wait(timeout)
                return nbytes

        held[key] = (buffer, Late())
        return held[key][1]


class NoCount(Group):
    """Everything is carried, and half of it counted."""

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        work = self.inner.recv(buffer, peer=peer)

        class Half:
            def wait(self, timeout: float) -> int:
                return int(work.wait(timeout)) // 2

        return Half()


class Wrong:
    """The fabric of a kind of group."""

    name = "wrong"
    within_process = True

    def __init__(self, kind: type[Group]) -> None:
        self.kind = kind

    def missing(self) -> str | None:
        return None

    def connect(self, **about: Any) -> Any:
        return self.kind(InprocFabric().connect(**about))
