"""Small worlds, drawn and written by hand, and an oracle that plays all programs over plain NumPy indices."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from typing import Any

import numpy as np
from attrs import frozen
from hypothesis import strategies as st
from refit_backends.reshard import Reshard

from refit_sdk.box import Box
from refit_sdk.dtypes import wire_dtype
from refit_sdk.plan import Plan, make_plan
from refit_sdk.program import Message, Piece, Window
from refit_sdk.settings import Settings
from refit_sdk.tensor import TensorSpec
from refit_sdk.topology import Topology
from refit_sdk.world import Manifest, Part, Region, Seat, World

ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1}


def part(
    name: str, shape: tuple[int, ...], *boxes: Box, dtype: str = "bfloat16", members: Box | None = None, **region: Any
) -> Part:
    """A part of boxes of one dtype. `members` default to those that the boxes span."""
    stacked = name.count("{}")
    spans = [members] if members is not None else sorted({box.split_dims(stacked)[0] for box in boxes})
    return Part(TensorSpec(name, shape, spans), [Region(box, dtype, **region) for box in boxes])


def whole(name: str, *shape: int, dtype: str = "bfloat16", layers: tuple[int, int] = (0, 2), **region: Any) -> Part:
    """A part that holds all of its tensors."""
    members = Box([layers[0]] * name.count("{}"), [layers[1]] * name.count("{}"))
    return part(name, shape, members.concat(Box.whole(shape)), dtype=dtype, members=members, **region)


def rows(name: str, shape: tuple[int, ...], start: int, stop: int, **more: Any) -> Part:
    """A part that holds some rows of one tensor."""
    return part(name, shape, Box.whole(shape).narrow(0, start, stop), **more)


def world(sources: list[list[Part] | Manifest], **engines: list[list[Part] | Manifest]) -> World:
    """A world of source ranks and of engines' ranks, each a process of its own, in this order."""
    sides = [("source", "", rank, parts) for rank, parts in enumerate(sources)]
    sides += [("target", name, rank, parts) for name, ranks in engines.items() for rank, parts in enumerate(ranks)]
    seats = [Seat(side, engine, rank, process) for process, (side, engine, rank, _) in enumerate(sides)]
    manifests = tuple(parts if isinstance(parts, Manifest) else Manifest(parts) for *_, parts in sides)
    return World(0, tuple(seats), manifests, tuple(range(len(manifests))))


def plan_of(
    world: World, *, topology: Topology | None = None, transports: dict[str, Any] | None = None, **settings: Any
) -> Plan:
    """The plan of a world."""
    return make_plan(
        world,
        settings=Settings(**settings),
        transports={"reshard": Reshard()} | (transports or {}),
        topology=topology or Topology.single(world.num_processes),
    )


def cells(draw: st.DrawFn, extents: Box, most: int = 3) -> list[Box]:
    """A partition of a box by random cuts."""
    cuts = []
    for a, b in zip(extents.start, extents.stop, strict=True):
        inner = draw(st.lists(st.integers(a + 1, b - 1), max_size=most - 1, unique=True)) if b - a > 1 else []
        bounds = [a, *sorted(inner), b]
        cuts.append(list(pairwise(bounds)))
    return [Box([a for a, _ in cell], [b for _, b in cell]) for cell in product(*cuts)]


@frozen
class Drawn:
    """A family as drawn: the members of both sides, and what each rank holds of it."""

    name: str
    shape: tuple[int, ...]
    source: dict[int, set[Box]]
    target: dict[tuple[str, int], set[Box]]
    members: tuple[Box, Box]
    dtypes: tuple[str, str]


def _hand_out(draw: st.DrawFn, boxes: list[Box], ranks: list[Any]) -> dict[Any, set[Box]]:
    held: dict[Any, set[Box]] = defaultdict(set)
    for box in boxes:
        for rank in draw(st.sets(st.sampled_from(ranks), min_size=1, max_size=2)):
            held[rank].add(box)
    return held


