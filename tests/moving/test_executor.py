"""Programs over the in-process fabric: every element arrives, nothing else is written, failures stay where they are."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from attrs import frozen
from moving_support import (
    POISON,
    HandClock,
    Leg,
    Table,
    bits,
    connect,
    executors,
    fragment,
    poisoned,
    programs,
    run,
    threads,
    truth,
)
from refit_backends.inproc import InprocFabric

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.dtypes import ITEMSIZE
from refit_sdk.errors import LayoutError, RefitError
from refit_sdk.executor import Executor
from refit_sdk.fabric import Deadline, FabricError, Group
from refit_sdk.program import Piece, Program
from refit_sdk.views import Views

CPU = frozenset({"cpu"})
ROWS, COLUMNS = 7, 6
WHOLE = Box.whole((ROWS, COLUMNS))
TOP, BOTTOM = Box((0, 0), (4, COLUMNS)), Box((4, 0), (ROWS, COLUMNS))
LEFT, RIGHT = Box((0, 0), (ROWS, 2)), Box((0, 2), (ROWS, COLUMNS))


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def transposed(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(reversed(shape)), dtype=dtype).permute(*reversed(range(len(shape))))


def spaced(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Every other element of a larger storage, with one before and one after."""
    return torch.empty([2 * extent + 1 for extent in shape], dtype=dtype)[(slice(1, None, 2),) * len(shape)]


