"""Geometry that other projects got wrong, each with the input that showed it."""

import numpy as np
import pytest

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.layout import BoxLayout, Layout, check_granule, check_local, holders
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard


def local(whole, layout, rank):
    """What a rank stores of `whole`."""
    stored = np.full(layout.local_shape(whole.shape, rank=rank), -1, dtype=whole.dtype)
    for outer, inner in layout.parts(whole.shape, rank=rank):
        stored[inner.slices()] = whole[outer.slices()]
    return stored


def refit(shape, source, target, stored):
    """What each target rank stores once its boxes are filled from the source ranks' storage, by box alone."""
    filled = {}
    for rank in target.ranks:
        filled[rank] = np.full(target.local_shape(shape, rank=rank), -1)
        for outer, inner in target.parts(shape, rank=rank):
            for holder in source.ranks:
                for offer, place in source.parts(shape, rank=holder):
                    if common := outer.intersect(offer):
                        into = common.relative_to(outer).translate(inner.start).slices()
                        filled[rank][into] = stored[holder][common.relative_to(offer).translate(place.start).slices()]
    return {rank: found.tolist() for rank, found in filled.items()}


def test_a_missing_sharding_mark_is_no_replica():
    unmarked = Layout(Mesh([0, 1], axes=("tp",)), [Replicate()])
    with pytest.raises(LayoutError, match="incomplete or wrong"):
        check_local(unmarked, (128, 4), rank=0, found=(64, 4))


@pytest.mark.parametrize("size", [2, 1])
def test_expert_numbers_are_global_on_every_rank(size):
    experts = np.arange(8) * 10
    source, target = Layout(Mesh(range(4)), [Shard(0)]), Layout(Mesh(range(size)), [Shard(0)])
    stored = {rank: local(experts, source, rank) for rank in source.ranks}
    filled = refit((8,), source, target, stored)
    assert [expert for rank in range(size) for expert in filled[rank]] == experts.tolist()


def test_gate_and_up_halves_stay_apart():
    halves = [Box((0,), (8,)), Box((8,), (16,))]
    source, target = Layout(Mesh([0, 1]), [StridedShard(0, 2)]), Layout(Mesh(range(4)), [StridedShard(0, 2)])
    assert source.boxes((16,), rank=1) == tuple(half.narrow(0, half.start[0] + 4, half.stop[0]) for half in halves)
    stored = {0: np.array([0, 1, 2, 3, 100, 101, 102, 103]), 1: np.array([4, 5, 6, 7, 104, 105, 106, 107])}
    filled = refit((16,), source, target, stored)
    assert filled == {k: [2 * k, 2 * k + 1, 100 + 2 * k, 101 + 2 * k] for k in range(4)}


def test_components_interleaved_by_rank_are_lists_of_boxes():
    source = BoxLayout(
        {
            rank: [
                Box((2 * rank, 0, 0), (2 * rank + 2, 1, 3)),
                Box((4 + rank, 0, 0), (5 + rank, 1, 3)),
                Box((6 + rank, 0, 0), (7 + rank, 1, 3)),
            ]
            for rank in (0, 1)
        }
    )
    whole = np.arange(24).reshape(8, 1, 3)
    stored = {rank: local(whole, source, rank) for rank in (0, 1)}
    assert stored[1][:, 0, 0].tolist() == [6, 9, 15, 21]
    assert refit((8, 1, 3), source, Layout(Mesh(0), []), stored) == {0: whole.tolist()}


def test_tensor_parallel_cuts_first_and_fsdp_its_part():
    mesh = Mesh([[0, 1], [2, 3]], axes=("dp", "tp"))
    source = Layout(mesh, (StridedShard(0, split_factor=2), Shard(0)))
    stored = {0: np.array([0, 1]), 2: np.array([2]), 1: np.array([3, 4]), 3: np.array([5])}
    assert {rank: local(np.arange(6), source, rank).tolist() for rank in stored} == {
        rank: rows.tolist() for rank, rows in stored.items()
    }
    target = Layout(Mesh(range(3)), [Shard(0)])
    assert refit((6,), source, target, stored) == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


@pytest.mark.parametrize(("dim", "extents"), [(1, (2, 3, 4, 5)), (0, (3, 3, 3, 1))], ids=["columns", "rows"])
def test_offsets_of_uneven_shards_are_data(dim, extents):
    shape = tuple(sum(extents) if at == dim else 2 for at in (0, 1))
    edges = [sum(extents[:rank]) for rank in range(5)]
    source = BoxLayout({r: [Box.whole(shape).narrow(dim, edges[r], edges[r + 1])] for r in range(4)}, dim=dim)
    whole = np.arange(np.prod(shape)).reshape(shape)
    stored = {rank: whole.take(range(edges[rank], edges[rank + 1]), axis=dim) for rank in range(4)}
    target = Layout(Mesh([0, 1]), [Replicate()])
    assert refit(shape, source, target, stored) == {0: whole.tolist(), 1: whole.tolist()}


def test_shards_smaller_than_a_block_are_refused():
    with pytest.raises(LayoutError, match=r"\[0:3\] .* inside a granule of \(2,\)"):
        check_granule(Layout(Mesh(range(4)), [Shard(0)]).boxes((12,), rank=0), shape=(12,), granule=(2,))


@pytest.mark.parametrize("size", [1, 2])
def test_uneven_pipeline_stages_hold_the_layers_they_name(size):
    stages = BoxLayout({0: [Box((0,), (3,))], 1: [Box((3,), (5,))], 2: [Box((5,), (6,))]})
    stored = {0: np.array([0, 1, 2]), 1: np.array([3, 4]), 2: np.array([5])}
    filled = refit((6,), stages, Layout(Mesh(range(size)), [Shard(0)]), stored)
    assert [layer for rank in range(size) for layer in filled[rank]] == list(range(6))


def test_interleaved_pipeline_stages_hold_the_layers_they_name():
    stages = BoxLayout({0: [Box((0,), (2,)), Box((4,), (6,))], 1: [Box((2,), (4,)), Box((6,), (8,))]})
    by_stride = Layout(Mesh([0, 1]), [StridedShard(0, split_factor=2)])
    assert [stages.parts((8,), rank=r) for r in (0, 1)] == [by_stride.parts((8,), rank=r) for r in (0, 1)]
    stored = {0: np.array([0, 1, 4, 5]), 1: np.array([2, 3, 6, 7])}
    assert refit((8,), stages, Layout(Mesh(0), []), stored) == {0: list(range(8))}


def test_replicated_heads_keep_the_true_count():
    heads = Layout(Mesh([[0, 1], [2, 3]], axes=("head", "replica")), (Shard(0), Replicate()))
    assert [heads.local_shape((2, 3), rank=rank) for rank in range(4)] == [(1, 3)] * 4
    assert holders(heads, (2, 3)) == {Box((0, 0), (1, 3)): (0, 1), Box((1, 0), (2, 3)): (2, 3)}
    whole = np.arange(6).reshape(2, 3)
    filled = refit((2, 3), Layout(Mesh(0), []), heads, {0: whole})
    assert filled == {rank: whole[rank // 2 : rank // 2 + 1].tolist() for rank in range(4)}


def test_the_same_expert_in_two_slots_is_the_same_box_twice():
    slots = BoxLayout({0: [Box((0,), (1,)), Box((3,), (4,)), Box((0,), (1,))]})
    assert refit((4,), Layout(Mesh(0), []), slots, {0: np.arange(4)}) == {0: [0, 3, 0]}
