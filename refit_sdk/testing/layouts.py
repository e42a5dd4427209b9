"""The odd ones: layouts, views and dtypes that a refit gets wrong where it takes the ordinary for the only one.

Each group is a generator of cases; the group's name, with blanks, is what tables call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import evolve

from refit_sdk import fused as declared
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.dtypes import ITEMSIZE
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard
from refit_sdk.settings import Settings
from refit_sdk.testing.cases import Case, boxes, case, cut, grid, whole
from refit_sdk.testing.judge import VALUES
from refit_sdk.testing.models import Held, Ranks, beside, local, spread


def one_dim_and_meshes() -> Iterator[Case]:
    """One mesh axis or two, to other sizes and other dims."""
    shape = (7, 10)
    yield case("rows to rows, three to two", cut(shape, 3, Shard(0)), cut(shape, 2, Shard(0)))
    yield case("rows to rows, two to five", cut(shape, 2, Shard(0)), cut(shape, 5, Shard(0)))
    yield case("rows to columns, four to three", cut(shape, 4, Shard(0)), cut(shape, 3, Shard(1)))
    yield case("columns to rows, two to three", cut(shape, 2, Shard(1)), cut(shape, 3, Shard(0)))
    yield case("one to six", whole(shape), cut(shape, 6, Shard(1)))
    yield case("six to one", cut(shape, 6, Shard(0)), whole(shape))
    yield case("three rows on four ranks, the last has none", cut((3, 4), 4, Shard(0)), cut((3, 4), 3, Shard(1)))
    yield case("four columns on five targets", cut((3, 4), 2, Shard(0)), cut((3, 4), 5, Shard(1)))
    yield case("permuted ranks", grid(shape, [2, 0, 3, 1], Shard(0)), grid(shape, [1, 2, 0], Shard(1)))
    blocks = grid(shape, [[0, 1], [2, 3]], Shard(0), Shard(1))
    yield case("a grid of blocks to columns", blocks, cut(shape, 3, Shard(1)))
    permuted = grid(shape, [[1, 3], [0, 2]], Shard(1), Shard(0))
    yield case("columns to a permuted grid", cut(shape, 3, Shard(1)), permuted)
    five = (3, 5, 2, 4, 3)
    yield case("five dims", grid(five, [[0, 1], [2, 3]], Shard(1), Shard(3)), cut(five, 3, Shard(0)))


def idle_and_uneven() -> Iterator[Case]:
    """Cuts by hand, ranks that hold nothing, an empty fragment."""
    shape = (10, 14)
    by_hand = boxes(shape, 1, (0, 2), (2, 5), (5, 9), (9, 14))
    yield case("columns 2, 3, 4, 5 to replicas", by_hand, whole(shape, 2))
    yield case("rows 3, 3, 3, 1 to columns", boxes(shape, 0, (0, 3), (3, 6), (6, 9), (9, 10)), cut(shape, 3, Shard(1)))
    yield case("an idle source", ((), *cut(shape, 2, Shard(0))), cut(shape, 2, Shard(1)))
    yield case("an idle target", cut(shape, 2, Shard(0)), (*cut(shape, 2, Shard(1)), ()))
    yield case("idle on both sides", (*cut(shape, 2, Shard(1)), ()), ((), *whole(shape), ()))
    yield case("an empty fragment", whole(shape), (*whole(shape), (Held("layers.0.w", shape, Box((2, 0), (2, 14))),)))


def strides() -> Iterator[Case]:
    """Strided shards, as read and as cut."""
    strided = grid((6,), [[0, 1], [2, 3]], StridedShard(0, split_factor=2), Shard(0))
    yield case("strided shards to three", strided, cut((6,), 3, Shard(0)))
    uneven = Layout(Mesh(range(6), shape=(3, 2)), (StridedShard(0, split_factor=2), Shard(0)))
    for name, layout in (("strided as read", uneven), ("strided as cut", uneven.in_cutting_order())):
        yield case(f"{name}, 13 rows over 3×2", spread("layers.0.w", (13, 3), layout, size=6), whole((13, 3)))
    into = spread("layers.0.w", (13, 3), Layout(Mesh(range(4)), [StridedShard(0, split_factor=3)]), size=4)
    yield case("into strided shards", cut((13, 3), 3, Shard(1)), into)


def replicas() -> Iterator[Case]:
    """The same box on several ranks, or twice on one."""
    shape = (9, 4)
    hybrid = grid(shape, [[0, 1], [2, 3]], Replicate(), Shard(0))
    yield case("replicated on both sides", whole(shape, 3), whole(shape, 3))
    yield case("hybrid shards to replicas", hybrid, whole(shape, 3))
    heads = spread("layers.0.w", shape, Layout(Mesh([[0, 1], [2, 3]]), (Shard(0), Replicate())), size=4)
    yield case("shards to heads that two ranks share", cut(shape, 3, Shard(0)), heads)
    twice = (*local("layers.0.w", shape, Layout(Mesh([0]), [Replicate()]), rank=0), *whole(shape)[0])
    yield case("two copies on one rank", cut(shape, 2, Shard(0)), (twice,))
    yield case("overlapping holders", boxes(shape, 0, (0, 6), (3, 9), (5, 7)), cut(shape, 2, Shard(0)))


def both_sides() -> Iterator[Case]:
    """Processes that are sources and targets."""
    shape = (8, 6)
    rows, columns = cut(shape, 3, Shard(0)), cut(shape, 3, Shard(1))
    everybody = {rank: ("a", rank) for rank in range(3)}
    yield case("colocated", rows, columns, together=everybody)
    yield case("colocated, nothing to send", rows, rows, together=everybody, nbytes=0)
    yield case("colocated, other ranks", rows, columns, together={0: ("a", 2), 1: ("a", 0), 2: ("a", 1)})
    narrow = cut(shape, 3, Shard(1), stored="bfloat16")
    yield case("colocated with a cast", rows, narrow, together=everybody)
    yield case("some colocated, some on one side", rows, cut(shape, 4, Shard(1)), together={0: ("a", 1), 2: ("a", 3)})
    yield case("one colocated, two engines", rows, cut(shape, 2, Shard(0)), whole(shape), together={1: ("b", 0)})


def engines() -> Iterator[Case]:
    """Several engines in one push."""
    shape = (8, 6)
    narrow = cut(shape, 2, Shard(0), stored="bfloat16")
    yield case("two engines of different layout and dtype", cut(shape, 3, Shard(1)), narrow, cut(shape, 2, Shard(1)))
    main = [cut(shape, 2, Shard(0), name=f"model.layers.{i}.w") for i in range(3)]
    extra = cut((5,), 2, Shard(0), name="mtp.layers.0.w")
    yield case(
        "one engine has the draft model only",
        beside(*main, extra),
        beside(*(cut(shape, 2, Shard(1), name=f"model.layers.{i}.w") for i in range(3))),
        whole((5,), name="mtp.layers.0.w"),
    )


def views() -> Iterator[Case]:
    """Views of other strides than row-major ones, and scalars."""
    shape = (6, 4)
    by_columns: dict[str, Any] = {"strides": (1, 6)}
    yield case("a transposed source", whole(shape, **by_columns), cut(shape, 2, Shard(0)))
    yield case("a transposed target", cut(shape, 2, Shard(1)), whole(shape, **by_columns))
    yield case("transposed on both sides", whole(shape, **by_columns), whole(shape, 2, **by_columns))
    yield case("every other column, every third row", whole(shape, strides=(9, 2)), whole(shape, strides=(27, 3)))
    deep = (4, 31, 10)
    padded = cut(deep, 4, Shard(1))
    gathered = whole(deep, strides=(320, 10, 1))
    yield case("a gathered view with the strides of its padding", gathered, padded)
    yield case("dims in another order", whole(deep, strides=(1, 40, 4)), cut(deep, 3, Shard(2)))
    yield case("a scalar", whole((), 2, name="scale"), whole((), 3, name="scale"))
    yield case("a scalar and a cast", whole((), name="scale"), whole((), 2, name="scale", stored="bfloat16"))


def fused() -> Iterator[Case]:
    """Several tensors in one storage: gate and up, and grouped query, key and value rows."""
    yield case(
        "gate and up in one, two to four",
        tuple(_gate_up(rank, 2) for rank in range(2)),
        tuple(_gate_up(rank, 4) for rank in range(4)),
    )
    apart = beside(cut((8, 3), 2, Shard(0), name="gate"), cut((8, 3), 2, Shard(0), name="up"))
    yield case("gate and up in one, to two tensors", tuple(_gate_up(rank, 2) for rank in range(2)), apart)
    separate = beside(*(cut((rows, 3), 2, Shard(0), name=name) for name, rows in (("q", 8), ("k", 4), ("v", 4))))
    yield case("grouped rows of q, k and v", (tuple(_grouped()),), separate)
    yield case("rows of q, k and v, to grouped", separate, (tuple(_grouped()), tuple(_grouped())))
    shape = (7, 3)
    overlapping = (_rows("w", shape, 0, 4, block="one", at=0), _rows("w", shape, 3, 7, block="one", at=3))
    yield case("target views that overlap", cut(shape, 2, Shard(1), name="w"), (overlapping,))


def _rows(name: str, shape: tuple[int, ...], start: int, stop: int, *, block: str, at: int) -> Held:
    """Rows of a tensor, stored from row `at` of a block of rows."""
    return Held(name, shape, Box((start, 0), (stop, shape[1])), block=block, offset=4 * shape[1] * at)


def _gate_up(rank: int, size: int) -> tuple[Held, ...]:
    step = 8 // size
    return tuple(
        _rows(name, (8, 3), rank * step, (rank + 1) * step, block="gate_up", at=at)
        for name, at in (("gate", 0), ("up", step))
    )


def _grouped() -> Iterator[Held]:
    """Two groups, each four query rows, two key rows and two value rows, in one block."""
    for group in range(2):
        for name, rows, each, at in (("q", 8, 4, 0), ("k", 4, 2, 4), ("v", 4, 2, 6)):
            yield _rows(name, (rows, 3), group * each, (group + 1) * each, block="qkv", at=8 * group + at)


def dtypes() -> Iterator[Case]:
    """Every dtype that can be moved, and casts."""
    shape, names = (6, 5), sorted(ITEMSIZE.keys() & VALUES.keys())
    assert {1, 2, 4, 8} == {ITEMSIZE[name] for name in names}
    rows = beside(*(cut(shape, 2, Shard(0), name=f"as.{name}", stored=name) for name in names))
    columns = beside(*(cut(shape, 3, Shard(1), name=f"as.{name}", stored=name) for name in names))
    transposed = beside(*(whole(shape, name=f"as.{name}", stored=name, strides=(1, 6)) for name in names))
    yield case("every dtype, rows to columns", rows, columns)
    yield case("every dtype, transposed", rows, transposed)
    yield case("every dtype, in small windows", columns, rows, settings=Settings(window_bytes=40, window_ops=3))
    casts = [
        ("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"),
        ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"),
    ]  # fmt: skip
    declared = [("float32", "float16"), ("bfloat16", "float16"), ("float64", "float32"), ("bfloat16", "float8_e5m2")]
    sources = [cut(shape, 2, Shard(0), name=f"{a}.{b}", stored=a, within=b) for a, b in casts + declared]
    targets = [cut(shape, 3, Shard(1), name=f"{a}.{b}", stored=b, within=b) for a, b in casts + declared]
    allowed = Settings(casts=[(f"{a}.{b}", b) for a, b in declared])
    yield case("casts", beside(*sources), beside(*targets), settings=allowed)
    small = Settings(casts=allowed.casts, window_bytes=32)
    yield case("casts in small windows", beside(*sources), beside(*targets), settings=small)


def families() -> Iterator[Case]:
    """Stages, layers and experts by their numbers."""
    shape = (4, 6)

    def layers(numbers: tuple[int, ...], size: int, *placements: Any) -> Ranks:
        return beside(*(cut(shape, size, *placements, name=f"model.layers.{i}.w") for i in numbers))

    stages = tuple(layers(numbers, 1, Replicate())[0] for numbers in ((0, 1, 2), (3, 4), (5,)))
    yield case("stages of 3, 2 and 1 layers to tensor parallel", stages, layers(tuple(range(6)), 2, Shard(1)))
    virtual = tuple(layers(numbers, 1, Replicate())[0] for numbers in ((0, 1, 4, 5), (2, 3, 6, 7)))
    others = tuple(layers(tuple(range(a, b)), 1, Replicate())[0] for a, b in ((0, 3), (3, 5), (5, 8)))
    yield case("virtual stages to other stages", virtual, others)

    def experts(numbers: range | tuple[int, ...], *, half: int | None = None) -> tuple[Held, ...]:
        box = Box((0, 0), shape) if half is None else Box((0, 3 * half), (4, 3 * half + 3))
        names = [f"model.layers.{layer}.experts.{expert}.w" for layer in range(2) for expert in numbers]
        return tuple(Held(name, shape, box) for name in names)

    four = tuple(experts(range(2 * rank, 2 * rank + 2)) for rank in range(4))
    yield case("experts, four to two", four, tuple(experts(range(4 * rank, 4 * rank + 4)) for rank in range(2)))
    halves = tuple(experts(range(4 * ep, 4 * ep + 4), half=tp) for ep in range(2) for tp in range(2))
    three = tuple(experts(range(a, b)) for a, b in ((0, 3), (3, 5), (5, 8)))
    yield case("experts and halves of each, to three", halves, three)
    redundant = (experts((0, 1, 2, 3, 7)), experts((4, 5, 6, 7, 0)), experts((3, 3)))
    yield case("experts in several slots", four, redundant)


def ties() -> Iterator[Case]:
    """Tied tensors, on either side and on both."""
    shape = (8, 3)
    embed, head = "model.embed.w", "lm_head.w"
    own = cut(shape, 2, Shard(0), name=embed)
    aliased = cut(shape, 2, Shard(0), name=embed, aliases=(head,))
    untied = beside(own, cut(shape, 2, Shard(0), name=head, values=embed))
    wants_head = cut(shape, 3, Shard(1), name=head, values=embed)
    wants_both = beside(cut(shape, 3, Shard(1), name=embed), wants_head)
    takes_either = whole(shape, name=head, aliases=(embed,), values=embed)
    yield case("tied at the sources, both wanted", aliased, wants_both, nbytes=2 * 8 * 3 * 4)
    yield case("tied at the sources, the other name wanted", aliased, wants_head)
    yield case("tied at the targets under the other name", own, takes_either, nbytes=8 * 3 * 4)
    yield case("tied on both sides, named otherwise", aliased, takes_either, nbytes=8 * 3 * 4)
    yield case("untied and equal at the sources, tied at the targets", untied, takes_either, nbytes=8 * 3 * 4)


def padding() -> Iterator[Case]:
    """A vocabulary of ten rows, padded to twelve in both, with padded columns: no padding is read or written."""
    shape = (10, 5)

    def padded(size: int, columns: int) -> Ranks:
        step = 12 // size
        cuts = [(min(10, rank * step), min(10, (rank + 1) * step)) for rank in range(size)]
        return tuple((Held("embed", shape, Box((a, 0), (b, 5)), strides=(columns, 1)),) for a, b in cuts)

    yield case("padding on both sides", padded(4, 8), padded(3, 7))
    yield case("padded rows to whole", padded(3, 5), whole(shape, name="embed"))


def windows() -> Iterator[Case]:
    """Small windows, few messages, granules."""
    shape = (40, 24)
    rows, columns = cut(shape, 2, Shard(0)), cut(shape, 3, Shard(1))
    yield case("many windows", rows, columns, settings=Settings(window_bytes=256), windows=8)
    few = Settings(window_bytes=1024, window_ops=2, coalesce_bytes=0)
    yield case("few messages a window", columns, rows, settings=few, windows=2)
    tiny = Settings(window_bytes=8)
    yield case(
        "a window of two elements", cut((9, 5), 2, Shard(1)), cut((9, 5), 3, Shard(0)), settings=tiny, windows=10
    )
    granules = whole(shape, granule=(4, 8)), cut(shape, 3, Shard(1), granule=(2, 8))
    yield case("granules of four rows and eight columns", *granules, settings=Settings(window_bytes=256), windows=4)
    together = {0: ("a", 0), 1: ("a", 2)}
    yield case("colocated, many windows", rows, columns, settings=Settings(window_bytes=256), together=together)


def _held(fragments: list[Fragment], **storages: Any) -> tuple[Held, ...]:
    """What fragments over NumPy storages of float32 say, as data: which block, and where in it."""
    made = []
    for fragment in fragments:
        view: Any = fragment.view
        (block,) = (name for name, storage in storages.items() if np.may_share_memory(view, storage))
        offset = view.ctypes.data - storages[block].ctypes.data
        strides = tuple(step // view.itemsize for step in view.strides)
        made.append(Held(fragment.name, fragment.shape, fragment.box, strides=strides, block=block, offset=offset))
    return tuple(made)


def _qkv(kv_heads: int, size: int, arrangement: declared.Arrangement) -> Ranks:
    names, mine = ("q", "k", "v"), max(1, kv_heads // size)
    storages = [np.zeros((2 * (8 // size + 2 * mine), 3), np.float32) for _ in range(size)]
    about: dict[str, Any] = {"heads": 8, "kv_heads": kv_heads, "head_dim": 2, "arrangement": arrangement}
    return tuple(
        _held(declared.fused_qkv(storage, names, rank=rank, size=size, **about), qkv=storage)
        for rank, storage in enumerate(storages)
    )


def _stack(owners: list[str | None], rank: int, size: int, block: int | None = None) -> tuple[Held, ...]:
    """Slots of experts of (4, 3), each cut inside over `size` ranks."""
    w13, w2 = (np.zeros((len(owners), *shape), np.float32) for shape in ((8 // size, 3), (3, 4 // size)))
    found = declared.stacked_experts(w13, w2, experts=owners, rank=rank, size=size, block=block)
    return _held(found, w13=w13, w2=w2)


def packed_by_frameworks() -> Iterator[Case]:
    """Fused query-key-value rows and stacks of experts, as frameworks pack them."""
    for kv_heads, word in ((1, "one KV head"), (2, "fewer KV heads than ranks"), (8, "more KV heads than ranks")):
        grouped, stacked = _qkv(kv_heads, 2, "grouped"), _qkv(kv_heads, 4, "stacked")
        yield case(f"fused qkv, {word}", grouped, stacked)
        yield case(f"fused qkv, {word}, the other way", stacked, grouped)
    owners: list[str | None] = [f"model.layers.3.mlp.experts.{number}" for number in range(4)]
    four = tuple(_stack([owner], 0, 1) for owner in owners)
    halves = tuple(_stack(owners, rank, 2, block=1) for rank in range(2))
    yield case("stacked experts, one by one to interleaved halves", four, halves)
    slots = (_stack([*owners[:3], owners[0]], 0, 1), _stack([owners[3], owners[3], None, owners[1]], 0, 1))
    yield case("stacked experts, some in two slots and a slot empty", halves, slots)
    shared = "model.layers.3.mlp.shared_experts"
    holders = (_stack([*owners], 0, 1), _stack([shared], 0, 1))
    wanted = (_stack([*owners[:2], shared], 0, 1), _stack([*owners[2:], shared], 0, 1))
    yield case("stacked experts, the shared one in a slot of every rank", holders, wanted)


def sizes() -> Iterator[Case]:
    """Many tensors, of mixed sizes, and one that is larger than any window."""
    lengths = [1 + 37 * number % 200 for number in range(120)]
    rows = beside(*(cut((n, 3), 3, Shard(0), name=f"t{n}.{i}.w") for i, n in enumerate(lengths)))
    wanted = beside(*(cut((n, 3), 4, Shard(1), name=f"t{n}.{i}.w") for i, n in enumerate(lengths)))
    few = Settings(window_ops=4, window_bytes=4096, coalesce_bytes=64)
    yield case("a hundred and twenty tensors of mixed sizes", rows, wanted, settings=few, windows=20)
    large, small = cut((640, 64), 2, Shard(0), name="large"), cut((16, 64), 2, Shard(0), name="small")
    yield case(
        "a tensor many windows large beside small ones", beside(large, small),
        beside(cut((640, 64), 3, Shard(1), name="large"), whole((16, 64), 3, name="small")),
        settings=Settings(window_bytes=16384), windows=5,
    )  # fmt: skip


GROUPS = (
    one_dim_and_meshes, idle_and_uneven, strides, replicas, both_sides, engines, views, fused, packed_by_frameworks,
    dtypes, families, ties, padding, windows, sizes,
)  # fmt: skip


def odd_ones() -> list[Case]:
    """All of them, in order of their groups."""
    return [evolve(each, group=group.__name__.replace("_", " ")) for group in GROUPS for each in group()]
