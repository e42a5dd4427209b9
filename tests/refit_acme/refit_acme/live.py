"""What holds or carries live bytes: adapters for a plain dict of tensors, and a fabric between threads."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from attrs import field, frozen

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import FencedError
from refit_sdk.fabric import FabricError, KeyValue
from refit_sdk.hookspecs import hookimpl


@frozen
class Weights:
    """A model in its plainest form: whole tensors by checkpoint name."""

    tensors: dict[str, torch.Tensor]


class _Adapter:
    def __init__(self, model: Weights, *, rank: int, size: int) -> None:
        self.model = model

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Only our own class."""
        return isinstance(model, Weights)

    def describe(self) -> Sequence[Fragment]:
        """Every tensor, whole."""
        return [Fragment(name, view.shape, Box.whole(view.shape), view) for name, view in self.model.tensors.items()]

    def identity(self) -> Hashable:
        """Where each tensor is, and its shape and strides."""
        return tuple((name, t.data_ptr(), t.shape, t.stride()) for name, t in self.model.tensors.items())


class Trainer(_Adapter):
    """The weights as a source."""

    name = "test-only-weights"

    def prepare(self) -> None:
        """Nothing is deferred."""


class Generator(_Adapter):
    """The weights as a target; `read` is what a forward would be."""

    name = "test-only-weights"
    version: int | None = None
    reason = ""

    def install(self, *, version: int) -> None:
        """Note the version; nothing is derived."""
        self.version = version

    def fence(self, reason: str) -> None:
        """Refuse to be read."""
        self.reason = self.reason or reason

    def unfence(self) -> None:
        """Be read again."""
        self.reason = ""

    def read(self, name: str) -> torch.Tensor:
        """A tensor, unless fenced."""
        if self.reason:
            raise FencedError(self.reason)
        return self.model.tensors[name]


@frozen
class _Done:
    nbytes: int

    def wait(self, timeout: float) -> int:
        return self.nbytes


@frozen
class _Pending:
    take: Callable[[float], int]

    def wait(self, timeout: float) -> int:
        return self.take(timeout)


_Box = queue.SimpleQueue[bytes]
_boxes: defaultdict[tuple[str, int, int], _Box] = defaultdict(queue.SimpleQueue)


@frozen
class _Group:
    name: str
    process: int
    reasons: list[str] = field(factory=list)

    def send(self, buffer: torch.Tensor, *, peer: int) -> _Done:
        self._check()
        _boxes[self.name, self.process, peer].put(buffer.numpy().tobytes())
        return _Done(buffer.numel())

    def recv(self, buffer: torch.Tensor, *, peer: int) -> _Pending:
        self._check()
        box = _boxes[self.name, peer, self.process]

        def take(timeout: float) -> int:
            try:
                data = box.get(timeout=timeout)
            except queue.Empty:
                raise FabricError(f"nothing arrived from process {peer} in {timeout} s", peer=peer) from None
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return len(data)

        return _Pending(take)

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)

    def close(self) -> None:
        for key in [key for key in _boxes if key[0] == self.name and key[2] == self.process]:
            del _boxes[key]

    def _check(self) -> None:
        if self.reasons:
            raise FabricError(self.reasons[0])


class Threads:
    """Bytes between threads of one process."""

    name = "test-only-threads"

    @classmethod
    def missing(cls) -> str | None:
        """Nothing is needed."""
        return None

    def connect(self, *, group: str, members: Sequence[int], process: int, store: KeyValue, timeout: float) -> _Group:
        """Connected by being in one process."""
        return _Group(group, process)


@hookimpl
def refit_register_fabrics() -> list[type]:
    """The one fabric."""
    return [Threads]


@hookimpl
def refit_register_source_adapters() -> list[type]:
    """The one source adapter."""
    return [Trainer]


@hookimpl
def refit_register_target_adapters() -> list[type]:
    """The one target adapter."""
    return [Generator]
