"""A layout: which rank holds which boxes of a tensor, and where in its local tensor each box lies.

`Layout` makes them from a mesh and one placement an axis, in DTensor's sequential order:

1. Each dim starts as one run of positions, the whole of it.
2. Axis by axis, from left to right (or in `order`), a placement keeps some positions of what the axes before it left.
   A dim that no axis cuts stays whole; one that several axes cut may end as several runs.
3. Runs that touch are joined, and the product of the dims' runs gives the boxes, last dim fastest. No fewer boxes can
   map global to local coordinates, as within a dim two runs have different distances from global to local.

`BoxLayout` takes the boxes themselves, for cuts that no formula gives (hand-made uneven shards, pipeline stages).
A rank that a layout doesn't name holds nothing.

>>> layout = Layout(Mesh([[0, 1], [2, 3]], axes=("dp", "tp")), (StridedShard(0, split_factor=2), Shard(0)))
>>> [layout.boxes((6,), rank=rank) for rank in (1, 2)]
[(Box((3,), (5,)),), (Box((2,), (3,)),)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from attrs import frozen

from refit_sdk.box import Box, coordinates
from refit_sdk.errors import LayoutError
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Placement, Replicate, Runs, Shard, StridedShard, join, select

Parts = tuple[tuple[Box, Box], ...]
"""(box of the whole tensor, box inside the rank's local tensor) pairs, in local storage order."""


@frozen(init=False)
class Layout:
    """A tensor cut over a mesh: one placement an axis, applied in `order` (axes by name or number; left to right).

    Canonical: an axis of extent 1 is `Replicate`, a stride of one piece is `Shard`, and `order` differs from left to
    right only where axes that cut the same dim take turns otherwise. `LayoutError` if placements and axes don't pair.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...]

    def __init__(
        self, mesh: Mesh, placements: Iterable[Placement], *, order: Iterable[str | int] | None = None
    ) -> None:
        given = tuple(placements)
        if len(given) != mesh.ndim:
            raise LayoutError(
                f"a mesh with axes {mesh.axes} needs {mesh.ndim} placements, got {len(given)}: {given}; "
                "write Replicate() for an axis that cuts nothing"
            )
        canonical = tuple(map(_canonical, given, mesh.shape))
        turns = range(mesh.ndim) if order is None else [mesh.axis(key) for key in order]
        if sorted(turns) != list(range(mesh.ndim)):
            raise LayoutError(f"order must name each of the axes {mesh.axes} once, got {tuple(order or ())}")
        self.__attrs_init__(mesh=mesh, placements=canonical, order=_canonical_order(canonical, turns))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may hold something."""
        return self.mesh.ranks

    def parts(self, shape: Iterable[int], *, rank: int) -> Parts:
        """What a rank holds of a tensor of this shape: (global box, local box) pairs, in local storage order.

        >>> Layout(Mesh([0, 1]), [StridedShard(0, split_factor=2)]).parts((8,), rank=1)
        ((Box((2,), (4,)), Box((0,), (2,))), (Box((6,), (8,)), Box((2,), (4,))))
        """
        runs = self._runs(coordinates(shape), rank)
        if runs is None:
            return ()
        return tuple(_pair(chosen) for chosen in product(*map(_with_local, runs)))

    def boxes(self, shape: Iterable[int], *, rank: int) -> tuple[Box, ...]:
        """The boxes of the whole tensor that a rank holds, in local storage order.

        >>> Layout(Mesh([0, 1]), [Shard(1)]).boxes((2, 5), rank=1)
        (Box((0, 3), (2, 5)),)
        """
        return tuple(outer for outer, _ in self.parts(shape, rank=rank))

    def local_shape(self, shape: Iterable[int], *, rank: int) -> tuple[int, ...]:
        """The shape of a rank's local tensor. `LayoutError` for a rank outside the mesh: it has none.

        >>> Layout(Mesh(range(4)), [Shard(1)]).local_shape((2, 5), rank=3)
        (2, 0)
        """
        runs = self._runs(coordinates(shape), rank)
        if runs is None:
            raise LayoutError(f"rank {rank} has no local tensor: it isn't in the mesh of ranks {self.mesh.ranks}")
        return tuple(sum(stop - start for start, stop in dim) for dim in runs)

    def _runs(self, shape: tuple[int, ...], rank: int) -> list[Runs] | None:
        """Per dim, the positions that a rank holds; None for a rank outside the mesh."""
        self._check_dims(shape)
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return None
        runs = [join([(0, extent)]) for extent in shape]
        for axis in self.order:
            placement = self.placements[axis]
            if not isinstance(placement, Replicate):
                held = runs[placement.dim]
                left = sum(stop - start for start, stop in held)
                kept = placement.runs(left, num_parts=self.mesh.shape[axis], index=coordinate[axis])
                runs[placement.dim] = select(held, kept)
        return runs

    def _check_dims(self, shape: tuple[int, ...]) -> None:
        if any(extent < 0 for extent in shape):
            raise LayoutError(f"a tensor can't have the shape {shape}: an extent is negative")
        for axis, placement in zip(self.mesh.axes, self.placements, strict=True):
            if not isinstance(placement, Replicate) and placement.dim >= len(shape):
                raise LayoutError(
                    f"{placement} on axis {axis!r} cuts dim {placement.dim}, but the tensor of shape {shape} has "
                    f"{len(shape)} dims; use Replicate() or a dim below {len(shape)}"
                )

    def in_cutting_order(self) -> Layout:
        """The same layout without strides: plain shards, in the order in which the axes cut.

        A `StridedShard` stands for a cut made *after* axes to its right, which made its `split_factor` pieces. Reading
        DTensor's placements from left to right agrees with that where the pieces are cut alike; with uneven pieces it
        may not, and what FSDP2 over tensor parallelism stores is this layout. `LayoutError` if the factor isn't a
        product of the extents of such axes.

        >>> mesh = Mesh(range(6), shape=(3, 2), axes=("dp", "tp"))
        >>> read = Layout(mesh, (StridedShard(0, split_factor=2), Shard(0)))
        >>> read.boxes((13,), rank=5), read.in_cutting_order().boxes((13,), rank=5)
        ((Box((12,), (13,)),), (Box((11,), (13,)),))
        """
        if not any(isinstance(placement, StridedShard) for placement in self.placements):
            return self
        if self.order != tuple(range(self.mesh.ndim)):
            raise LayoutError(f"strided shards stand for an order of cuts, but order={self.order} was given as well")
        turns: list[int] = []
        for axis in reversed(range(self.mesh.ndim)):
            turns.insert(self._turn(axis, after=turns), axis)
        plain = [Shard(p.dim) if isinstance(p, StridedShard) else p for p in self.placements]
        return Layout(self.mesh, plain, order=turns)

    def _turn(self, axis: int, *, after: Sequence[int]) -> int:
        """Where an axis goes among those to its right: behind as many as make its split factor."""
        placement = self.placements[axis]
        pieces, wanted = 1, placement.split_factor if isinstance(placement, StridedShard) else 1
        for turn, other in enumerate(after):
            if pieces == wanted:
                return turn
            if _dim(self.placements[other]) == _dim(placement):
                pieces *= self.mesh.shape[other]
        if pieces == wanted:
            return len(after)
        extents = dict(zip(self.mesh.axes, self.mesh.shape, strict=True))
        raise LayoutError(
            f"{placement} on axis {self.mesh.axes[axis]!r} of {extents} "
            f"isn't the trace of an earlier cut: no axes to its right cut dim {_dim(placement)} into {wanted} pieces"
        )


@frozen(init=False)
class BoxLayout:
    """The boxes that each rank holds, given one by one; a rank's local tensor has them end to end along `dim`.

    The boxes of a rank agree in every other extent. A box may come twice (two copies of an expert), and ranks may share
    boxes (replicas). Canonical: neighbours that touch are one box. `LayoutError` if a rank's boxes don't line up.

    >>> stages = BoxLayout({0: [Box((0,), (2,)), Box((4,), (6,))], 1: [Box((2,), (4,)), Box((6,), (8,))]})
    >>> stages.parts((8,), rank=1)
    ((Box((2,), (4,)), Box((0,), (2,))), (Box((6,), (8,)), Box((2,), (4,))))
    """

    held: tuple[tuple[int, tuple[Box, ...]], ...]
    dim: int

    def __init__(self, boxes: Mapping[int, Iterable[Box]], *, dim: int = 0) -> None:
        lined_up = ((rank, _line_up(tuple(held), dim=dim, rank=rank)) for rank, held in sorted(boxes.items()))
        self.__attrs_init__(held=tuple((rank, held) for rank, held in lined_up if held), dim=dim)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may hold something."""
        return tuple(rank for rank, _ in self.held)

    def _of_rank(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        held = dict(self.held).get(rank, ())
        whole = Box.whole(shape)
        for box in held:
            if box.ndim != len(shape) or not whole.contains(box):
                raise LayoutError(f"rank {rank} can't hold {box} of a tensor of shape {shape}: it doesn't lie in it")
        return held

    def parts(self, shape: Iterable[int], *, rank: int) -> Parts:
        """What a rank holds of a tensor of this shape: (global box, local box) pairs, in local storage order."""
        pairs, offset = [], 0
        for box in self._of_rank(coordinates(shape), rank):
            inner = Box.whole(box.shape)
            if box.ndim:
                inner = inner.translate(offset if dim == self.dim else 0 for dim in range(box.ndim))
                offset += box.shape[self.dim]
            pairs.append((box, inner))
        return tuple(pair for pair in pairs if not pair[0].is_empty)

    def boxes(self, shape: Iterable[int], *, rank: int) -> tuple[Box, ...]:
        """The boxes of the whole tensor that a rank holds, in local storage order."""
        return tuple(outer for outer, _ in self.parts(shape, rank=rank))

    def local_shape(self, shape: Iterable[int], *, rank: int) -> tuple[int, ...]:
        """The shape of a rank's local tensor. `LayoutError` for a rank without boxes: it has none.

        >>> BoxLayout({0: [Box((0, 0), (2, 3)), Box((6, 0), (7, 3))]}).local_shape((8, 3), rank=0)
        (3, 3)
        """
        held = self._of_rank(coordinates(shape), rank)
        if not held:
            raise LayoutError(f"rank {rank} has no local tensor: the layout gives boxes to ranks {self.ranks}")
        along = sum(box.shape[self.dim] for box in held) if held[0].ndim else 0
        return tuple(along if dim == self.dim else extent for dim, extent in enumerate(held[0].shape))


AnyLayout = Layout | BoxLayout
"""Both answer `parts`, `boxes`, `local_shape` and `ranks`."""


def holders(layout: AnyLayout, shape: Iterable[int]) -> dict[Box, tuple[int, ...]]:
    """Which ranks hold each box: one entry a distinct box, the ranks in order. A rank that has it twice is there twice.

    Two heads of keys over four tensor ranks, each held by two:

    >>> holders(Layout(Mesh([[0, 1], [2, 3]]), (Shard(0), Replicate())), (2,))
    {Box((0,), (1,)): (0, 1), Box((1,), (2,)): (2, 3)}
    """
    extents = coordinates(shape)
    found: dict[Box, tuple[int, ...]] = {}
    for rank in sorted(layout.ranks):
        for box in layout.boxes(extents, rank=rank):
            found[box] = (*found.get(box, ()), rank)
    return dict(sorted(found.items()))


def check_local(layout: AnyLayout, shape: Iterable[int], *, rank: int, found: Iterable[int]) -> None:
    """`LayoutError` unless a rank's local tensor has the shape that the layout gives it.

    >>> check_local(Layout(Mesh([0, 1]), [Shard(0)]), (128, 4), rank=0, found=(64, 4))
    """
    extents, local = coordinates(shape), coordinates(found)
    expected = layout.local_shape(extents, rank=rank)
    if local != expected:
        raise LayoutError(
            f"the layout of a tensor of shape {extents} is incomplete or wrong: rank {rank} should hold a local tensor "
            f"of shape {expected}, found {local}; state how every axis cuts it, a replica included"
        )


def check_granule(boxes: Iterable[Box], *, shape: Iterable[int], granule: Iterable[int]) -> None:
    """`LayoutError` unless every cut of the boxes falls on a multiple of the granule, or on the tensor's end.

    >>> check_granule([Box((0, 0), (2, 128)), Box((0, 128), (2, 258))], shape=(2, 258), granule=(1, 128))
    """
    extents, unit = coordinates(shape), coordinates(granule)
    if len(unit) != len(extents) or any(step < 1 for step in unit):
        raise LayoutError(f"a granule has one number >= 1 a dim, got {unit} for a tensor of shape {extents}")
    for box in boxes:
        if not box.is_aligned(unit, shape=extents):
            raise LayoutError(
                f"{box} of a tensor of shape {extents} is cut inside a granule of {unit}: every start and stop must be "
                "a multiple of it, or the tensor's end; choose a layout whose shards are whole granules"
            )


def _canonical(placement: Placement, extent: int) -> Placement:
    if extent == 1:
        return Replicate()
    if isinstance(placement, StridedShard) and placement.split_factor == 1:
        return Shard(placement.dim)
    return placement


def _dim(placement: Placement) -> int | None:
    return None if isinstance(placement, Replicate) else placement.dim


def _canonical_order(placements: tuple[Placement, ...], turns: Iterable[int]) -> tuple[int, ...]:
    """Turns among the axes of one dim, written into those axes' own places."""
    wanted, order = list(turns), list(range(len(placements)))
    for dim in {_dim(placement) for placement in placements} - {None}:
        taking = [axis for axis in wanted if _dim(placements[axis]) == dim]
        for place, axis in zip(sorted(taking), taking, strict=True):
            order[place] = axis
    return tuple(order)


def _with_local(runs: Runs) -> list[tuple[int, int, int, int]]:
    """Each run as (global start, global stop, local start, local stop)."""
    placed, offset = [], 0
    for start, stop in runs:
        placed.append((start, stop, offset, offset + stop - start))
        offset += stop - start
    return placed


def _pair(runs: tuple[tuple[int, int, int, int], ...]) -> tuple[Box, Box]:
    return Box((r[0] for r in runs), (r[1] for r in runs)), Box((r[2] for r in runs), (r[3] for r in runs))


def _line_up(boxes: tuple[Box, ...], *, dim: int, rank: int) -> tuple[Box, ...]:
    """A rank's boxes with neighbours joined, checked to fit end to end along `dim`; an empty box only if all are."""
    if len(boxes) < 2:
        return boxes
    sides = {(*box.shape[:dim], *box.shape[dim + 1 :]) for box in boxes}
    if len({box.ndim for box in boxes}) > 1 or not 0 <= dim < boxes[0].ndim or len(sides) > 1:
        raise LayoutError(
            f"the boxes of rank {rank} don't fit end to end along dim {dim}: {', '.join(map(str, boxes))}; give dim= "
            "the one dim in which their extents differ, or describe each storage by a layout of its own"
        )
    joined: list[Box] = []
    for box in [box for box in boxes if not box.is_empty] or boxes[:1]:
        if joined and _touch(joined[-1], box, dim):
            box = Box(joined.pop().start, box.stop)
        joined.append(box)
    return tuple(joined)


def _touch(box: Box, other: Box, dim: int) -> bool:
    """Whether `other` goes on where `box` ends in `dim`, and agrees with it elsewhere."""
    return other.start == (*box.start[:dim], box.stop[dim], *box.start[dim + 1 :]) and other.stop == (
        *box.stop[:dim],
        other.stop[dim],
        *box.stop[dim + 1 :],
    )
