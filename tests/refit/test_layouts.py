"""Every kind of layout between real processes, over every fabric: two pushes each, bit-exact, nothing else written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import field, frozen
from crew import Crew, Job, crew
from fabrics import FABRICS
from judge import VALUES
from models import Held, Model, Ranks, beside, local, spread
from ranks import Rank, free_rendezvous

from refit_sdk.box import Box
from refit_sdk.dtypes import ITEMSIZE
from refit_sdk.layout import BoxLayout, Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard
from refit_sdk.report import PushReport
from refit_sdk.session import RefitSession
from refit_sdk.settings import Settings

VERSIONS = (3, 4)
SIZE = 7
"""Processes of the largest case."""


@frozen(kw_only=True)
class Case:
    """What every rank holds. `together` says which source ranks are, in the same process, a rank of an engine.

    `nbytes` is what must travel in a push (None: counted element by element); `windows` how many there are at least.
    """

    id: str
    sources: Ranks
    engines: Mapping[str, Ranks]
    together: Mapping[int, tuple[str, int]] = field(factory=dict)
    settings: Settings = field(factory=Settings)
    nbytes: int | None = None
    windows: int = 0

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
    total = 0
    for source, seat in case.processes:
        wanted = _elements(case.engines[seat[0]][seat[1]]) if seat is not None else {}
        have = _elements(case.sources[source]) if source is not None else {}
        for name, (mask, stored) in wanted.items():
            missing = mask & ~have[name][0] if name in have else mask
            total += int(missing.sum()) * min(ITEMSIZE[stored], ITEMSIZE[case.dtypes[name]])
    return total


def _elements(rank: tuple[Held, ...]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for held in rank:
        mask, _ = found.setdefault(held.name, (np.zeros(held.shape, np.bool_), held.stored))
        mask[held.box.slices()] = True
    return found


def take_part(_: Rank, case: Case, process: int, where: str, fabric: str = "") -> list[PushReport]:
    """One process of a case: every push judged, sources and targets. `fabric` is one of `FABRICS`, or the default."""
    source_rank, seat = case.processes[process]
    source = Model(case.sources[source_rank]) if source_rank is not None else None
    target = Model(case.engines[seat[0]][seat[1]]) if seat is not None else None
    models = [model for model in (source, target) if model is not None]
    before = [model.addresses() for model in models]
    reports = []
    with _session(case, process, where, source, target, fabric) as session:
        assert target is None or target.untouched() == []
        for version in VERSIONS:
            if source is not None:
                source.fill(version=version)
            if target is not None:
                target.poison()
            reports.append(_push(session, case.processes[process], version))
            assert source is None or source.faults(version=version) == []
            assert target is None or target.faults(version=version, source=case.dtypes) == []
    assert [model.addresses() for model in models] == before
    return reports


def _push(session: RefitSession, seats: tuple[int | None, tuple[str, int] | None], version: int) -> PushReport:
    if seats[0] is None:
        return session.receive()
    report = session.push(version=version) if seats[1] is None else session.sync(version=version)
    assert isinstance(report, PushReport)
    return report


def _session(
    case: Case, process: int, where: str, source: Model | None, target: Model | None, fabric: str
) -> RefitSession:
    rank, seat = case.processes[process]
    common: dict[str, Any] = {"rendezvous": where, "deadline": 20}
    if fabric:
        common["fabric"] = FABRICS[fabric](process)
    engines = sorted(case.engines)
    if source is None:
        assert seat is not None
        size = len(case.engines[seat[0]])
        return RefitSession.target(target, engine=seat[0], rank=seat[1], size=size, **common)
    common |= {"rank": rank, "size": len(case.sources), "engines": engines, "settings": case.settings}
    if seat is None:
        return RefitSession.source(source, **common)
    of_engine: dict[str, Any] = {"engine": seat[0], "engine_rank": seat[1], "engine_size": len(case.engines[seat[0]])}
    return RefitSession.colocated(source=source, target=target, **of_engine, **common)


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


def one_dim_and_meshes() -> Iterator[Case]:
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
    shape = (10, 14)
    by_hand = boxes(shape, 1, (0, 2), (2, 5), (5, 9), (9, 14))
    yield case("columns 2, 3, 4, 5 to replicas", by_hand, whole(shape, 2))
    yield case("rows 3, 3, 3, 1 to columns", boxes(shape, 0, (0, 3), (3, 6), (6, 9), (9, 10)), cut(shape, 3, Shard(1)))
    yield case("an idle source", ((), *cut(shape, 2, Shard(0))), cut(shape, 2, Shard(1)))
    yield case("an idle target", cut(shape, 2, Shard(0)), (*cut(shape, 2, Shard(1)), ()))
    yield case("idle on both sides", (*cut(shape, 2, Shard(1)), ()), ((), *whole(shape), ()))
    yield case("an empty fragment", whole(shape), (*whole(shape), (Held("layers.0.w", shape, Box((2, 0), (2, 14))),)))


def strides() -> Iterator[Case]:
    strided = grid((6,), [[0, 1], [2, 3]], StridedShard(0, split_factor=2), Shard(0))
    yield case("strided shards to three", strided, cut((6,), 3, Shard(0)))
    uneven = Layout(Mesh(range(6), shape=(3, 2)), (StridedShard(0, split_factor=2), Shard(0)))
    for name, layout in (("strided as read", uneven), ("strided as cut", uneven.in_cutting_order())):
        yield case(f"{name}, 13 rows over 3×2", spread("layers.0.w", (13, 3), layout, size=6), whole((13, 3)))
    into = spread("layers.0.w", (13, 3), Layout(Mesh(range(4)), [StridedShard(0, split_factor=3)]), size=4)
    yield case("into strided shards", cut((13, 3), 3, Shard(1)), into)


def replicas() -> Iterator[Case]:
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


GROUPS = (
    one_dim_and_meshes, idle_and_uneven, strides, replicas, both_sides, engines, views, fused, dtypes, families, ties,
    padding, windows,
)  # fmt: skip
CASES = [each for group in GROUPS for each in group()]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SIZE) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bit_exact_twice(ranks: Crew, case: Case) -> None:
    where = free_rendezvous()
    jobs: list[Job] = [(take_part, (case, process, where)) for process in range(len(case.processes))]
    reports = ranks.results(jobs)
    source = case.processes.index(next(seats for seats in case.processes if seats[0] is not None))
    expected = needed(case) if case.nbytes is None else case.nbytes
    for version, report in zip(VERSIONS, reports[source], strict=True):
        assert report.version == version
        assert report.bytes_sent == report.bytes_arrived == expected
        assert {engine: told.state for engine, told in report.engines.items()} == dict.fromkeys(
            case.engines, "complete"
        )
        assert report.windows >= case.windows
    assert all(report.version in VERSIONS for each in reports for report in each)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bit_exact_twice_over(ranks: Crew, case: Case, fabric: str) -> None:
    where = free_rendezvous()
    ranks.results([(take_part, (case, process, where, fabric)) for process in range(len(case.processes))])


def test_the_cases_have_every_kind() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert {name for case in CASES for name in case.dtypes.values()} == ITEMSIZE.keys() & VALUES.keys()
    assert max(len(case.processes) for case in CASES) == SIZE
