"""Layouts against DTensor: its own offsets, its own splitting of a real tensor, and what FSDP2 really stores."""

import os
from concurrent.futures import ProcessPoolExecutor
from math import prod
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as dtensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from refit_sdk.layout import BoxLayout, Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard


@st.composite
def cases(draw, min_ndim=0):
    """A shape, and a layout of it over a mesh of one to three axes whose ranks are in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=min_ndim, max_size=5)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(prod(mesh_shape))))
    return shape, Layout(Mesh(ranks, shape=mesh_shape), [draw(placements(len(shape))) for _ in mesh_shape])


def placements(ndim):
    if not ndim:
        return st.just(Replicate())
    dims = st.integers(0, ndim - 1)
    strided = st.builds(StridedShard, dims, st.integers(1, 5))
    return st.one_of(st.builds(Shard, dims), strided, st.just(Replicate()))


def as_dtensors(placement):
    if isinstance(placement, StridedShard):
        return dtensor._StridedShard(placement.dim, split_factor=placement.split_factor)
    return dtensor.Shard(placement.dim) if isinstance(placement, Shard) else dtensor.Replicate()


def split_by_dtensor(whole, layout, rank):
    """A rank's local tensor, by letting each placement split what the ones before it left."""
    local = whole
    for axis, index in enumerate(layout.mesh.coordinate(rank)):
        placement = as_dtensors(layout.placements[axis])
        if not isinstance(placement, dtensor.Replicate):
            pieces, _ = placement._split_tensor(local, layout.mesh.shape[axis], with_padding=False, contiguous=False)
            local = pieces[index]
    return local


def split_by_parts(whole, layout, rank):
    """A rank's local array, by copying box by box; -1 where no box wrote. Counts the writes too."""
    local = np.full(layout.local_shape(whole.shape, rank=rank), -1, dtype=np.int64)
    writes = np.zeros(local.shape, dtype=int)
    for outer, inner in layout.parts(whole.shape, rank=rank):
        local[inner.slices()] = whole[outer.slices()]
        writes[inner.slices()] += 1
    return local, writes


@given(cases())
def test_local_shape_and_offset_are_dtensors(case):
    shape, layout = case
    theirs = [as_dtensors(placement) for placement in layout.placements]
    for rank in layout.ranks:
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, layout.mesh.shape, list(layout.mesh.coordinate(rank)), theirs
        )
        assert layout.local_shape(shape, rank=rank) == tuple(local_shape)
        boxes = layout.boxes(shape, rank=rank)
        assert bool(boxes) == (prod(local_shape) > 0)
        assert not boxes or boxes[0].start == tuple(offset)


@given(cases())
def test_parts_are_what_dtensor_splits_each_local_element_once(case):
    shape, layout = case
    whole = torch.arange(prod(shape)).reshape(shape)
    for rank in layout.ranks:
        local, writes = split_by_parts(whole.numpy(), layout, rank)
        assert (writes == 1).all()
        assert np.array_equal(local, split_by_dtensor(whole, layout, rank).numpy())


@given(cases())
def test_parts_are_as_few_as_can_be(case):
    """Within a rank, two parts with the same distance from local to global would have been one box."""
    shape, layout = case
    for rank in layout.ranks:
        parts = layout.parts(shape, rank=rank)
        distances = {tuple(np.subtract(outer.start, inner.start).tolist()) for outer, inner in parts}
        assert len(distances) == len(parts)
        assert list(parts) == sorted(parts, key=lambda part: part[1].start)


@given(cases(min_ndim=1), st.data())
def test_any_layout_can_be_filled_from_any_other(case, data):
    """A refit in NumPy: each target part takes its overlap with the parts of one holder of each source box."""
    shape, source = case
    target = Layout(source.mesh, [data.draw(placements(len(shape))) for _ in source.placements])
    whole = np.arange(prod(shape)).reshape(shape)
    held = {rank: split_by_parts(whole, source, rank)[0] for rank in source.ranks}
    offers = {outer: (rank, inner) for rank in source.ranks for outer, inner in source.parts(shape, rank=rank)}
    for rank in target.ranks:
        expected, _ = split_by_parts(whole, target, rank)
        local = np.full_like(expected, -1)
        for outer, inner in target.parts(shape, rank=rank):
            for offer, (holder, place) in offers.items():
                if common := outer.intersect(offer):
                    into = common.relative_to(outer).translate(inner.start)
                    taken = common.relative_to(offer).translate(place.start)
                    local[into.slices()] = held[holder][taken.slices()]
        assert np.array_equal(local, expected)