def padded(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Rows of a buffer that has room for more columns, as an uneven gather leaves them."""
    return torch.empty([*shape[:-1], shape[-1] + 3], dtype=dtype).narrow(-1, 0, shape[-1])


MAKERS: list[Callable[[Sequence[int], torch.dtype], torch.Tensor]] = [contiguous, transposed, spaced, padded]


def storage_of(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def holding(name: str, whole: torch.Tensor, box: Box, view: torch.Tensor) -> Fragment:
    """A source fragment with the true values."""
    view.copy_(whole[box.slices()])
    return fragment(name, tuple(whole.shape), box, view)


def wanting(name: str, shape: Sequence[int], box: Box, view: torch.Tensor) -> Fragment:
    """A target fragment in poisoned storage."""
    storage_of(view).fill_(POISON if view.dtype != torch.bool else 1)
    return fragment(name, tuple(shape), box, poisoned(view))


def guard_is_whole(view: torch.Tensor) -> bool:
    """Whether storage around a view still has the poison: the view is poisoned again and then all of it must be."""
    poisoned(view)
    return bool((storage_of(view) == (POISON if view.dtype != torch.bool else 1)).all())


def crossing(dtype: str, name: str = "w") -> list[Leg]:
    """Rows on processes 0 and 1, columns wanted on 2 and 3."""
    return [
        Leg(src, dst, Piece(name, part, dtype))
        for src, held in ((0, TOP), (1, BOTTOM))
        for dst, want in ((2, LEFT), (3, RIGHT))
        if (part := held.intersect(want)) is not None
    ]


def check_crossing(dtype: str, source: Any = contiguous, target: Any = contiguous) -> None:
    kind = getattr(torch, dtype)
    whole = truth("w", (ROWS, COLUMNS), kind)
    sources = {p: [holding("w", whole, box, source(box.shape, kind))] for p, box in ((0, TOP), (1, BOTTOM))}
    targets = {p: [wanting("w", WHOLE.stop, box, target(box.shape, kind))] for p, box in ((2, LEFT), (3, RIGHT))}
    moved = run(executors(InprocFabric(), crossing(dtype), sources, targets))
    for process, box in ((2, LEFT), (3, RIGHT)):
        view = targets[process][0].view
        assert bits(view) == bits(whole[box.slices()])
        assert guard_is_whole(view)
        assert moved[process].arrived == {"e": box.size * kind.itemsize}
        assert moved[process].mutated == {"e"}
    assert sum(moved[p].sent["e"] for p in (0, 1)) == WHOLE.size * kind.itemsize
    assert not any(each.failed or each.lost for each in moved.values())


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_dtype_from_rows_to_columns(dtype: str) -> None:
    check_crossing(dtype, target=transposed)


@pytest.mark.parametrize("target", MAKERS, ids=lambda maker: f"to-{maker.__name__}")
@pytest.mark.parametrize("source", MAKERS, ids=lambda maker: f"from-{maker.__name__}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_views_of_any_strides(dtype: str, source: Any, target: Any) -> None:
    check_crossing(dtype, source, target)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("maker", [contiguous, spaced], ids=lambda maker: maker.__name__)
def test_any_number_of_dims_and_none(shape: tuple[int, ...], maker: Any) -> None:
    whole, box = truth("w", shape, torch.int64), Box.whole(shape)
    source, target = maker(shape, torch.int64), maker(shape, torch.int64)
    moved = run(
        executors(
            InprocFabric(),
            [Leg(0, 1, Piece("w", box, "int64"))],
            {0: [holding("w", whole, box, source)]},
            {1: [wanting("w", shape, box, target)]},
        )
    )
    assert bits(target) == bits(whole)
    assert moved[1].arrived.get("e", 0) == 8 * box.size


def test_several_tensors_in_one_storage() -> None:
    """q, k and v are rows of one buffer at the target, in another order than they travel."""
    dtype, names = torch.bfloat16, {"q": (0, 4), "k": (4, 6), "v": (6, 8)}
    fused = torch.empty(9, 5, dtype=dtype)
    fused.view(torch.uint8).fill_(POISON)
    wholes = {name: truth(name, (stop - start, 5), dtype) for name, (start, stop) in names.items()}
    sources = [holding(name, whole, Box.whole(whole.shape), torch.empty_like(whole)) for name, whole in wholes.items()]
    targets = [
        fragment(name, tuple(wholes[name].shape), Box.whole(wholes[name].shape), fused[start:stop])
        for name, (start, stop) in names.items()
    ]
    legs = [Leg(0, 1, Piece(name, Box.whole(wholes[name].shape), "bfloat16")) for name in ("v", "q", "k")]
    run(executors(InprocFabric(), legs, {0: sources}, {1: targets}))
    assert bits(fused[:8]) == b"".join(bits(wholes[name]) for name in names)
    assert (fused[8:].view(torch.uint8) == POISON).all()


def test_every_copy_at_the_target_is_written_and_one_at_the_source_is_read() -> None:
    whole = truth("w", (4, 3), torch.float32)
    sources = [holding("w", whole, Box.whole((4, 3)), torch.empty(4, 3)) for _ in range(2)]
    places = [torch.empty(4, 3), transposed((4, 3), torch.float32)]
    targets = [wanting("w", (4, 3), Box.whole((4, 3)), place) for place in places]
    made = executors(InprocFabric(), [Leg(0, 1, Piece("w", Box.whole((4, 3)), "float32"))], {0: sources}, {1: targets})
    moved = run(made)
    assert [bits(place) for place in places] == [bits(whole)] * 2
    assert moved[0].sent == moved[1].arrived == {"e": 48}
    assert made[1].buffer_nbytes == 0


def test_a_piece_is_put_together_from_parts_that_overlap() -> None:
    whole = truth("w", (8, 2), torch.float32)
    held = [Box((0, 0), (3, 2)), Box((1, 0), (5, 2)), Box((4, 0), (8, 2))]
    sources = [holding("w", whole, box, torch.empty(box.shape)) for box in held]
    target = torch.empty(6, 2)
    wanted = Box((1, 0), (7, 2))
    run(
        executors(
            InprocFabric(),
            [Leg(0, 1, Piece("w", wanted, "float32"))],
            {0: sources},
            {1: [wanting("w", (8, 2), wanted, target)]},
        )
    )
    assert bits(target) == bits(whole[1:7])


def many_windows(count: int, *, source: Any, target: Any) -> tuple[list[Leg], Any, Any, torch.Tensor, torch.Tensor]:
    whole = truth("w", (count, 300), torch.float32)
    target_view = target((count, 300), torch.float32)
    legs = [Leg(0, 1, Piece("w", Box((i, 0), (i + 1, 300)), "float32"), window=i) for i in range(count)]
    sources = {0: [holding("w", whole, Box.whole(whole.shape), source(whole.shape, torch.float32))]}
    targets = {1: [wanting("w", whole.shape, Box.whole(whole.shape), target_view)]}
    return legs, sources, targets, target_view, whole


class Late:
    """A group whose sends read their bytes as late as a fabric may: when they are waited for."""

    devices = CPU

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.abort, self.close, self.recv = inner.abort, inner.close, inner.recv

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        group = self._inner

        class Work:
            def wait(self, timeout: float) -> int:
                return group.send(buffer, peer=peer).wait(timeout)

        return Work()


@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
def test_windows_do_not_touch_each_other(late: bool) -> None:
    legs, sources, targets, view, whole = many_windows(12, source=transposed, target=transposed)
    ends = connect(InprocFabric(), 2)
    made = {
        process: Executor(
            program,
            sources=Views(sources.get(process, ())),
            targets=Views(targets.get(process, ())),
            groups={"e": Late(ends[process]) if late else ends[process]},
        )
        for process, program in programs(legs).items()
    }
    run(made)
    assert bits(view) == bits(whole)
    assert made[0].buffer_nbytes == 2 * 1200 + 2 * (-1200 % 16)


class Noted:
    """A group that notes what is posted and waited for, in order. The first wait for one that `fails` names raises."""

    devices = CPU

    def __init__(self, *, fails: Mapping[int, BaseException]) -> None:
        self.heard: list[tuple[str, int]] = []
        self.ended: list[int] = []
        self.reason = ""
        self.fails = dict(fails)
        self._posted = 0

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        number, self._posted = self._posted, self._posted + 1
        self.heard.append(("post", number))
        return NotedWork(self, number, buffer.numel())

    def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
        return self.recv(buffer, peer=peer)

    def abort(self, reason: str) -> None:
        self.reason = reason

    def close(self) -> None:
        """Nothing is held."""


@frozen
class NotedWork:
    """A work of `Noted`."""

    group: Noted
    number: int
    nbytes: int

    def wait(self, timeout: float) -> int:
        self.group.heard.append(("wait", self.number))
        if self.number in self.group.fails:
            raise self.group.fails.pop(self.number)
        self.group.ended.append(self.number)
        return self.nbytes


def noted(windows: int, *, fails: Mapping[int, BaseException]) -> tuple[Executor, Noted]:
    """The sender of a message a window."""
    legs, sources, *_ = many_windows(windows, source=contiguous, target=contiguous)
    group = Noted(fails=fails)
    return Executor(programs(legs)[0], sources=Views(sources[0]), targets=None, groups={"e": group}), group


def test_two_windows_are_on_the_way_at_once() -> None:
    made, group = noted(4, fails={})
    made.run(Deadline.after(5))
    assert [f"{verb} {number}" for verb, number in group.heard] == [
        "post 0", "post 1", "wait 0", "post 2", "wait 1", "post 3", "wait 2", "wait 3",
    ]  # fmt: skip


def test_what_is_pending_when_something_is_raised_is_waited_for_and_the_first_error_stands() -> None:
    made, group = noted(4, fails={0: OSError("first"), 1: OSError("second")})
    with pytest.raises(OSError, match="first"):
        made.run(Deadline.after(5))
    assert "first" in group.reason
    assert group.heard == [("post", 0), ("post", 1), ("wait", 0), ("wait", 0), ("wait", 1)]


def test_an_interrupt_leaves_nothing_pending() -> None:
    made, group = noted(4, fails={1: KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        made.run(Deadline.after(5))
    assert group.ended == [0, 1, 2]


def test_a_process_on_both_sides_copies_its_own() -> None:
    whole = truth("w", (ROWS, COLUMNS), torch.float32)
    sources = {p: [holding("w", whole, box, torch.empty(box.shape))] for p, box in ((0, TOP), (1, BOTTOM))}
    views = {p: transposed(box.shape, torch.float32) for p, box in ((1, LEFT), (2, RIGHT))}
    targets = {p: [wanting("w", WHOLE.stop, box, views[p])] for p, box in ((1, LEFT), (2, RIGHT))}
    legs = [Leg(leg.src, leg.dst - 1, leg.piece) for leg in crossing("float32")]
    moved = run(executors(InprocFabric(), legs, sources, targets))
    assert bits(views[1]) == bits(whole[LEFT.slices()])
    assert bits(views[2]) == bits(whole[RIGHT.slices()])
    assert moved[1].arrived == {"e": 4 * 4 * 2}
    assert moved[1].mutated == {"e"}


def test_two_engines_of_different_layout() -> None:
    whole = truth("w", (ROWS, COLUMNS), torch.float32)
    views = {1: torch.empty(ROWS, COLUMNS), 2: transposed((ROWS, 2), torch.bfloat16)}
    targets = {
        1: [wanting("w", WHOLE.stop, WHOLE, views[1])],
        2: [wanting("w", WHOLE.stop, LEFT, views[2])],
    }
    legs = [Leg(0, 1, Piece("w", WHOLE, "float32"), "big"), Leg(0, 2, Piece("w", LEFT, "bfloat16"), "small")]
    moved = run(executors(InprocFabric(), legs, {0: [holding("w", whole, WHOLE, torch.empty(ROWS, COLUMNS))]}, targets))
    assert bits(views[1]) == bits(whole)
    assert bits(views[2]) == bits(whole[:, :2].to(torch.bfloat16))
    assert moved[0].sent == {"big": 4 * WHOLE.size, "small": 2 * LEFT.size}


@pytest.mark.parametrize("local", [False, True], ids=["sent", "copied"])
@pytest.mark.parametrize(("held", "wire", "wanted"), [
    ("float32", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "float32"), ("float32", "float16", "float16"),
    ("float32", "float8_e5m2", "float8_e5m2"), ("float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
])  # fmt: skip
def test_casts_are_those_of_numpy(held: str, wire: str, wanted: str, local: bool) -> None:
    values = torch.linspace(-3, 3, 24).reshape(4, 6).to(getattr(torch, held))
    target = transposed((4, 6), getattr(torch, wanted))
    box, there = Box.whole((4, 6)), 0 if local else 1
    moved = run(
        executors(
            InprocFabric(),
            [Leg(0, there, Piece("w", box, wire))],
            {0: [fragment("w", (4, 6), box, values)]},
            {there: [wanting("w", (4, 6), box, target)]},
        )
    )
    as_numpy = np.frombuffer(bits(values), getattr(ml_dtypes, held, held)).reshape(4, 6)
    assert bits(target) == as_numpy.astype(getattr(ml_dtypes, wanted, wanted)).tobytes()
    assert moved[0].sent.get("e", 0) == (0 if local else 24 * ITEMSIZE[wire])


@pytest.mark.parametrize("local", [False, True], ids=["sent", "copied"])
def test_an_overflow_fails_its_engine_alone_and_nothing_of_it_is_written(local: bool) -> None:
    box, there = Box.whole((4, 4)), 0 if local else 1
    sound, grown = torch.ones(4, 4), torch.ones(4, 4)
    grown[2, 3] = 1e9
    targets = {name: torch.empty(4, 4, dtype=dtype) for name, dtype in (("h", torch.float16), ("f", torch.float32))}
    sources = [fragment("sound", (4, 4), box, sound), fragment("grown", (4, 4), box, grown)]
    legs = [
        Leg(0, there, Piece("sound", box, "float16"), "half"),
        Leg(0, there, Piece("grown", box, "float16"), "half"),
        Leg(0, 2, Piece("grown", box, "float32"), "full"),
    ]
    wanted = [wanting(name, (4, 4), box, torch.empty(4, 4, dtype=torch.float16)) for name in ("sound", "grown")]
    moved = run(
        executors(InprocFabric(), legs, {0: sources}, {there: wanted, 2: [wanting("grown", (4, 4), box, targets["f"])]})
    )
    assert moved[0].failed.keys() == {"half"}
    assert moved[0].failed["half"].startswith("grown: a finite value of float32 became infinite as float16")
    assert all((each.view.view(torch.uint8) == POISON).all() for each in wanted)
    assert moved[there].mutated == set()
    assert bits(targets["f"]) == bits(grown)
    assert moved[2].failed == {}
    if not local:
        assert moved[1].lost == {"half": 0}


def two_engines(
    windows: int, *, target: Any = transposed
) -> tuple[dict[int, Executor], dict[int, torch.Tensor], torch.Tensor]:
    """Process 0 sends `windows` rows, one a window, to engine a on process 1 and to b on process 2."""
    whole, box = truth("w", (windows, 50), torch.float32), Box.whole((windows, 50))
    views = {p: target((windows, 50), torch.float32) for p in (1, 2)}
    legs = [
        Leg(0, dst, Piece("w", Box((i, 0), (i + 1, 50)), "float32"), engine, window=i)
        for i in range(windows)
        for dst, engine in ((1, "a"), (2, "b"))
    ]
    made = executors(
        InprocFabric(),
        legs,
        {0: [holding("w", whole, box, torch.empty(windows, 50))]},
        {p: [wanting("w", (windows, 50), box, views[p])] for p in (1, 2)},
    )
    return made, views, whole


def test_dropping_an_engine_from_another_thread_ends_its_waits_and_leaves_the_others() -> None:
    made, views, whole = two_engines(3)

    def work(index: int) -> Any:
        if index == 3:
            return made[0].drop("a", "engine a was paused")
        return made[index].run(Deadline.after(3600)) if index != 1 else None

    results = threads(4, work)
    assert results[0].failed == {"a": "engine a was paused"}
    assert results[0].lost == {}
    assert bits(views[2]) == bits(whole)
    assert results[2].failed == {}
    again = threads(3, lambda i: made[i].run(Deadline.after(3600)))
    assert again[0].failed == {"a": "engine a was paused"}
    assert again[0].sent == {"b": 600}
    assert again[1].lost == {"a": 0}
    assert again[1].mutated == set()


def test_the_first_cause_is_kept() -> None:
    made, _, _ = two_engines(1)
    made[1].drop("a", "killed")
    moved = run({0: made[0], 2: made[2]})
    made[0].drop("a", "the rendezvous says so too")
    again = run({0: made[0], 2: made[2]})
    assert again[0].failed == moved[0].failed
    assert again[0].lost == moved[0].lost == {"a": 1}


def test_a_lost_process_drops_its_engine_and_is_named() -> None:
    made, views, whole = two_engines(3)
    made[1].drop("a", "killed")
    moved = run({0: made[0], 2: made[2]})
    assert moved[0].lost == {"a": 1}
    assert "process 1" in moved[0].failed["a"]
    assert bits(views[2]) == bits(whole)
    assert moved[0].sent == {"b": 600}


def test_a_process_that_never_comes_is_named_at_the_deadline_of_the_tests_clock() -> None:
    clock = HandClock()
    whole, box = truth("w", (4,), torch.float32), Box.whole((4,))
    made = executors(
        InprocFabric(clock=clock),
        [Leg(0, 1, Piece("w", box, "float32"))],
        {0: [holding("w", whole, box, torch.empty(4))]},
        {1: [wanting("w", (4,), box, torch.empty(4))]},
    )

    def work(index: int) -> Any:
        if index:
            return made[1].run(Deadline.after(60, clock=clock))
        clock.until_waiting(1)
        return clock.advance(60)

    moved = threads(2, work)[1]
    assert moved.lost == {"e": 0}
    assert "60 s for process 0 to send 16 bytes" in moved.failed["e"]


@pytest.mark.parametrize(("target", "mutated"), [(contiguous, {"a"}), (spaced, set())], ids=["live", "buffered"])
def test_mutated_counts_what_may_have_been_written(target: Any, mutated: set[str]) -> None:
    """A receive into live storage counts from posting; one into a window buffer from unpacking."""
    posted = threading.Event()

    class Watched:
        devices = CPU

        def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
            work = group.recv(buffer, peer=peer)
            posted.set()
            return work

        def abort(self, reason: str) -> None:
            group.abort(reason)

    made = two_engines(1, target=target)[0]
    group = made[1]._groups["a"]
    made[1]._groups["a"] = Watched()

    def work(index: int) -> Any:
        if not index:
            assert posted.wait(10)
            return made[0].drop("a", "killed")
        return made[1].run(Deadline.after(3600))

    moved = threads(2, work)[1]
    assert moved.failed.keys() == {"a"}
    assert moved.arrived.get("a", 0) == 0
    assert moved.mutated == mutated


def test_an_engine_lost_after_some_windows_is_mutated_as_far_as_it_was_unpacked() -> None:
    """The sender leaves after two of four windows; the third never comes."""
    legs, sources, targets, view, whole = many_windows(4, source=contiguous, target=transposed)
    made = executors(InprocFabric(), legs, sources, targets)
    group, sent = made[0]._groups["e"], []

    class Dying:
        devices = CPU

        def send(self, buffer: torch.Tensor, *, peer: int) -> Any:
            sent.append(peer)
            if len(sent) == 3:
                raise FabricError("the cable was cut", peer=peer)
            return group.send(buffer, peer=peer)

        def abort(self, reason: str) -> None:
            group.abort(reason)

    made[0]._groups["e"] = Dying()
    moved = run(made)
    assert moved[0].failed == {"e": "the cable was cut"}
    assert moved[0].lost == {"e": 1}
    assert moved[0].sent == moved[1].arrived == {"e": 2400}
    assert moved[1].mutated == {"e"}
    assert bits(view[0]) == bits(whole[0])
    assert (view[2:].contiguous().view(torch.uint8) == POISON).all()


def test_what_cannot_be_bound_raises_and_lets_the_peers_go() -> None:
    box = Box.whole((4,))
    made = executors(
        InprocFabric(),
        [Leg(0, 1, Piece("w", box, "float32"))],
        {0: [fragment("v", (4,), box, torch.empty(4))]},
        {1: [wanting("w", (4,), box, torch.empty(4))]},
    )
    moved = run(made)
    assert isinstance(moved[0], LayoutError)
    assert moved[1].lost == {"e": 0}
    assert "process 0 failed: LayoutError" in moved[1].failed["e"]


def test_a_program_needs_a_group_for_each_engine() -> None:
    program = programs([Leg(0, 1, Piece("w", Box.whole((4,)), "float32"), "e")])[0]
    with pytest.raises(RefitError, match=r"engines \['e'\], groups are for \['f'\]"):
        Executor(program, sources=None, targets=None, groups={"f": connect(InprocFabric(), 1)[0]})


def test_parameters_and_inference_tensors_are_written_in_place() -> None:
    whole, box = truth("w", (4, 3), torch.float32), Box.whole((4, 3))
    with torch.inference_mode():
        inference = transposed((4, 3), torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    targets = {1: [fragment("w", (4, 3), box, inference)], 2: [fragment("w", (4, 3), box, parameter.t())]}
    source = torch.nn.Parameter(torch.empty(3, 4))
    with torch.no_grad():
        source.t().copy_(whole)
    legs = [Leg(0, dst, Piece("w", box, "float32")) for dst in (1, 2)]
    run(executors(InprocFabric(), legs, {0: [fragment("w", (4, 3), box, source.t())]}, targets))
    assert bits(inference) == bits(parameter.t()) == bits(whole)
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def buffers_of(made: dict[int, Executor]) -> list[int]:
    bound = [executor._bound for executor in made.values()]
    return [
        transfer.buffer.data_ptr()
        for each in bound
        if each is not None
        for window in each.windows
        for transfer in (*window.recvs, *window.sends)
    ]


def test_ten_runs_allocate_nothing_that_grows_and_change_no_address() -> None:
    legs, sources, targets, view, whole = many_windows(6, source=transposed, target=transposed)
    made = executors(InprocFabric(), legs, sources, targets)
    run(made)
    addresses, sizes = buffers_of(made), []
    source = sources[0][0].view
    tracemalloc.start()
    try:
        for turn in range(10):
            source.copy_(whole + turn)
            run(made)
            assert bits(view) == bits(whole + turn)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            assert buffers_of(made) == addresses
    finally:
        tracemalloc.stop()
    assert max(sizes[2:]) - sizes[1] < 4096, sizes


def test_runs_after_the_first_look_up_no_name() -> None:
    legs, sources, targets, view, whole = many_windows(3, source=contiguous, target=contiguous)
    made = executors(InprocFabric(), legs, sources, targets)
    run(made)
    for executor in made.values():
        executor._sources = executor._targets = None
    poisoned(view)
    run(made)
    assert bits(view) == bits(whole)
    assert [executor.buffer_nbytes for executor in made.values()] == [0, 0]


def test_release_frees_the_window_buffers_and_the_next_run_makes_new_ones() -> None:
    legs, sources, targets, view, whole = many_windows(3, source=transposed, target=transposed)
    made = executors(InprocFabric(), legs, sources, targets)
    run(made)
    held = made[0].buffer_nbytes
    assert held
    for executor in made.values():
        executor.release()
    assert made[0].buffer_nbytes == 0
    poisoned(view)
    run(made)
    assert bits(view) == bits(whole)
    assert made[0].buffer_nbytes == held


def test_seconds_are_of_the_three_stages() -> None:
    legs, sources, targets, _, _ = many_windows(3, source=transposed, target=transposed)
    moved = run(executors(InprocFabric(), legs, sources, targets))
    assert all(set(each.seconds) == {"pack", "move", "unpack"} for each in moved.values())
    assert moved[0].seconds["pack"] > 0
    assert moved[1].seconds["unpack"] > 0


def test_a_process_without_windows_has_nothing_to_do() -> None:
    (group,) = connect(InprocFabric(), 1, store=Table())
    moved = Executor(Program(0, ()), sources=None, targets=None, groups={"e": group}).run(Deadline.after(1))
    assert (moved.sent, moved.arrived, moved.failed, moved.mutated) == ({}, {}, {}, frozenset())
