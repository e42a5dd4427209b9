"""Layouts, verb by verb, on cases worked out by hand."""

import pytest

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.layout import BoxLayout, Layout, check_granule, check_local, holders
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard

HSDP_TP = Mesh(range(8), shape=(2, 2, 2), axes=("replica", "dp", "tp"))


@pytest.mark.parametrize(
    ("layout", "shape", "boxes"),
    [
        (Layout(Mesh([0, 1]), [Replicate()]), (), [[Box((), ())]] * 2),
        (Layout(Mesh(0), []), (3,), [[Box((0,), (3,))]]),
        (Layout(Mesh([1, 0]), [Shard(0)]), (4,), [[Box((2,), (4,))], [Box((0,), (2,))]]),
        (Layout(Mesh(range(4)), [Shard(0)]), (5,), [[Box((0,), (2,))], [Box((2,), (4,))], [Box((4,), (5,))], []]),
        (Layout(Mesh([[0, 1], [2, 3]]), [Shard(0), Shard(0)]), (4,), [[Box((r,), (r + 1,))] for r in range(4)]),
        (
            Layout(Mesh([[0, 1], [2, 3]]), [Shard(0), Shard(0)], order=(1, 0)),
            (4,),
            [[Box((r,), (r + 1,))] for r in (0, 2, 1, 3)],
        ),
        (
            Layout(Mesh([0, 1]), [StridedShard(1, split_factor=2)]),
            (2, 4),
            [[Box((0, a), (2, a + 1)), Box((0, a + 2), (2, a + 3))] for a in (0, 1)],
        ),
        (Layout(Mesh([0, 1]), [Shard(2)]), (1, 0, 4, 2, 3), [[], []]),
        (
            Layout(Mesh([0, 1]), [Shard(4)]),
            (1, 1, 1, 1, 2),
            [[Box((0,) * 4 + (r,), (1,) * 4 + (r + 1,))] for r in (0, 1)],
        ),
    ],
    ids=[
        "scalar",
        "no axes",
        "ranks reversed",
        "uneven, empty",
        "two axes",
        "two axes, inner first",
        "strided",
        "0 x",
        "5-D",
    ],
)
def test_boxes(layout, shape, boxes):
    assert [list(layout.boxes(shape, rank=rank)) for rank in range(len(boxes))] == boxes


def test_parts_of_strides_in_two_dims_are_their_product_in_local_order():
    layout = Layout(Mesh([[0, 1], [2, 3]]), [StridedShard(0, split_factor=2), StridedShard(1, split_factor=2)])
    assert [(str(outer), str(inner)) for outer, inner in layout.parts((8, 4), rank=2)] == [
        ("[2:4, 0:1]", "[0:2, 0:1]"),
        ("[2:4, 2:3]", "[0:2, 1:2]"),
        ("[6:8, 0:1]", "[2:4, 0:1]"),
        ("[6:8, 2:3]", "[2:4, 1:2]"),
    ]


def test_strides_whose_runs_touch_are_one_box():
    assert Layout(Mesh([0, 1]), [StridedShard(0, split_factor=4)]).boxes((3,), rank=0) == (Box((0,), (3,)),)


def test_a_rank_outside_the_mesh_holds_nothing_and_has_no_local_tensor():
    layout = Layout(Mesh([4, 5]), [Shard(0)])
    assert layout.parts((4,), rank=0) == layout.boxes((4,), rank=0) == ()
    with pytest.raises(LayoutError, match=r"rank 0 has no local tensor: it isn't in the mesh of ranks \(4, 5\)"):
        layout.local_shape((4,), rank=0)


def test_layouts_that_cut_alike_are_equal():
    assert Layout(Mesh([0, 1]), [StridedShard(0, split_factor=1)]) == Layout(Mesh([0, 1]), [Shard(0)])
    assert Layout(Mesh([[0, 1]]), [Shard(3), Shard(0)]) == Layout(Mesh([[0, 1]]), [Replicate(), Shard(0)])
    cut = [Replicate(), Shard(0), Shard(1)]
    assert Layout(HSDP_TP, cut, order=("tp", "dp", "replica")) == Layout(HSDP_TP, cut)
    same_dim = [Shard(1), Shard(0), Shard(1)]
    inner_first = Layout(HSDP_TP, same_dim, order=("tp", "replica", "dp"))
    assert inner_first == Layout(HSDP_TP, same_dim, order=("dp", "tp", "replica"))
    assert inner_first.order == (2, 1, 0)
    assert len({inner_first, Layout(HSDP_TP, same_dim)}) == 2


@pytest.mark.parametrize(
    ("placements", "order"),
    [
        ((Replicate(), StridedShard(0, split_factor=2), Shard(0)), (0, 2, 1)),
        ((StridedShard(0, split_factor=4), StridedShard(0, split_factor=2), Shard(0)), (2, 1, 0)),
        ((StridedShard(0, split_factor=2), Shard(0), Shard(0)), (1, 0, 2)),
        ((StridedShard(1, split_factor=2), Shard(0), Shard(1)), (2, 1, 0)),
        ((Shard(0), Replicate(), Shard(0)), (0, 1, 2)),
    ],
    ids=["hsdp and tp", "inside out", "between", "past another dim", "no stride"],
)
def test_in_cutting_order_finds_the_order(placements, order):
    layout = Layout(HSDP_TP, placements).in_cutting_order()
    assert layout.order == order
    assert not any(isinstance(placement, StridedShard) for placement in layout.placements)


