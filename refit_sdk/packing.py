"""Packed storage: parts of checkpoint tensors one after another in one live tensor, as fragments. No torch.

1. A *part* is a run of a checkpoint tensor's rows, counted in units that no cut goes through: heads, groups, rows.
2. A rank's share of a part follows from the units: an even share of them, or, where a part may be shared and has fewer
   units than there are ranks, the one unit that this rank has in common with its neighbours.
3. The shares lie one after another in the storage. In `groups` they take turns: a group has an equal slice of each.
4. What is counted must be exactly what the storage has; rows that no tensor owns are said to be `Padding`.

Storage is opaque: all that is asked of it is `shape` and basic indexing, so a transposed storage is given as what `t()`
returns, a view like any other. `rows` are those of dim `dim`; all other dims are whole.

>>> import numpy as np
>>> parts = [Part("q", 4, 2), Part("k", 2, 2, shared=True)]
>>> [f"{f.name} {f.box}" for f in packed(np.zeros(4), parts, rank=3, size=4)]
['q [6:8]', 'k [2:4]']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve, field, frozen, validators

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError


@frozen
class Part:
    """A run of the rows of a checkpoint tensor: `units` of `unit` rows, from row `first` of `rows` (None: all of it).

    `shared`: where there are fewer units than ranks, each belongs to several ranks (KV heads do).

    >>> Part("k_proj.weight", units=2, unit=64, shared=True).share(rank=3, size=4)
    (64, 128)
    """

    name: str
    units: int = field(validator=validators.ge(1))
    unit: int = field(default=1, validator=validators.ge(1))
    first: int = field(default=0, validator=validators.ge(0))
    rows: int | None = None
    shared: bool = False

    @property
    def total(self) -> int:
        """Rows of the whole checkpoint tensor."""
        return self.units * self.unit if self.rows is None else self.rows

    def share(self, *, rank: int, size: int) -> tuple[int, int]:
        """The rank's rows of the checkpoint tensor, as (start, stop). `LayoutError` if units can't be shared out."""
        if self.units % size == 0:
            count = self.units // size
            start = rank * count
        elif self.shared and size % self.units == 0:
            start, count = rank * self.units // size, 1
        else:
            raise LayoutError(
                f"{self.name}: {self._counted()} can't be shared out to {size} ranks; {self._advice(size)}"
            )
        return self.first + start * self.unit, self.first + (start + count) * self.unit

    def _counted(self) -> str:
        return f"{self.units} rows" if self.unit == 1 else f"{self.units} units of {self.unit} rows"

    def _advice(self, size: int) -> str:
        if self.units < size and size % self.units == 0:
            return "say shared=True if several ranks hold the same unit, or give the size of the group that cuts it"
        return f"{size} must divide {self.units}; for a cut by hand use `run`, with the row where this rank begins"


@frozen
class Padding:
    """Rows of the storage, on each rank (in groups: in each group), that belong to no tensor: never written."""

    rows: int = field(validator=validators.ge(0))


@frozen
class _Share:
    """What the rank has of a part, and how many rows of it are in each group."""

    name: str
    total: int
    start: int
    stop: int
    each: int


def segments(name: str, parts: Sequence[tuple[int, int]], *, shared: bool = False) -> list[Part]:
    """The parts of one checkpoint tensor that is itself packed, each cut by itself: (units, rows of a unit) in order.

    >>> [(part.first, part.units, part.rows) for part in segments("conv1d.weight", [(4, 1), (2, 1), (2, 1)])]
    [(0, 4, 8), (4, 2, 8), (6, 2, 8)]
    """
    rows = sum(units * unit for units, unit in parts)
    made, first = [], 0
    for units, unit in parts:
        made.append(Part(name, units, unit, first=first, rows=rows, shared=shared))
        first += units * unit
    return made


def packed(
    storage: Any, parts: Sequence[Part | Padding], *, rank: int, size: int, dim: int = 0, groups: int = 1
) -> list[Fragment]:
    """The fragments of a storage that packs this rank's shares of `parts`, in this order, in `groups` that take turns.

    `LayoutError` if the shares aren't exactly what the storage has.

    >>> import numpy as np
    >>> parts = [Part("z", 4), Part("x", 8), Padding(2)]
    >>> [(f.name, str(f.box)) for f in packed(np.zeros(8), parts, rank=1, size=2)]
    [('z', '[2:4]'), ('x', '[4:8]')]
    """
    check_rank(rank, size)
    check_dim(storage, dim, [part.name for part in parts if isinstance(part, Part)])
    shares = [_share(part, rank, size, groups) for part in parts]
    period = sum(share.each for share in shares)
    if period * groups != storage.shape[dim]:
        raise _miscounted(storage, dim, shares, groups, rank, size)
    found: list[Fragment] = []
    at = 0
    for share in shares:
        found += _views(storage, share, dim, at, period, groups)
        at += share.each
    return found


def _share(part: Part | Padding, rank: int, size: int, groups: int) -> _Share:
    if isinstance(part, Padding):
        return _Share("", 0, 0, 0, part.rows)
    start, stop = part.share(rank=rank, size=size)
    if groups < 1 or (stop - start) % groups:
        raise LayoutError(
            f"{part.name}: rank {rank} of {size} holds {stop - start} rows, which aren't {groups} equal groups; "
            f"give the number of groups that this rank holds"
        )
    return _Share(part.name, part.total, start, stop, (stop - start) // groups)


def _views(storage: Any, share: _Share, dim: int, at: int, period: int, groups: int) -> Iterator[Fragment]:
    """One fragment a run: all groups at once where a group has one row of the part, else one each."""
    if not share.name or share.start == share.stop:
        return
    if share.each == 1:
        rows = slice(at, at + period * (groups - 1) + 1, period)
        yield fragment_of(storage, share.name, share.total, (share.start, share.stop), rows, dim)
        return
    for group in range(groups):
        start = share.start + group * share.each
        rows = slice(at + group * period, at + group * period + share.each)
        yield fragment_of(storage, share.name, share.total, (start, start + share.each), rows, dim)


def fragment_of(storage: Any, name: str, total: int, run: tuple[int, int], rows: slice, dim: int) -> Fragment:
    """Rows `rows` of the storage as rows `run` of a checkpoint tensor of `total`."""
    shape = (*storage.shape[:dim], total, *storage.shape[dim + 1 :])
    view = storage[(*[slice(None)] * dim, rows)]
    return Fragment(name, shape, Box.whole(shape).narrow(dim, *run), view)


def check_rank(rank: int, size: int) -> None:
    """`LayoutError` unless there is such a rank."""
    if not 0 <= rank < size:
        raise LayoutError(f"rank {rank} of {size} isn't a rank: give the one inside the group that cuts this tensor")


def check_dim(storage: Any, dim: int, names: Sequence[str]) -> None:
    """`LayoutError`, naming the tensors, unless the storage has such a dim."""
    if not 0 <= dim < len(storage.shape):
        raise LayoutError(
            f"{', '.join(dict.fromkeys(names))}: the storage has shape {tuple(storage.shape)} and so no dim {dim}; "
            f"give the dim along which the parts lie, counted from 0"
        )


def _miscounted(storage: Any, dim: int, shares: Sequence[_Share], groups: int, rank: int, size: int) -> LayoutError:
    counted = " + ".join(f"{share.each * groups} ({share.name or 'padding'})" for share in shares)
    rows = sum(share.each for share in shares) * groups
    return LayoutError(
        f"rank {rank} of {size} holds {counted} = {rows} rows, but dim {dim} of the storage of shape "
        f"{tuple(storage.shape)} has {storage.shape[dim]}; check the counts of units and the size, and say "
        f"Padding(rows) for rows that no tensor owns"
    )


def run(
    storage: Any, name: str, *, start: int, extent: int, dim: int = 0, aliases: Sequence[str] = ()
) -> list[Fragment]:
    """Rows cut by hand: the storage holds rows from `start` on, of `extent` in the checkpoint tensor. No formula.

    >>> import numpy as np
    >>> [str(fragment.box) for fragment in run(np.zeros((2, 5)), "w", start=5, extent=14, dim=1)]
    ['[0:2, 5:10]']
    """
    check_dim(storage, dim, [name])
    stop = start + storage.shape[dim]
    if not 0 <= start <= stop <= extent:
        raise LayoutError(
            f"{name}: the storage of shape {tuple(storage.shape)} begins at row {start} of dim {dim} and would end at "
            f"{stop}, outside the tensor's 0:{extent}; start and extent are the checkpoint tensor's"
        )
    made = fragment_of(storage, name, extent, (start, stop), slice(None), dim)
    return [evolve(made, aliases=tuple(aliases))] if stop > start else []


def whole(storage: Any, name: str, *, aliases: Sequence[str] = ()) -> list[Fragment]:
    """A tensor that this rank has all of.

    >>> import numpy as np
    >>> whole(np.zeros(4), "norm.weight")[0].box
    Box((0,), (4,))
    """
    shape = tuple(storage.shape)
    return [Fragment(name, shape, Box.whole(shape), storage, aliases=tuple(aliases))]