@given(cases())
def test_the_same_boxes_given_one_by_one_are_the_same_layout(case):
    shape, layout = case
    ranks = [rank for rank in layout.ranks if len(layout.boxes(shape, rank=rank)) == 1]
    explicit = BoxLayout({rank: layout.boxes(shape, rank=rank) for rank in ranks})
    for rank in ranks:
        assert explicit.parts(shape, rank=rank) == layout.parts(shape, rank=rank)
        assert explicit.local_shape(shape, rank=rank) == layout.local_shape(shape, rank=rank)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_cutting_order_changes_nothing_where_every_cut_is_even(rows, outer, middle, inner):
    mesh = Mesh(range(outer * middle * inner), shape=(outer, middle, inner))
    strided = Layout(mesh, (StridedShard(0, middle * inner), StridedShard(0, inner), Shard(0)))
    extent = (rows * mesh.size,)
    ordered = strided.in_cutting_order()
    assert [ordered.parts(extent, rank=r) for r in mesh.ranks] == [strided.parts(extent, rank=r) for r in mesh.ranks]


def on_every_rank(case, grid, *args):
    """`case(mesh, *args)` on every rank of a DeviceMesh over `grid`, in torch's fake process group."""
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = {}
    for rank in sorted(torch.tensor(grid).flatten().tolist()):
        distributed.init_process_group("fake", rank=rank, world_size=torch.tensor(grid).numel(), store=FakeStore())
        try:
            names = ("dp", "tp", "cp")[: torch.tensor(grid).ndim]
            found[rank] = case(DeviceMesh("cpu", grid, mesh_dim_names=names), *args)
        finally:
            distributed.destroy_process_group()
    return found


def public_offsets(mesh, shape, theirs):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, theirs)


def stored_by_fsdp(mesh, rows):
    """The rows that FSDP2 over column-wise tensor parallelism stores, and the placements it states."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    module = torch.nn.Linear(1, rows, bias=False)
    module.weight.data = torch.arange(float(rows)).reshape(rows, 1)
    parallelize_module(module, mesh["tp"], ColwiseParallel(), src_data_rank=None)
    fully_shard(module, mesh=mesh["dp"])
    weight = module.weight
    return weight.to_local().flatten().int().tolist(), [
        (p.dim, getattr(p, "split_factor", 1)) for p in weight.placements
    ]


@pytest.fixture(scope="module")
def child():
    """A process of its own for torch's process groups, so that this one never has any."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        yield pool


def test_a_device_mesh_with_ranks_in_any_order_gives_the_same(child):
    grid, shape = [[3, 1, 5], [0, 2, 4]], (7, 5)
    theirs = [dtensor._StridedShard(0, split_factor=3), dtensor.Shard(0)]
    layout = Layout(Mesh(torch.tensor(grid)), (StridedShard(0, split_factor=3), Shard(0)))
    for rank, (local_shape, offset) in (
        child.submit(on_every_rank, public_offsets, grid, shape, theirs).result().items()
    ):
        assert layout.local_shape(shape, rank=rank) == tuple(local_shape)
        assert [box.start for box in layout.boxes(shape, rank=rank)[:1]] == [tuple(offset)] * (local_shape[0] > 0)


@pytest.mark.parametrize(
    ("num_dp", "rows"),
    [(2, 6), (3, 13), (4, 9), (4, 5), (4, 3)],
    ids=["pieces alike", "uneven pieces, none empty", "one part empty", "some empty", "most empty"],
)
def test_fsdp_over_tensor_parallel_stores_what_the_cutting_order_says(child, num_dp, rows):
    grid = [[2 * dp, 2 * dp + 1] for dp in range(num_dp)]
    mesh = Mesh(grid, axes=("dp", "tp"))
    for rank, (stored, stated) in child.submit(on_every_rank, stored_by_fsdp, grid, rows).result().items():
        layout = Layout(mesh, [StridedShard(dim, factor) for dim, factor in stated])
        boxes = layout.in_cutting_order().boxes((rows,), rank=rank)
        assert [row for box in boxes for (row,) in box.points()] == stored
