"""Fabric `gloo`: torch's gloo over TCP between CPU tensors, one `ProcessGroupGloo` a group, built directly.

torch's own list of groups never hears of it: no default group is needed, made or changed.

1. Roll call through the store: who doesn't come is known by number before anything blocks in C++.
2. Connect all pairs at once (a pair that connects lazily loses what is sent before its peer came).
3. Send and receive with a tag made of the length. gloo ends the process when a message is longer than the buffer it
   meets; with the length in the tag such two never meet, and the wait runs out instead.
4. A wait that runs out closes all pairs of the group at this process, and gloo's own `abort` does nothing. So `abort`
   posts a receive that nobody answers and lets it run out, which ends every pending wait at once, but for one.
5. That one is gloo's: a message that is half way across when its peer dies ends only when its wait runs out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal

import torch
from attrs import define, field

from refit_sdk.errors import RendezvousError
from refit_sdk.fabric import Deadline, Fabric, FabricError, KeyValue, local_host, roll_call
from refit_sdk.hookspecs import hookimpl

_UNANSWERED: Final = 2**31 - 1
"""A tag that no message has."""

Kind = Literal["send", "recv"]


def _tag(nbytes: int) -> int:
    return nbytes % _UNANSWERED


def _duration(seconds: float) -> timedelta:
    # Whole milliseconds are what gloo counts in, and none of them means for ever.
    return timedelta(milliseconds=max(1, round(seconds * 1000)))


@define(eq=False)
class GlooWork:
    """One posted send or receive."""

    _group: GlooGroup
    _work: Any
    _kind: Kind
    _peer: int
    _nbytes: int
    _failure: FabricError | None = None

    def wait(self, timeout: float) -> int:
        """Wait for completion; the bytes carried. `FabricError` on failure, abort or after `timeout` seconds.

        A second wait tells the same: gloo's own would wait in vain.
        """
        if not self._work.is_completed():
            try:
                self._work.wait(_duration(timeout))
            except RuntimeError as error:
                self._failure = self._group.failure(error, peer=self._peer, doing=self._doing(timeout))
                raise self._failure from error
        if self._failure is not None:
            raise self._failure
        return self._nbytes

    def _doing(self, timeout: float) -> str:
        verb = "take" if self._kind == "send" else "send"
        return f"waited up to {timeout:g} s for process {self._peer} to {verb} {self._nbytes} bytes"


@define(eq=False)
class GlooGroup:
    """One process's end of a gloo group. A group of one member has no sockets."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    _members: tuple[int, ...]
    _process: int
    _native: Any
    _store: object = None
    _ended: FabricError | None = None
    _lock: threading.Lock = field(factory=threading.Lock)

    @property
    def links(self) -> dict[tuple[int, int], str]:
        """What carries the bytes of each link of this process, by (sender, receiver)."""
        peers = [member for member in self._members if member != self._process]
        return {pair: "gloo" for peer in peers for pair in ((self._process, peer), (peer, self._process))}

    @property
    def ended(self) -> FabricError | None:
        """Why the whole group has ended at this process, or None."""
        return self._ended

    def send(self, buffer: torch.Tensor, *, peer: int) -> GlooWork:
        """Start sending. The work ends when all bytes are on their way to a receive that the peer has posted."""
        return self._post("send", buffer, peer)

    def recv(self, buffer: torch.Tensor, *, peer: int) -> GlooWork:
        """Start receiving exactly the buffer's length."""
        return self._post("recv", buffer, peer)

    def _post(self, kind: Kind, buffer: torch.Tensor, peer: int) -> GlooWork:
        native, nbytes = self._usable(peer), buffer.numel()
        try:
            work = getattr(native, kind)([buffer], self._members.index(peer), _tag(nbytes))
        except RuntimeError as error:
            raise self.failure(error, peer=peer, doing=f"tried to {kind} {nbytes} bytes") from error
        return GlooWork(self, work, kind, peer, nbytes)

    def _usable(self, peer: int) -> Any:
        if self._ended is not None:
            raise FabricError(str(self._ended), peer=self._ended.peer)
        if self._native is None or peer == self._process or peer not in self._members:
            open_or_not = "a closed group" if self._native is None and len(self._members) > 1 else "the group"
            raise FabricError(
                f"process {self._process} can't reach process {peer} in {open_or_not} of {list(self._members)}"
            )
        return self._native

    def failure(self, error: RuntimeError, *, peer: int, doing: str) -> FabricError:
        """What an error of gloo's means. A wait that ran out has ended the group: later errors tell of that one."""
        text = str(error)
        with self._lock:
            if self._ended is None and "Timed out" in text:
                self._ended = FabricError(doing, peer=peer)
            if self._ended is not None:
                return FabricError(str(self._ended), peer=self._ended.peer)
        return FabricError(f"lost process {peer}, {doing}: {_last_words(text)}", peer=peer)

    def abort(self, reason: str) -> None:
        """End every pending and later operation with a `FabricError` that gives the reason. Takes milliseconds."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = FabricError(reason)
        native = self._native
        for index, member in enumerate(self._members):
            if native is not None and member != self._process and _run_out(native, index):
                return

    def close(self) -> None:
        """Free sockets and threads. A second call does nothing."""
        self._native = self._store = None


def _run_out(native: Any, index: int) -> bool:
    """Let a receive from a member run out. Whether it did; False if that pair had ended before."""
    try:
        native.recv([torch.empty(1, dtype=torch.uint8)], index, _UNANSWERED).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return "Timed out" in str(error)
    return False


def _last_words(text: str) -> str:
    """gloo's message without the place in its source."""
    return text.partition("] ")[2] if text.startswith("[") else text


