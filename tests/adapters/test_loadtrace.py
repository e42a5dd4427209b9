"""A loader's trace, against the loader itself: coordinates that were really loaded, element for element."""

import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_adapters._strided import Copy, Unfollowed, boxes, chained
from refit_adapters.loadtrace import Trace, fragments, trace

from refit_sdk.errors import LayoutError

Weights = Iterator[tuple[str, torch.Tensor]]
Into = Mapping[str, torch.Tensor]
Loader = Callable[[Weights, Into], None]


def coordinates(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    made, first = {}, 1
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        made[name] = torch.arange(first, first + size, dtype=torch.float32).view(shape)
        first += size
    return made


def traced(loader: Loader, shapes: Mapping[str, tuple[int, ...]], into: Mapping[str, tuple[int, ...]]) -> Trace:
    twins = {name: torch.empty(shape, device="meta") for name, shape in into.items()}
    checkpoint = {name: (shape, torch.float32) for name, shape in shapes.items()}
    return trace(lambda weights: loader(weights, twins), checkpoint=checkpoint, into=twins)


def differences(
    loader: Loader, shapes: Mapping[str, tuple[int, ...]], into: Mapping[str, tuple[int, ...]]
) -> tuple[Trace, list[str]]:
    """The trace, and destinations that writing what it says leaves otherwise than the loader does."""
    found = traced(loader, shapes, into)
    numbers = coordinates(shapes)
    truth, mine = ({name: torch.full(shape, -1.0) for name, shape in into.items()} for _ in range(2))
    for fragment in fragments(found, mine):
        fragment.view.copy_(numbers[fragment.name][fragment.box.slices()])
    for constant in found.constants:
        mine[constant.into].as_strided(constant.shape, constant.strides, constant.offset).copy_(
            torch.as_tensor(constant.value)
        )
    loader(((name, tensor.clone()) for name, tensor in numbers.items()), truth)
    return found, [name for name in into if not torch.equal(truth[name], mine[name])]


def qkv(weights: Weights, into: Into) -> None:
    """Rank 1 of 2, one kv head for both ranks."""
    for name, weight in weights:
        at, shard = {"q": (0, weight.chunk(2)[1]), "k": (8, weight), "v": (12, weight)}[name]
        into["qkv"].narrow(0, at, shard.shape[0]).copy_(shard)


def load_experts(weights: Weights, into: Into) -> None:
    for name, weight in weights:
        _, number, part = name.split(".")
        rows = weight.narrow(0, 2, 2) if part != "down" else weight.narrow(1, 2, 2)
        target = {"gate": into["w13"][:, :2], "up": into["w13"][:, 2:], "down": into["w2"]}[part]
        target[int(number)].copy_(rows)


def fused_on_disk(weights: Weights, into: Into) -> None:
    """Stacked and transposed in the checkpoint, and cut there."""
    for _, weight in weights:
        into["w"].copy_(weight[:, :, 4:8].permute(0, 2, 1).contiguous())


def joined(weights: Weights, into: Into) -> None:
    into["w"].copy_(torch.cat([weight.t() for _, weight in weights], dim=1).reshape(2, 3, 8)[:, 1:].flatten(0, 1))


def stacked(weights: Weights, into: Into) -> None:
    into["w"].copy_(torch.stack([weight for _, weight in weights], dim=1))


def grouped_rows(weights: Weights, into: Into) -> None:
    """Rows of two groups, dealt out one after another."""
    for _, weight in weights:
        into["w"].copy_(weight.view(2, 4, 3).transpose(0, 1).reshape(8, 3))


def picked(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        into["w"].copy_(weight[torch.tensor([4, 5, 0, 1, 7])])


def every_other(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        into["w"][:4].copy_(weight[::2])
        into["w"][4:].copy_(weight[1::2])


def padded_vocabulary(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        into["w"][: weight.shape[0]].copy_(weight)
        into["w"][weight.shape[0] :].fill_(0)


def one_buffer_for_all(weights: Weights, into: Into) -> None:
    buffer = None
    for number, (_, weight) in enumerate(weights):
        buffer = torch.empty_like(weight) if buffer is None else buffer
        buffer.copy_(weight)
        into["w"][number].copy_(buffer.view(4, 3)[1:])


def silenced(weights: Weights, into: Into) -> None:
    """A bias that only the first rank adds."""
    for _, weight in weights:
        into["w"].copy_(weight.zero_())


def by_way_of_float64(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        into["w"].copy_(weight.to(torch.float64)[1:])


CASES: dict[str, tuple[Loader, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "qkv": (qkv, {"q": (16, 3), "k": (4, 3), "v": (4, 3)}, {"qkv": (16, 3)}),
    "experts": (
        load_experts,
        {f"e.{n}.{part}": (4, 6) if part != "down" else (6, 4) for n in range(3) for part in ("gate", "up", "down")},
        {"w13": (3, 4, 6), "w2": (3, 6, 2)},
    ),
    "fused on disk": (fused_on_disk, {"w": (2, 3, 8)}, {"w": (2, 4, 3)}),
    "joined": (joined, {"a": (4, 6), "b": (4, 6)}, {"w": (4, 8)}),
    "stacked": (stacked, {"a": (2, 3), "b": (2, 3)}, {"w": (2, 2, 3)}),
    "grouped rows": (grouped_rows, {"w": (8, 3)}, {"w": (8, 3)}),
    "picked": (picked, {"w": (8, 3)}, {"w": (5, 3)}),
    "every other": (every_other, {"w": (8, 3)}, {"w": (8, 3)}),
    "padded vocabulary": (padded_vocabulary, {"w": (5, 3)}, {"w": (8, 3)}),
    "one buffer for all": (one_buffer_for_all, {"a": (12,), "b": (12,)}, {"w": (2, 3, 3)}),
    "silenced": (silenced, {"w": (4,)}, {"w": (4,)}),
    "by way of float64": (by_way_of_float64, {"w": (4, 2)}, {"w": (3, 2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_trace_is_what_the_loader_does(case: str) -> None:
    found, wrong = differences(*CASES[case])
    assert wrong == []
    assert found.groups == ()


def test_a_value_that_is_computed_lands_with_all_that_went_in() -> None:
    def load(weights: Weights, into: Into) -> None:
        given = dict(weights)
        into["a"].copy_(-torch.exp(given["a"]))
        into["sum"].copy_(given["b"] + given["c"])
        into["c"].copy_(given["c"])
        into["plain"].copy_(given["plain"])

    shapes = dict.fromkeys(("a", "b", "c", "plain"), (4,))
    found = traced(load, shapes, dict.fromkeys(("a", "sum", "c", "plain"), (4,)))
    assert [(group.names, group.into) for group in found.groups] == [(("a",), ("a",)), (("b", "c"), ("sum",))]
    assert "aten.neg" in found.groups[0].reason
    assert [landing.name for landing in found.landings] == ["plain"]
    assert found.elements == (4, 12)


def test_values_that_go_through_a_narrower_dtype_land() -> None:
    def load(weights: Weights, into: Into) -> None:
        for _, weight in weights:
            into["w"].copy_(weight.to(torch.bfloat16))

    (group,) = traced(load, {"w": (4,)}, {"w": (4,)}).groups
    assert group.reason == "its values go through torch.bfloat16 on their way from torch.float32 to torch.float32"


def test_a_constant_that_is_partly_written_over_lands_with_what_is_over_it() -> None:
    def load(weights: Weights, into: Into) -> None:
        into["w"].zero_()
        for _, weight in weights:
            into["w"][1:3].copy_(weight)

    found = traced(load, {"w": (2, 3)}, {"w": (4, 3)})
    assert [group.names for group in found.groups] == [("w",)]
    assert found.constants == ()


def test_what_the_loader_leaves_out_and_what_gets_nothing_is_told() -> None:
    def load(weights: Weights, into: Into) -> None:
        for name, weight in weights:
            if name == "w":
                into["w"].copy_(weight)

    found = traced(load, {"w": (2,), "inv_freq": (2,)}, {"w": (2,), "scale": (1,)})
    assert found.unused == ("inv_freq",)
    assert found.empty == ("scale",)


def read_a_value(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        into["w"].fill_(weight.max().item())


def rebind(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        into["w"].data = weight


def fail(weights: Weights, into: Into) -> None:
    for name, weight in weights:
        into[name].copy_(weight)


def strand(weights: Weights, into: Into) -> None:
    for _, weight in weights:
        torch.zeros(4).copy_(weight)


def shake(weights: Weights, into: Into) -> None:
    for _, _weight in weights:
        into["w"].uniform_()


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (read_a_value, r"reads values of w \(aten._local_scalar_dense.default\), and decides by them"),
        (rebind, "gives w new storage, where nothing can land"),
        (fail, "loader failed on 'other', with tensors of which only shape and dtype are known: KeyError: 'other'"),
        (strand, "copies other, w to where no parameter or buffer is"),
        (shake, "changes w by aten.uniform_.default, of nothing that it loads"),
    ],
)
def test_a_loader_that_cant_be_traced_is_refused(loader: Loader, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        traced(loader, {"w": (4,), "other": (4,)}, {"w": (4,)})


def test_live_tensors_are_not_touched_and_their_offsets_are_kept() -> None:
    store = torch.arange(10.0)
    live = {"w": store[2:8].view(2, 3)}

    def load(weights: Weights) -> None:
        for _, weight in weights:
            live["w"][1].copy_(weight)
            live["w"][0].fill_(0)

    found = trace(load, checkpoint={"w": ((3,), torch.float32)}, into=live)
    assert store.tolist() == list(range(10))
    (fragment,) = fragments(found, live)
    assert fragment.view.tolist() == [5, 6, 7]


def test_tables_among_the_destinations_may_be_read() -> None:
    live = {"map": torch.tensor([-1, 0]), "w": torch.empty(1, 2, device="meta")}

    def load(weights: Weights) -> None:
        for name, weight in weights:
            slot = int(live["map"][int(name)].item())
            if slot >= 0:
                live["w"][slot].copy_(weight)

    found = trace(load, checkpoint={"0": ((2,), torch.float32), "1": ((2,), torch.float32)}, into=live)
    assert [landing.name for landing in found.landings] == ["1"]


def test_eighteen_thousand_tensors_take_seconds_and_twice_as_many_twice_that() -> None:
    def seconds(experts: int) -> float:
        shapes = {
            f"e.{n}.{part}": (8, 6) if part != "down" else (6, 8)
            for n in range(experts)
            for part in ("gate", "up", "down")
        }
        into = {"w13": (experts, 4, 6), "w2": (experts, 6, 2)}
        begun = time.process_time()
        found = traced(load_experts, shapes, into)
        assert len(found.landings) == 3 * experts
        return time.process_time() - begun

    seconds(100)
    half, whole = seconds(3000), seconds(6000)
    assert whole < 3 * half


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    for kind in draw(st.lists(st.sampled_from(("narrow", "permute", "split", "step", "select")), max_size=4)):
        if not tensor.ndim:
            break
        dim = draw(st.integers(0, tensor.ndim - 1))
        extent = tensor.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, extent - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(1, extent - start)))
        elif kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        elif kind == "split":
            factors = [factor for factor in range(1, extent + 1) if extent % factor == 0]
            tensor = tensor.unflatten(dim, (draw(st.sampled_from(factors)), -1))
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        else:
            tensor = tensor.select(dim, draw(st.integers(0, extent - 1)))
    return tensor


def place(view: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return view.storage_offset(), view.stride()


@given(st.data(), st.lists(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=1, max_size=3))
def test_two_copies_on_end_are_one(data: st.DataObject, shape: list[int]) -> None:
    """A view of a tensor, copied, and a view of the copy, copied: in boxes, the same as if it had really been done."""
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    first = data.draw(views(tensor))
    buffer = first.clone(memory_format=torch.contiguous_format)
    second = data.draw(views(buffer))
    wanted = second.clone(memory_format=torch.contiguous_format)
    try:
        chain = chained(
            Copy.between(first.shape, place(first), place(buffer)),
            Copy.between(second.shape, place(second), place(wanted)),
        )
        assert chain is not None
        parts = list(boxes(chain, shape))
    except Unfollowed:
        return
    made = torch.zeros_like(wanted)
    for box, into, strides in parts:
        made.as_strided(box.shape, strides, into).copy_(tensor[box.slices()])
    assert torch.equal(made, wanted)
