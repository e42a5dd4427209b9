"""Models for tests: fragments by hand, filled and judged by the judge, with guard bytes around every view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.layout import AnyLayout
from refit_sdk.testing import judge, torch_fill

SEED = 7
_AT_ONCE = 1 << 22
"""Elements that are judged together."""


@frozen
class Held:
    """A region that a rank holds of a tensor, and where: in `block` (one of its own if empty), `offset` bytes in, with
    `strides` in elements (None: row-major). `stored` is the dtype.

    `values` is the tensor whose values it has, where that's another one (tied); `within` a dtype in which they are
    finite, too.
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
    values: str = ""
    within: str | None = None

    def on_paper(self) -> Fragment:
        """The fragment without storage."""
        view = torch.empty(self.box.shape, dtype=getattr(torch, self.stored), device="meta")
        return Fragment(self.name, self.shape, self.box, view, granule=self.granule, aliases=self.aliases)

    @property
    def extent(self) -> int:
        """Bytes from the start of the block to the end of the view."""
        itemsize = getattr(torch, self.stored).itemsize
        last = sum((n - 1) * step for n, step in zip(self.box.shape, self._steps, strict=True))
        return self.offset if self.box.is_empty else self.offset + (last + 1) * itemsize

    @property
    def _steps(self) -> tuple[int, ...]:
        return row_major(self.box.shape) if self.strides is None else self.strides

    def bits(self, *, version: int, dtype: str | None = None, within: str | None = None) -> Any:
        """The judge's bits of the region, as the source (of `dtype`) has them, cast to what is stored."""
        of = dtype or self.stored
        name, box = self.values or self.name, self.box
        made = judge.expected(name, self.shape, box.start, box.stop, of, SEED, version, within=self.within or within)
        return judge.cast(made, of, self.stored)


Rank = tuple[Held, ...]
Ranks = tuple[Rank, ...]
"""What each rank of a side holds."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def local(name: str, shape: tuple[int, ...], layout: AnyLayout, *, rank: int, **how: Any) -> Rank:
    """What a rank holds by a layout: views of one local tensor, row-major, in one block."""
    parts = layout.parts(shape, rank=rank)
    if not parts:
        return ()
    steps = row_major(layout.local_shape(shape, rank=rank))
    made = Held(name, shape, Box.whole(shape), strides=steps, block=f"{name}, local", **how)
    itemsize = getattr(torch, made.stored).itemsize
    return tuple(
        evolve(made, box=outer, offset=itemsize * sum(a * b for a, b in zip(inner.start, steps, strict=True)))
        for outer, inner in parts
    )


def spread(name: str, shape: tuple[int, ...], layout: AnyLayout, *, size: int, **how: Any) -> Ranks:
    """What each of `size` ranks holds by a layout."""
    return tuple(local(name, shape, layout, rank=rank, **how) for rank in range(size))


def beside(*tensors: Ranks) -> Ranks:
    """Several tensors over the same ranks."""
    return tuple(tuple(held for rank in ranks for held in rank) for ranks in zip(*tensors, strict=True))


@define(eq=False)
class Model:
    """An object that the `fragments` adapter accepts. `within` is a dtype that the values must stay finite in."""

    held: Sequence[Held]
    within: str | None = None
    device: str = "cpu"
    blocks: dict[str, judge.Storage] = field(factory=dict)
    _elsewhere: dict[str, torch.Tensor] = field(factory=dict)
    fragments: list[Fragment] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        for number, each in enumerate(self.held):
            name = each.block or f"own {number}"
            block, dtype = self._block(name), getattr(torch, each.stored)
            view = torch_fill.guarded(
                block, dtype, each.box.shape,
                strides=each.strides, offset=each.offset, memory=self._elsewhere.get(name),
            )  # fmt: skip
            self.fragments.append(
                Fragment(each.name, each.shape, each.box, view, granule=each.granule, aliases=each.aliases)
            )

    def _block(self, name: str) -> judge.Storage:
        if name not in self.blocks:
            same = [held for number, held in enumerate(self.held) if (held.block or f"own {number}") == name]
            block = self.blocks[name] = judge.Storage(max(held.extent for held in same))
            if self.device != "cpu":
                self._elsewhere[name] = torch.from_numpy(block.memory).to(self.device)
        return self.blocks[name]

    def refit_fragments(self) -> list[Fragment]:
        """What this rank holds."""
        return self.fragments

    def fill(self, *, version: int) -> None:
        """Put the judge's values of a version into every view."""
        for each, view in self._parts():
            torch_fill.fill(view, each.bits(version=version, within=self.within))

    def _parts(self) -> Iterator[tuple[Held, torch.Tensor]]:
        """What is held, with its view; large ones in runs of rows, since the judge needs many bytes an element."""
        for each, fragment in zip(self.held, self.fragments, strict=True):
            box, view = each.box, fragment.view
            rows = max(1, _AT_ONCE * box.shape[0] // box.size) if box.ndim and box.size > _AT_ONCE else 0
            if not rows:
                yield each, view
            for first in range(0, box.shape[0], rows) if rows else ():
                last = min(first + rows, box.shape[0])
                part = box.narrow(0, box.start[0] + first, box.start[0] + last)
                yield evolve(each, box=part), view[first:last]

    def poison(self) -> None:
        """Make every view what no push may leave behind."""
        for fragment in self.fragments:
            torch_fill.fill_poison(fragment.view)

    def rebind(self, held: Sequence[Held]) -> None:
        """Hold something else, or the same elsewhere, from now on."""
        other = Model(held, self.within, self.device)
        self.held, self.blocks, self.fragments = other.held, other.blocks, other.fragments
        self._elsewhere = other._elsewhere

    def faults(self, *, version: int, source: str | Mapping[str, str] | None = None) -> list[str]:
        """Where a view isn't the cast source of that version, or a guard byte was written. `source` is the sources'
        dtype, or their dtypes by tensor (None, and for others: what is stored here).
        """
        dtypes = dict.fromkeys([h.name for h in self.held], source) if isinstance(source, str | None) else source

        def wanted(held: Held) -> Any:
            return held.bits(version=version, dtype=dtypes.get(held.name), within=self.within)

        return [*self._differing(wanted), *self._damage()]

    def untouched(self) -> list[str]:
        """Where a view isn't poison any more, or a guard byte was written."""
        return [*self._differing(lambda held: judge.poison(held.box.shape, held.stored)), *self._damage()]

    def _differing(self, wanted: Callable[[Held], Any]) -> list[str]:
        return [
            f"{each.name}: {mismatch}"
            for each, view in self._parts()
            for mismatch in judge.compare(torch_fill.read(view), wanted(each), start=each.box.start)
        ]

    def _damage(self) -> list[str]:
        for name, memory in self._elsewhere.items():
            self.blocks[name].memory[:] = memory.cpu().numpy()
        return [f"guard byte {byte} of {name}" for name, block in self.blocks.items() for byte in block.damage()]

    def addresses(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Address, shape and strides of every view."""
        return [(f.view.data_ptr(), tuple(f.view.shape), f.view.stride()) for f in self.fragments]