def test_in_cutting_order_refuses_strides_that_no_cut_left():
    with pytest.raises(LayoutError, match=r"axis 'dp' of .* no axes to its right cut dim 0 into 3 pieces"):
        Layout(HSDP_TP, (Replicate(), StridedShard(0, split_factor=3), Shard(0))).in_cutting_order()
    with pytest.raises(LayoutError, match="stand for an order of cuts"):
        Layout(HSDP_TP, (Shard(0), StridedShard(0, split_factor=2), Shard(0)), order=(2, 1, 0)).in_cutting_order()


def test_holders_names_every_replica():
    grouped = Layout(HSDP_TP, (Replicate(), Replicate(), Shard(0)))
    assert holders(grouped, (4,)) == {Box((0,), (2,)): (0, 2, 4, 6), Box((2,), (4,)): (1, 3, 5, 7)}
    twice = BoxLayout({1: [Box((3,), (4,)), Box((3,), (4,))], 0: [Box((3,), (4,))]})
    assert holders(twice, (8,)) == {Box((3,), (4,)): (0, 1, 1)}


def test_box_layout_puts_a_ranks_boxes_end_to_end():
    rows = BoxLayout({0: [Box((6, 0), (8, 3)), Box((0, 0), (1, 3))]})
    assert rows.local_shape((8, 3), rank=0) == (3, 3)
    assert rows.parts((8, 3), rank=0) == (
        (Box((6, 0), (8, 3)), Box((0, 0), (2, 3))),
        (Box((0, 0), (1, 3)), Box((2, 0), (3, 3))),
    )
    columns = BoxLayout({0: [Box((0, 6), (3, 8)), Box((0, 0), (3, 1))]}, dim=1)
    assert columns.local_shape((3, 8), rank=0) == (3, 3)
    assert columns.parts((3, 8), rank=0)[1] == (Box((0, 0), (3, 1)), Box((0, 2), (3, 3)))


def test_box_layout_joins_neighbours_and_drops_what_is_empty():
    split = BoxLayout({0: [Box((0,), (2,)), Box((5,), (5,)), Box((2,), (4,))], 3: []})
    assert split == BoxLayout({0: [Box((0,), (4,))]})
    assert hash(split) == hash(BoxLayout({0: [Box((0,), (4,))]}))
    assert split.ranks == (0,)


def test_box_layout_of_an_empty_shard_has_a_local_shape_and_no_parts():
    layout = BoxLayout({0: [Box((0, 14), (10, 14))], 1: [Box((), ())]})
    assert layout.local_shape((10, 14), rank=0) == (10, 0)
    assert layout.parts((10, 14), rank=0) == ()
    assert layout.parts((), rank=1) == ((Box((), ()), Box((), ())),)
    assert layout.local_shape((), rank=1) == ()


def test_sizes_need_no_32_bits():
    layout = Layout(Mesh(range(4)), [Shard(1)])
    assert layout.boxes((262144, 2**40), rank=3) == (Box((0, 3 * 2**38), (262144, 2**40)),)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Layout(HSDP_TP, [Shard(0)]), "needs 3 placements, got 1"),
        (lambda: Layout(HSDP_TP, [Shard(0)] * 3, order=("tp",)), "each of the axes"),
        (lambda: Layout(HSDP_TP, [Shard(0)] * 3, order=("tp", "tp", "dp")), "each of the axes"),
        (lambda: Layout(HSDP_TP, [Shard(0)] * 3, order=("ep", "tp", "dp")), "no axis 'ep'"),
        (lambda: Layout(Mesh([0, 1]), [Shard(2)]).boxes((8, 4), rank=0), r"Shard\(dim=2\) on axis '0' cuts dim 2, but"),
        (lambda: Layout(Mesh([0, 1]), [Shard(0)]).boxes((), rank=5), "0 dims"),
        (lambda: Layout(Mesh([0, 1]), [Shard(0)]).boxes((-1,), rank=0), "negative"),
        (lambda: BoxLayout({0: [Box((0, 0), (1, 2)), Box((1, 0), (2, 3))]}), "don't fit end to end along dim 0"),
        (lambda: BoxLayout({0: [Box((0,), (1,)), Box((1, 0), (2, 3))]}), "don't fit end to end"),
        (lambda: BoxLayout({0: [Box((), ()), Box((), ())]}), "don't fit end to end"),
        (
            lambda: BoxLayout({0: [Box((0,), (9,))]}).boxes((8,), rank=0),
            r"can't hold \[0:9\] of a tensor of shape \(8,\)",
        ),
        (lambda: BoxLayout({0: [Box((0,), (9,))]}).boxes((8, 1), rank=0), "can't hold"),
        (lambda: BoxLayout({0: [Box((0,), (1,))]}).local_shape((8,), rank=1), r"gives boxes to ranks \(0,\)"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(LayoutError, match=message):
        wrong()


def test_check_granule_names_the_cut():
    layout = Layout(Mesh([0, 1]), [Shard(1)])
    with pytest.raises(LayoutError, match=r"\[0:4, 0:129\] of a tensor of shape \(4, 258\) is cut inside a granule"):
        check_granule(layout.boxes((4, 258), rank=0), shape=(4, 258), granule=(1, 128))
    check_granule(layout.boxes((4, 512), rank=0), shape=(4, 512), granule=(1, 128))
    with pytest.raises(LayoutError, match="one number >= 1 a dim"):
        check_granule([], shape=(4, 258), granule=(128,))


def test_check_local_tells_what_was_expected():
    layout = Layout(Mesh([0, 1], axes=("tp",)), [Replicate()])
    check_local(layout, (128, 4), rank=1, found=[128, 4])
    with pytest.raises(LayoutError, match=r"rank 1 should hold a local tensor of shape \(128, 4\), found \(64, 4\)"):
        check_local(layout, (128, 4), rank=1, found=(64, 4))
