"""Models for tests: fragments by hand, filled and judged by the judge, with guard bytes around every view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import judge
import torch
import torch_fill
from attrs import define, field, frozen

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box

SEED = 7


@frozen
class Held:
    """A region that a rank holds of a tensor, and where: in `block` (one of its own if empty), `offset` bytes in, with
    `strides` in elements (None: row-major). `stored` is the dtype.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    stored: str = "float32"
    strides: tuple[int, ...] | None = None
    block: str = ""
    offset: int = 0
    aliases: tuple[str, ...] = ()
    granule: tuple[int, ...] | None = None

    @property
    def extent(self) -> int:
        """Bytes from the start of the block to the end of the view."""
        itemsize = getattr(torch, self.stored).itemsize
        strides = self.strides
        if strides is None:
            return self.offset + self.box.size * itemsize
        last = sum((n - 1) * step for n, step in zip(self.box.shape, strides, strict=True))
        return self.offset + (last + 1) * itemsize

    def bits(self, *, version: int, dtype: str | None = None) -> Any:
        """The judge's bits of the region, as the source (of `dtype`) has them, cast to what is stored."""
        of = dtype or self.stored
        name = self.name
        made = judge.expected(name, self.shape, self.box.start, self.box.stop, of, SEED, version, within=self.stored)
        return judge.cast(made, of, self.stored)


@define(eq=False)
class Model:
    """An object that the `fragments` adapter accepts. `within` is a dtype that the values must stay finite in."""

    held: Sequence[Held]
    within: str | None = None
    blocks: dict[str, judge.Storage] = field(factory=dict)
    fragments: list[Fragment] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        for number, each in enumerate(self.held):
            block = self._block(number, each)
            dtype = getattr(torch, each.stored)
            view = torch_fill.guarded(block, dtype, each.box.shape, strides=each.strides, offset=each.offset)
            self.fragments.append(
                Fragment(each.name, each.shape, each.box, view, granule=each.granule, aliases=each.aliases)
            )

    def _block(self, number: int, each: Held) -> judge.Storage:
        name = each.block or f"own {number}"
        if name not in self.blocks:
            same = [h for n, h in enumerate(self.held) if (h.block or f"own {n}") == name]
            self.blocks[name] = judge.Storage(max(h.extent for h in same))
        return self.blocks[name]

    def refit_fragments(self) -> list[Fragment]:
        """What this rank holds."""
        return self.fragments

    def fill(self, *, version: int) -> None:
        """Put the judge's values of a version into every view."""
        for each, fragment in zip(self.held, self.fragments, strict=True):
            name, box = each.name, each.box
            bits = judge.expected(
                name, each.shape, box.start, box.stop, each.stored, SEED, version, within=self.within or each.stored
            )
            torch_fill.fill(fragment.view, bits)

    def faults(self, *, version: int, source: str | None = None) -> list[str]:
        """Where a view isn't the cast source (of dtype `source`) of that version, or a guard byte was written."""
        found = []
        for each, fragment in zip(self.held, self.fragments, strict=True):
            wrong = judge.compare(
                torch_fill.read(fragment.view), each.bits(version=version, dtype=source), start=each.box.start
            )
            found += [f"{each.name}: {mismatch}" for mismatch in wrong]
        found += [f"guard byte {byte} of {name}" for name, block in self.blocks.items() for byte in block.damage()]
        return found

    def addresses(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Address, shape and strides of every view."""
        return [(f.view.data_ptr(), tuple(f.view.shape), f.view.stride()) for f in self.fragments]
