"""Adapters for a plain dict of tensors, of which each rank has its rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import define, field

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import FencedError
from refit_sdk.hookspecs import hookimpl


@define(eq=False)
class Weights:
    """A rank's rows of some tensors: rows `rank * n // size` to `(rank + 1) * n // size` of each, in `rows`."""

    shapes: Mapping[str, tuple[int, ...]]
    rank: int
    size: int
    fenced: str = ""
    rows: dict[str, torch.Tensor] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name, shape in self.shapes.items():
            start, stop = self.share(shape[0])
            self.rows[name] = torch.zeros(stop - start, *shape[1:])

    def share(self, count: int) -> tuple[int, int]:
        """The rows of this rank."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's rows out of whole tensors."""
        for name, rows in self.rows.items():
            start, stop = self.share(len(tensors[name]))
            rows.copy_(tensors[name][start:stop])

    def gather(self) -> dict[str, torch.Tensor]:
        """Whole tensors, of the rows of all ranks of the job."""
        found = {}
        for name, rows in self.rows.items():
            parts: list[torch.Tensor | None] = [None] * self.size
            dist.all_gather_object(parts, rows)
            found[name] = torch.cat([part for part in parts if part is not None])
        return found

    def run(self) -> float:
        """What a forward would be."""
        if self.fenced:
            raise FencedError(self.fenced)
        return float(sum(rows.sum() for rows in self.rows.values()))


class Adapter:
    """Describes `Weights`, as a source and as a target."""

    name = "acme"

    def __init__(self, model: Weights, *, rank: int, size: int) -> None:
        self.model = model

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Only our own class."""
        return isinstance(model, Weights)

    def prepare(self) -> None:
        """Nothing is deferred."""

    def describe(self) -> Sequence[Fragment]:
        """Every tensor's rows."""
        found = []
        for name, rows in self.model.rows.items():
            shape = self.model.shapes[name]
            box = Box.whole(shape).narrow(0, *self.model.share(shape[0]))
            found.append(Fragment(name, shape, box, rows))
        return found

    def identity(self) -> Hashable:
        """Where each tensor is, and its shape and strides."""
        return tuple((name, t.data_ptr(), t.shape, t.stride()) for name, t in self.model.rows.items())

    def install(self, *, version: int) -> None:
        """Nothing is derived from the weights."""

    def fence(self, reason: str) -> None:
        """Keep the model from running."""
        self.model.fenced = reason

    def unfence(self) -> None:
        """Let it run again."""
        self.model.fenced = ""


@hookimpl
def refit_register_source_adapters() -> list[type]:
    """The one source adapter."""
    return [Adapter]


@hookimpl
def refit_register_target_adapters() -> list[type]:
    """The one target adapter."""
    return [Adapter]
