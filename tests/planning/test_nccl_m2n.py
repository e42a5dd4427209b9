"""What NVIDIA's reshard collective can do is read off the moves; the rest is refused by name, before any byte moves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from planning_support import part, plan_of, play, whole, world
from refit_backends.inproc import InprocFabric
from refit_backends.nccl_m2n import NcclM2n, Reshard
from refit_backends.reshard import Reshard as Direct

from refit_sdk.box import Box
from refit_sdk.errors import UnsupportedMoveError
from refit_sdk.fabric import check_collectives
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Placement, Replicate, Shard
from refit_sdk.transport import Moves
from refit_sdk.world import World

SHAPE = (24, 12)
ROWS, COLUMNS, ALL = Shard(0), Shard(1), Replicate()

SIDES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (ROWS,)),
    "columns": ((3,), (COLUMNS,)),
    "rows, replicas apart": ((2, 3), (ALL, ROWS)),
    "columns, replicas together": ((3, 2), (COLUMNS, ALL)),
    "whole on each": ((2,), (ALL,)),
    "one": ((1,), (ALL,)),
}


def laid_out(size: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...] = SHAPE) -> list[Any]:
    layout = Layout(Mesh(np.arange(np.prod(size)).reshape(size)), placements)
    return [[part("w", shape, *layout.boxes(shape, rank=rank))] for rank in layout.ranks]


def planned(sides: World, name: str = "w") -> Any:
    """The plan, and what the transport was asked."""
    asked: list[Moves] = []

    class Listening(NcclM2n):
        def steps(self, moves: Moves, topology: Any) -> Any:
            asked.append(moves)
            return super().steps(moves, topology)

    return plan_of(sides, routes=[(name, "nccl_m2n")], transports={"nccl_m2n": Listening()}), asked


@pytest.mark.parametrize("target", SIDES)
@pytest.mark.parametrize("source", SIDES)
def test_meshes_and_placements_are_read_off_the_moves(source: str, target: str) -> None:
    plan, asked = planned(world(laid_out(*SIDES[source]), e=laid_out(*SIDES[target])))
    play(plan)
    (moves,) = asked
    step = Reshard.of(moves)
    assert step.whole == Box.whole(SHAPE)
    first = 0
    for found, name in ((step.source, source), (step.target, target)):
        size, placements = SIDES[name]
        ranks = range(first, first + int(np.prod(size)))
        assert found.mesh.ranks == tuple(ranks)
        assert (found.mesh.shape, found.placements) == (size, placements)
        first += len(ranks)


def uneven(dim: int, *extents: int) -> list[Any]:
    ends = np.cumsum([0, *extents]).tolist()
    return [[part("w", SHAPE, Box.whole(SHAPE).narrow(dim, a, b))] for a, b in pairwise(ends)]


REFUSED: dict[str, tuple[list[Any], list[Any], str]] = {
    "uneven": (uneven(0, 7, 7, 10), laid_out((2,), (ROWS,)), r"24 along dim 0 cut into 0:7, 7:14, 14:24"),
    "two axes shard": (laid_out((2, 2), (ROWS, COLUMNS)), laid_out((2,), (ROWS,)), "sharded along 2 dims"),
    "order": ([*reversed(laid_out((4,), (ROWS,)))], laid_out((2,), (ROWS,)), r"order \[3, 2, 1, 0\]"),
    "lopsided replicas": (
        [*laid_out((2,), (ROWS,)), laid_out((2,), (ROWS,))[1]],
        laid_out((2,), (ROWS,)),
        r"order \[0, 1, 1\]",
    ),
    "not consecutive": (
        [laid_out((2,), (ROWS,))[0], [whole("v", 2)], laid_out((2,), (ROWS,))[1]],
        [[*laid_out((1,), (ALL,))[0], whole("v", 2)]],
        r"processes \[0, 2\], which aren't consecutive",
    ),
    "several pieces": (
        [[part("w", SHAPE, Box((0, 0), (6, 12)), Box((12, 0), (24, 12)))], uneven(0, 6, 6, 12)[1]],
        laid_out((1,), (ALL,)),
        "process 0, which holds 2 pieces that are no box together",
    ),
    "seventeen sources": (laid_out((24,), (ROWS,)), laid_out((1,), (ALL,)), r"24 sources \(at most 16\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_rest_is_refused_and_says_what_it_would_take(case: str) -> None:
    sources, targets, why = REFUSED[case]
    routes = [("w", "nccl_m2n")] if case != "not consecutive" else [("w", "nccl_m2n"), ("v", "reshard")]
    with pytest.raises(UnsupportedMoveError, match=f"nccl_m2n.*can't do .*{why}") as caught:
        plan_of(world(sources, e=targets), routes=routes, transports={"nccl_m2n": NcclM2n(), "reshard": Direct()})
    assert caught.value.transport == "nccl_m2n"


def test_four_dims_casts_and_dtypes_are_refused_by_capability() -> None:
    four = [[whole("l.{}.w", 2, 3, 4)]]
    with pytest.raises(UnsupportedMoveError, match="4 dims \\(at most 3\\)"):
        plan_of(world(four, e=four), routes=[("*", "nccl_m2n")], transports={"nccl_m2n": NcclM2n()})
    wide, narrow = [[whole("w", 4, dtype="float32")]], [[whole("w", 4, dtype="bfloat16")]]
    with pytest.raises(UnsupportedMoveError, match="a cast float32 → bfloat16"):
        plan_of(world(wide, e=narrow), routes=[("*", "nccl_m2n")], transports={"nccl_m2n": NcclM2n()})


def test_only_a_fabric_that_offers_the_collective_is_given_it() -> None:
    with pytest.raises(UnsupportedMoveError, match="fabric 'inproc' offers none") as caught:
        check_collectives(InprocFabric(), [Direct(), NcclM2n()])
    assert caught.value.need == "the collective 'reshard'"

    class Offering(InprocFabric):
        collectives = frozenset({"reshard"})

    check_collectives(Offering(), [Direct(), NcclM2n()])