def _family(draw: st.DrawFn, number: int, sources: list[int], engines: dict[str, int]) -> Drawn:
    stacked = draw(st.integers(0, 2))
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=2)))
    name = ".".join((f"f{number}", *["{}"] * stacked, "w"))
    first = draw(st.integers(0, 3))
    wanted = Box([first] * stacked, [first + draw(st.integers(1, 3)) for _ in range(stacked)])
    known = Box(
        [draw(st.integers(0, first)) for _ in range(stacked)], [b + draw(st.integers(0, 1)) for b in wanted.stop]
    )
    source: dict[int, set[Box]] = defaultdict(set)
    for _ in range(draw(st.integers(1, 2))):
        for rank, boxes in _hand_out(draw, cells(draw, known.concat(Box.whole(shape))), sources).items():
            source[rank] |= boxes
    target: dict[tuple[str, int], set[Box]] = defaultdict(set)
    for engine, size in engines.items():
        ranks = [(engine, rank) for rank in range(size)]
        for _ in range(draw(st.integers(1, 2))):
            for rank, boxes in _hand_out(draw, cells(draw, wanted.concat(Box.whole(shape))), ranks).items():
                target[rank] |= boxes
    dtypes = draw(
        st.sampled_from([("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")])
    )
    return Drawn(name, shape, source, target, (known, wanted), dtypes)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Worlds with replicas, uneven and overlapping cuts, one or two engines, processes on both sides, and stacked
    families of which the sides have different members."""
    sources = list(range(draw(st.integers(1, 4))))
    engines = {f"e{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(1, 2)))}
    families = [_family(draw, number, sources, engines) for number in range(draw(st.integers(1, 3)))]
    places: list[tuple[str, str, int]] = [("source", "", rank) for rank in sources]
    places += [("target", engine, rank) for engine, size in engines.items() for rank in range(size)]
    free = list(draw(st.permutations(range(len(places)))))
    numbers = {place: free.pop() for place in places}
    for place in places:
        together = [numbers["source", "", rank] for rank in sources]
        if place[0] == "target" and draw(st.integers(0, 2)) == 0:
            taken = {numbers[other] for other in places if other[1] == place[1]}
            spare = [process for process in together if process not in taken]
            numbers[place] = draw(st.sampled_from(spare)) if spare else numbers[place]
    manifests = []
    for side, engine, rank in places:
        parts = []
        for family in families:
            boxes = family.source.get(rank, set()) if side == "source" else family.target.get((engine, rank), set())
            dtype, members = (family.dtypes[side == "target"], family.members[side == "target"])
            parts.append(Part(TensorSpec(family.name, family.shape, [members]), [Region(box, dtype) for box in boxes]))
        manifests.append(Manifest(parts))
    seats = tuple(Seat(side, engine, rank, numbers[side, engine, rank]) for side, engine, rank in places)
    return World(3, seats, tuple(manifests), tuple(range(len(manifests))))


def settings() -> st.SearchStrategy[dict[str, Any]]:
    """Window limits from cramped to roomy. Members that only sources have are ignored."""
    return st.fixed_dictionaries(
        {
            "window_bytes": st.sampled_from([4, 16, 100, 1 << 20]),
            "window_ops": st.sampled_from([1, 2, 3, 512]),
            "coalesce_bytes": st.sampled_from([0, 6, 40, 1 << 20]),
            "ignore": st.just(("*",)),
        }
    )


Where = dict[str, np.ndarray]


def storage(world: World, side: str) -> dict[tuple[int, str], Where]:
    """By (process, engine), by full name: whether a rank has each element. Over plain indices of whole tensors."""
    found: dict[tuple[int, str], Where] = {}
    for seat in world.of_side(side):  # type: ignore[arg-type]
        mine: Where = found.setdefault((seat.process, seat.engine), {})
        for held in world.manifest(seat).parts:
            for region in held.regions:
                members, inner = region.box.split_dims(held.spec.num_stacked)
                for index in members.points():
                    where = mine.setdefault(held.spec.member_name(index), np.zeros(held.spec.shape, bool))
                    where[inner.slices()] = True
    return found


def dtypes(world: World, side: str) -> dict[str, str]:
    """The dtype of each name on a side (drawn worlds have one)."""
    return {
        held.spec.member_name(index): region.dtype
        for manifest in (world.manifest(seat) for seat in world.of_side(side))  # type: ignore[arg-type]
        for held in manifest.parts
        for region in held.regions
        for index in region.box.split_dims(held.spec.num_stacked)[0].points()
    }


def play(plan: Plan) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """Run all programs, and count how often each element arrives at each (process, engine).

    A process posts what a window has, and goes on when all its peers have posted theirs. `AssertionError` if two ends
    don't have the same messages, a sender hasn't got what it sends by then, or nobody can go on.
    """
    programs = {process: plan.program(process).windows for process in range(plan.world.num_processes)}
    _assert_ends_agree(programs)
    have = storage(plan.world, "source")
    arrived = _zeros(storage(plan.world, "target"), 0)
    when: Any = defaultdict(dict)
    at = dict.fromkeys(programs, 0)
    while waiting := [process for process in programs if at[process] < len(programs[process])]:
        posted = {p: programs[p][at[p]].number if p in waiting else 1 << 30 for p in programs}
        ready = [p for p in waiting if all(posted[peer] >= posted[p] for peer in _peers(programs[p][at[p]]))]
        assert ready, f"nobody can go on: {posted}"
        for process in ready:
            _land(process, programs[process][at[process]], have, arrived, when)
            at[process] += 1
    return arrived


def _shape(places: Any, name: str) -> tuple[int, ...]:
    found: tuple[int, ...] = next(named[name].shape for named in places.values() if name in named)
    return found


def _note(when: Any, piece: Piece, shape: tuple[int, ...], window: int) -> None:
    """Note since when a process has a piece."""
    since = when.setdefault(piece.name, np.full(shape, 1 << 30))
    since[piece.box.slices()] = np.minimum(since[piece.box.slices()], window)


def _zeros(places: Any, value: int) -> Any:
    return {
        place: {name: np.full(where.shape, value) for name, where in named.items()} for place, named in places.items()
    }


def _peers(window: Window) -> set[int]:
    return {message.peer for message in (*window.sends, *window.recvs)}


def _assert_ends_agree(programs: dict[int, tuple[Window, ...]]) -> None:
    """Of each directed pair, engine and window: the same messages, in the same order."""
    ends: tuple[Any, Any] = (defaultdict(list), defaultdict(list))
    for process, windows in programs.items():
        assert [window.number for window in windows] == sorted({window.number for window in windows})
        for window in windows:
            for message in window.sends:
                assert message.peer != process
                ends[0][process, message.peer, message.engine, window.number].append(message.pieces)
            for message in window.recvs:
                ends[1][message.peer, process, message.engine, window.number].append(message.pieces)
    assert ends[0] == ends[1]


def _land(process: int, window: Window, have: Any, arrived: Any, when: Any) -> None:
    for message in window.recvs:
        for piece in message.pieces:
            slices = piece.box.slices()
            held = have.get((message.peer, ""), {}).get(piece.name)
            relayed = when[message.peer, message.engine].get(piece.name)
            has = held[slices] if held is not None else np.zeros(piece.box.shape, bool)
            got = relayed[slices] < window.number if relayed is not None else np.zeros(piece.box.shape, bool)
            assert (has | got).all(), f"{message.peer} sends what it hasn't got: {piece}"
            if piece.own:
                arrived[process, message.engine][piece.name][slices] += 1
            _note(when[process, message.engine], piece, _shape(have, piece.name), window.number)
    for engine, piece in window.copies:
        assert have[process, ""][piece.name][piece.box.slices()].all(), f"copies what it hasn't got: {piece}"
        arrived[process, engine][piece.name][piece.box.slices()] += 1


def messages(plan: Plan) -> list[tuple[int, int, Message]]:
    """All messages sent, as (process, window number, message)."""
    return [
        (process, window.number, message)
        for process in range(plan.world.num_processes)
        for window in plan.program(process).windows
        for message in window.sends
    ]


def piece_nbytes(world: World, piece: Piece) -> int:
    """Bytes of a piece, by the dtypes of both sides."""
    wire = wire_dtype(dtypes(world, "source")[piece.name], dtypes(world, "target")[piece.name])
    return int(np.prod(piece.box.shape, dtype=int)) * ITEMSIZE[wire]