class GlooFabric:
    """gloo on the network that this process's address belongs to, given by `host` (a name or address, v4 or v6, of this
    machine) or by `interface` (its name). A session gives the address by which it reaches the rendezvous; without
    either it is loopback, which joins processes of one machine.

    >>> GlooFabric(host="::1").name
    'gloo'
    """

    name: ClassVar[str] = "gloo"

    def __init__(self, *, host: str | None = None, interface: str | None = None) -> None:
        if host is not None and interface is not None:
            raise FabricError(f"fabric gloo got host={host!r} and interface={interface!r}; give one of them")
        self._host = host
        self._interface = interface

    @classmethod
    def missing(cls) -> str | None:
        """None, or why this torch has no gloo."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_gloo_available():
            return None
        return f"torch {torch.__version__} was built without gloo; install a build from PyTorch's own index"

    def connect(
        self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float
    ) -> GlooGroup:
        """Connect to all members. `FabricError` naming who doesn't come, or all addresses if they can't be joined."""
        import torch.distributed as dist

        from refit_backends.gloo_store import KeyValueStore

        if len(members) == 1:
            return GlooGroup(tuple(members), process, None)
        deadline = Deadline.after(timeout)
        host = self._host if self._host or self._interface else local_host(store)
        device, word = self._device(host), (host or f"interface {self._interface}").encode()
        words = roll_call(store, group=group, members=members, process=process, deadline=deadline, word=word)
        table = KeyValueStore(store, prefix=f"{group}/gloo", deadline=deadline)
        try:
            native = dist.ProcessGroupGloo(table, members.index(process), len(members), _options(device, deadline))
        except (RuntimeError, RendezvousError) as error:
            places = ", ".join(f"{member} at {word.decode()}" for member, word in words.items())
            raise FabricError(
                f"process {process} can't connect group {group!r} ({places}): {_last_words(str(error))}; "
                "give each a host= or interface= that the others reach"
            ) from error
        return GlooGroup(tuple(members), process, native, table)

    def _device(self, host: str | None) -> Any:
        import torch.distributed as dist

        where = {"interface": self._interface} if host is None else {"hostname": host}
        try:
            return dist.ProcessGroupGloo.create_device(**where, lazy_init=False)
        except RuntimeError as error:
            raise FabricError(
                f"fabric gloo can't listen on {host or f'interface {self._interface}'}: {_last_words(str(error))}; "
                "give host= (an address of this machine) or interface= (see `ip address`)"
            ) from error


def _options(device: Any, deadline: Deadline) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _duration(deadline.remaining())
    options._devices = [device]
    options._threads = 1  # for collectives, which nobody calls here
    return options


@hookimpl
def refit_register_fabrics() -> list[type[Fabric]]:
    """The fabric of this module."""
    return [GlooFabric]
