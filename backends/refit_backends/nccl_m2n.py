"""Transport `nccl_m2n`: each family as one step of NVIDIA's reshard collective (NCCL M2N, package nccl-extensions).

1. Of each family and engine, put together what every process holds, and what every one needs: a box each.
2. Read both sides as what the collective takes: a mesh of at most two axes over consecutive processes, of which one
   axis shards one dim evenly, and the other replicates. What isn't so is refused, and named.
3. The steps say what travels, from the server of each move to all that need it. That they are one collective step is in
   the capabilities: only a fabric that offers it is given them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import ClassVar, Final

import numpy as np
from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.errors import UnsupportedMoveError
from refit_sdk.hookspecs import hookimpl
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Placement, Replicate, Shard
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Ints, Moves, Steps, Transport

COLLECTIVE: Final = "reshard"
MOST_SOURCES: Final = 16
MOST_TARGETS: Final = 64
MOST_DIMS: Final = 3

_DTYPES: Final = frozenset(
    {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"}
    | {"float8_e4m3fn", "float8_e5m2"}
)


class _Unfit(Exception):
    """The collective can't do it. The text says what it would have to."""


@frozen
class Side:
    """One side of a reshard: processes in a mesh, and what each axis does."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, held: Mapping[int, Box], whole: Box) -> Side:
        """The mesh and placements by which processes have these boxes of `whole`.

        >>> halves = {4: Box((0,), (3,)), 5: Box((3,), (6,)), 6: Box((0,), (3,)), 7: Box((3,), (6,))}
        >>> side = Side.of(halves, Box((0,), (6,)))
        >>> side.mesh.ranks, side.mesh.shape, side.placements
        ((4, 5, 6, 7), (2, 2), (Replicate(), Shard(dim=0)))
        """
        processes = sorted(held)
        if processes != list(range(processes[0], processes[0] + len(processes))):
            raise _Unfit(f"a mesh of processes {processes}, which aren't consecutive")
        parts = sorted(set(held.values()), key=lambda box: box.start)
        if parts == [whole]:
            return cls(Mesh(processes), (Replicate(),))
        dim = _sharded(parts, whole)
        order = [parts.index(held[process]) for process in processes]
        shards, copies = len(parts), len(processes) // len(parts)
        if order == list(range(shards)):
            return cls(Mesh(processes), (Shard(dim),))
        if order == [shard for _ in range(copies) for shard in range(shards)]:
            return cls(Mesh(processes, shape=(copies, shards)), (Replicate(), Shard(dim)))
        if order == [shard for shard in range(shards) for _ in range(copies)]:
            return cls(Mesh(processes, shape=(shards, copies)), (Shard(dim), Replicate()))
        raise _Unfit(f"shards in the order {order} over processes {processes}, which is no mesh of two axes")


def _sharded(parts: Sequence[Box], whole: Box) -> int:
    """The one dim that cuts `whole` evenly into the parts."""
    dims = [dim for dim in range(whole.ndim) if any(part.shape[dim] != whole.shape[dim] for part in parts)]
    if len(dims) != 1:
        raise _Unfit(f"a side that is sharded along {len(dims)} dims")
    (dim,) = dims
    extent = whole.shape[dim]
    step = -(-extent // len(parts))
    even = [(whole.start[dim] + number * step, whole.start[dim] + (number + 1) * step) for number in range(len(parts))]
    found = [(part.start[dim], part.stop[dim]) for part in parts]
    if found != even:
        raise _Unfit(f"{extent} along dim {dim} cut into {', '.join(f'{a}:{b}' for a, b in found)}, which isn't even")
    return dim


@frozen
class Reshard:
    """One collective step: every process of `target` gets its part of `whole` from those of `source`."""

    whole: Box
    source: Side
    target: Side

    @classmethod
    def of(cls, moves: Moves) -> Reshard:
        """The step that makes the moves of one family to one engine."""
        held = _boxes(moves, moves.holder_start, moves.holder, "holds")
        needed = _boxes(moves, moves.need_start, moves.need, "needs")
        if both := sorted(held.keys() & needed.keys()):
            raise _Unfit(f"processes {both} on both sides")
        whole = _hull(list(chain(held.values(), needed.values())))
        for count, most, side in ((len(held), MOST_SOURCES, "sources"), (len(needed), MOST_TARGETS, "targets")):
            if count > most:
                raise _Unfit(f"{count} {side} (at most {most})")
        return cls(whole, Side.of(held, whole), Side.of(needed, whole))


def _boxes(moves: Moves, begin: Ints, who: Ints, verb: str) -> dict[int, Box]:
    """What each process has of the moves. They are disjoint, so a box that has their elements is made of them."""
    rows: dict[int, list[int]] = {}
    for row, process in zip(np.repeat(np.arange(len(moves)), np.diff(begin)).tolist(), who.tolist(), strict=True):
        rows.setdefault(process, []).append(row)
    found = {}
    for process, own in rows.items():
        parts = [Box(moves.start[row].tolist(), moves.stop[row].tolist()) for row in own]
        found[process] = _hull(parts)
        if sum(part.size for part in parts) != found[process].size:
            raise _Unfit(f"process {process}, which {verb} {len(parts)} pieces that are no box together")
    return found


def _hull(boxes: Sequence[Box]) -> Box:
    starts, stops = zip(*((box.start, box.stop) for box in boxes), strict=True)
    return Box(map(min, zip(*starts, strict=True)), map(max, zip(*stops, strict=True)))


class NcclM2n:
    """One collective step a family.

    >>> who, needs = np.array([0, 1]), np.array([2, 2])
    >>> moves = Moves(np.array([[0], [4]]), np.array([[4], [8]]), who, np.arange(3), needs, np.arange(3), who, 2)
    >>> NcclM2n().steps(moves, Topology.single(3)).src.tolist()
    [0, 1]
    """

    name: ClassVar[str] = "nccl_m2n"
    capabilities: ClassVar[Capabilities] = Capabilities(
        max_ndim=MOST_DIMS,
        dtypes=_DTYPES,
        max_sources=MOST_SOURCES,
        max_targets=MOST_TARGETS,
        casts=False,
        copies="direct",
        collective=COLLECTIVE,
    )

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        """The steps that each collective makes. `UnsupportedMoveError` for what it can't do."""
        for part in _by_family(moves):
            try:
                Reshard.of(part)
            except _Unfit as error:
                raise UnsupportedMoveError(
                    f"{len(part)} moves of one tensor are routed to {self.name!r}, which can't do {error}; route it to "
                    "another transport, or change the layout",
                    transport=self.name,
                    need=str(error),
                ) from error
        move = np.repeat(np.arange(len(moves)), np.diff(moves.need_start))
        return Steps(move, moves.start[move], moves.stop[move], moves.server[move], moves.need, np.zeros_like(move))

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here and what to install, or None if it can."""
        if sys.platform != "linux":
            return f"it needs Linux, this is {sys.platform}; use transport 'reshard'"
        from importlib.util import find_spec

        if find_spec("nccl") is None or find_spec("nccl.m2n") is None:
            return "it needs nccl-extensions; pip install 'refit-sdk[nccl-extensions]'"
        return None


def _by_family(moves: Moves) -> Iterator[Moves]:
    """The moves of each family and engine, which are asked for together."""
    keys = np.stack([moves.family, moves.engine], axis=1)
    for key in np.unique(keys, axis=0):
        yield _taken(moves, np.flatnonzero((keys == key).all(axis=1)))


def _taken(moves: Moves, rows: Ints) -> Moves:
    """Some of the moves."""
    need_start, need = _listed(moves.need_start, moves.need, rows)
    holder_start, holder = _listed(moves.holder_start, moves.holder, rows)
    start, stop, server = moves.start[rows], moves.stop[rows], moves.server[rows]
    return Moves(start, stop, server, need_start, need, holder_start, holder, moves.itemsize)


def _listed(begin: Ints, values: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """The lists of some rows, one after the other, and where each begins."""
    lists = [values[begin[row] : begin[row + 1]] for row in rows.tolist()]
    ends = np.cumsum([0, *map(len, lists)])
    return ends.astype(np.int64), np.concatenate(lists) if lists else values[:0]


@hookimpl
def refit_register_transports() -> list[type[Transport]]:
    """The transport of this module."""
    return [NcclM2n]
