"""Cases: what every rank of a push holds, as data with stable ids, and what must travel then, counted by element.

`catalogue(tier)` has them all. Those of the published matrix (`refit_sdk.testing.published`) are `"quick"`, small, or
`"full"`, as large as published; the odd ones (`refit_sdk.testing.layouts`) are the same in both.

>>> rows, columns = cut((4, 6), 2, Shard(0)), cut((4, 6), 2, Shard(1))
>>> made = case("rows to columns", rows, columns)
>>> made.processes
[(0, None), (1, None), (None, ('a', 0)), (None, ('a', 1))]
>>> needed(made)
96
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from attrs import field, frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import ITEMSIZE
from refit_sdk.layout import BoxLayout, Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Shard
from refit_sdk.settings import Settings
from refit_sdk.testing.models import Held, Rank, Ranks, spread

__all__ = ["Case", "Shard", "Tier", "boxes", "case", "catalogue", "cut", "elements", "grid", "needed", "whole"]

Tier = Literal["quick", "full"]


@frozen(kw_only=True)
class Case:
    """What every rank holds. `together` says which source ranks are, in the same process, a rank of an engine.

    `nbytes` is what must travel in a push (None: counted element by element); `windows` how many there are at least.
    `group` is the kind of case, for tables. What is `required` no transport may refuse.
    """

    id: str
    sources: Ranks
    engines: Mapping[str, Ranks]
    together: Mapping[int, tuple[str, int]] = field(factory=dict)
    settings: Settings = field(factory=Settings)
    nbytes: int | None = None
    windows: int = 0
    group: str = ""
    required: bool = False

    @property
    def processes(self) -> list[tuple[int | None, tuple[str, int] | None]]:
        """The source rank and the engine's rank of each process."""
        alone = [(engine, rank) for engine, ranks in self.engines.items() for rank in range(len(ranks))]
        both = [(rank, self.together.get(rank)) for rank in range(len(self.sources))]
        return [*both, *((None, seat) for seat in alone if seat not in self.together.values())]

    @property
    def dtypes(self) -> dict[str, str]:
        """The sources' dtypes by name."""
        return {name: held.stored for rank in self.sources for held in rank for name in (held.name, *held.aliases)}


def needed(case: Case) -> int:
    """Bytes that must travel, counted element by element: what a process wants and hasn't got, once."""
    if case.nbytes is not None:
        return case.nbytes
    total = 0
    for source, seat in case.processes:
        wanted = elements(case.engines[seat[0]][seat[1]]) if seat is not None else {}
        have = elements(case.sources[source]) if source is not None else {}
        for name, (mask, stored) in wanted.items():
            missing = mask & ~have[name][0] if name in have else mask
            total += int(missing.sum()) * min(ITEMSIZE[stored], ITEMSIZE[case.dtypes[name]])
    return total


def elements(rank: Rank) -> dict[str, tuple[Any, str]]:
    """By tensor: which of its elements a rank has, and in what dtype."""
    found: dict[str, tuple[Any, str]] = {}
    for held in rank:
        mask, _ = found.setdefault(held.name, (np.zeros(held.shape, np.bool_), held.stored))
        mask[held.box.slices()] = True
    return found


def case(name: str, sources: Ranks, *targets: Ranks, **more: Any) -> Case:
    """A case whose engines are called a, b, …"""
    return Case(id=name, sources=sources, engines=dict(zip("abc", targets, strict=False)), **more)


def cut(shape: tuple[int, ...], size: int, *placements: Any, name: str = "layers.0.w", **how: Any) -> Ranks:
    """A tensor over a mesh with one axis."""
    return spread(name, shape, Layout(Mesh(range(size)), placements), size=size, **how)


def whole(shape: tuple[int, ...], size: int = 1, *, name: str = "layers.0.w", **how: Any) -> Ranks:
    """A tensor that every rank has all of."""
    return tuple((Held(name, shape, Box.whole(shape), **how),) for _ in range(size))


def grid(shape: tuple[int, ...], ranks: Any, *placements: Any, order: Any = None, **how: Any) -> Ranks:
    """A tensor over a mesh of several axes."""
    mesh = Mesh(ranks)
    return spread("layers.0.w", shape, Layout(mesh, placements, order=order), size=len(mesh.ranks), **how)


def boxes(shape: tuple[int, ...], dim: int, *cuts: tuple[int, int], **how: Any) -> Ranks:
    """A tensor cut along one dim by hand: a range for each rank."""
    held = {rank: [Box.whole(shape).narrow(dim, *cut)] for rank, cut in enumerate(cuts)}
    return spread("layers.0.w", shape, BoxLayout(held, dim=dim), size=len(cuts), **how)


def catalogue(tier: Tier = "quick") -> tuple[Case, ...]:
    """Every case of a tier. Ids are the same in both."""
    from refit_sdk.testing import layouts, published

    return (*published.matrix(tier), *layouts.odd_ones())
