"""Manifests: folding loses nothing, and the wire form takes nothing that it shouldn't."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk import fold as room
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError, RendezvousError
from refit_sdk.fold import Held, fold, unfold
from refit_sdk.manifest import MAX_MANIFEST_BYTES, decode, digest, encode
from refit_sdk.tensor import TensorSpec
from refit_sdk.world import Manifest, Part, Region


def fragment(
    name: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "float32", **more: Any
) -> Fragment:
    box = Box.whole(shape) if box is None else box
    return Fragment(name, shape, box, torch.empty(box.shape, dtype=getattr(torch, dtype)), **more)


TEMPLATES = ("embed.weight", "layers.{}.norm", "layers.{}.experts.{}.up", "{}.{}.{}", "layers.{}")
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (4, 6), (0, 3), (2, 3, 4))
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool")


def inside(draw: st.DrawFn, shape: tuple[int, ...], granule: tuple[int, ...]) -> Box:
    """A box of the shape, cut at the granule only; it may be empty."""
    corners = []
    for extent, step in zip(shape, granule, strict=True):
        cuts = st.sampled_from([*range(0, extent, step), extent])
        corners.append(sorted((draw(cuts), draw(cuts))))
    return Box((a for a, _ in corners), (b for _, b in corners))


@st.composite
def fragment_lists(draw: st.DrawFn) -> list[Fragment]:
    shape_of: dict[str, tuple[int, ...]] = {}
    found: list[Fragment] = []
    for _ in range(draw(st.integers(0, 12))):
        template = draw(st.sampled_from(TEMPLATES))
        name = template.format(*(draw(st.integers(0, 4)) for _ in range(template.count("{}"))))
        shape = shape_of.setdefault(name, draw(st.sampled_from(SHAPES)))
        granule = draw(st.none() | st.tuples(*(st.integers(1, 3) for _ in shape)))
        box = inside(draw, shape, granule or (1,) * len(shape))
        held = fragment(name, shape, box, draw(st.sampled_from(DTYPES)), granule=granule)
        found += [held] * draw(st.sampled_from((1, 1, 1, 2, 3)))
    return found


def as_held(fragments: Iterable[Fragment]) -> Counter[Held]:
    return Counter(Held(f.name, f.shape, f.box, str(f.view.dtype).removeprefix("torch."), f.granule) for f in fragments)


@given(fragment_lists())
def test_fold_loses_nothing(fragments: list[Fragment]) -> None:
    assert Counter(unfold(fold(fragments))) == as_held(fragments)


@given(fragment_lists(), st.randoms())
def test_fold_forgets_the_order(fragments: list[Fragment], rng: random.Random) -> None:
    shuffled = list(fragments)
    rng.shuffle(shuffled)
    assert encode(fold(shuffled)) == encode(fold(fragments))


@given(fragment_lists())
def test_fold_lists_exactly_the_members_it_met(fragments: list[Fragment]) -> None:
    names = [name for part in fold(fragments).parts for name in part.spec.names()]
    assert sorted(names) == sorted({f.name for f in fragments})


@given(fragment_lists())
def test_fold_counts_every_byte(fragments: list[Fragment]) -> None:
    assert fold(fragments).nbytes == sum(f.view.numel() * f.view.element_size() for f in fragments)


def test_fold_keeps_a_model_small() -> None:
    model = [
        fragment(f"model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight", (4, 4), Box((2, 0), (4, 4)))
        for layer in range(6)
        for expert in range(16)
        for proj in ("gate", "up", "down")
    ]
    assert [len(part.regions) for part in fold(model).parts] == [1, 1, 1]


def test_fold_keeps_the_numbers_of_the_names() -> None:
    # Layers of an interleaved pipeline stage: ordinals would read 0:4.
    (part,) = fold(fragment(f"layers.{i}.w", (2,)) for i in (0, 1, 4, 5)).parts
    assert part.spec.members == (Box((0,), (2,)), Box((4,), (6,)))


def test_fold_tells_members_of_different_shape_apart() -> None:
    parts = fold([fragment("layers.0.w", (2,)), fragment("layers.1.w", (3,)), fragment("layers.2.w", (2,))]).parts
    assert [(part.spec.shape, part.spec.members) for part in parts] == [
        ((2,), (Box((0,), (1,)), Box((2,), (3,)))),
        ((3,), (Box((1,), (2,)),)),
    ]


def test_fold_counts_copies() -> None:
    # One expert in two physical slots, its neighbour in one.
    slots = [fragment(f"experts.{e}.w", (2,)) for e in (0, 1, 0)]
    (part,) = fold(slots).parts
    assert [(region.box, region.copies) for region in part.regions] == [
        (Box((0, 0), (1, 2)), 2),
        (Box((1, 0), (2, 2)), 1),
    ]


def test_fold_keeps_aliases() -> None:
    folded = fold([fragment("embed.weight", (4,), aliases=("lm_head.weight",))])
    assert folded.aliases == (("lm_head.weight", "embed.weight"),)


def test_fold_reads_strides_from_nothing() -> None:
    w = torch.zeros(6, 4)
    views = [Fragment("a", (4, 6), Box.whole((4, 6)), w.t()), Fragment("b", (6, 2), Box.whole((6, 2)), w[:, ::2])]
    assert [part.spec.shape for part in fold(views).parts] == [(4, 6), (6, 2)]


def huge(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Fragment:
    return Fragment(name, shape, Box.whole(shape), torch.empty(shape, dtype=dtype, device="meta"))


@pytest.mark.parametrize(
    "shape", [pytest.param((262144, 8960), id="over 2**31 elements"), pytest.param((2**40, 2**19), id="2**59")]
)
def test_sizes_have_64_bits(shape: tuple[int, ...]) -> None:
    folded = fold([huge("layers.999999999999.w", shape)])
    assert decode(encode(folded)) == folded
    assert folded.nbytes == 4 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("fragments", "says"),
    [
        pytest.param(
            [Fragment("a.w", (4, 4), Box((0, 0), (2, 4)), torch.zeros(4, 4))],
            r"'a\.w' claims \[0:2, 0:4\].*\(2, 4\).*\(4, 4\)",
            id="view isn't the box: a shard taken as the whole",
        ),
        pytest.param([fragment("a.w", (4,), Box((3,), (5,)))], r"'a\.w' claims \[3:5\].*\(4,\)", id="outside"),
        pytest.param([fragment("a.w", (4, 4), Box((0,), (4,)))], r"'a\.w' claims \[0:4\]", id="fewer dims"),
        pytest.param([fragment("a.w", (2,), dtype="complex128")], r"'a\.w' has dtype 'complex128'", id="dtype"),
        pytest.param(
            [fragment("a.0.w", (2,)), fragment("a.0.w", (3,))],
            r"'a\.0\.w' has shape \(2,\) and shape \(3,\)",
            id="two shapes",
        ),
        pytest.param([fragment("a..w", (2,))], r"'a\.\.w' is not a checkpoint name", id="empty part of a name"),
        pytest.param([fragment("a.{}.w", (2,))], r"'a\.{}\.w' is not a checkpoint name", id="braces in a name"),
        pytest.param([fragment("a.w", (4,), granule=(2, 2))], r"'a\.w'.*granule \(2, 2\)", id="granule of other dims"),
        pytest.param([fragment("a.w", (4,), granule=(0,))], r"'a\.w'.*granule \(0,\)", id="granule of nothing"),
        pytest.param(
            [fragment("a.w", (12,), Box((3,), (6,)), granule=(2,))],
            r"'a\.w' holds \[3:6\].*granule \(2,\)",
            id="cut granule",
        ),
        pytest.param([fragment("a.w", (2**60, 4), Box((0, 0), (1, 1)))], r"'a\.w'.*64 bits", id="over 64 bits"),
        pytest.param(
            [fragment("a.w", (2,), aliases=("b.w",)), fragment("b.w", (2,))],
            r"'b\.w' is an alias of 'a\.w'",
            id="alias and tensor",
        ),
        pytest.param(
            [fragment("a.w", (2,), aliases=("c.w",)), fragment("b.w", (2,), aliases=("c.w",))],
            r"'c\.w' is an alias of 'a\.w' and of 'b\.w'",
            id="alias of two",
        ),
        pytest.param(
            [fragment("a.w", (2,), aliases=("..",))], r"'\.\.' is not a checkpoint name", id="alias isn't a name"
        ),
    ],
)
def test_fold_refuses(fragments: list[Fragment], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        fold(fragments)


@pytest.mark.parametrize("start", [pytest.param(4, id="a short one"), pytest.param(5, id="an empty shard")])
def test_a_granule_may_end_short_at_the_edge(start: int) -> None:
    held = fragment("a.w", (5,), Box((start,), (5,)), granule=(2,))
    assert Counter(unfold(fold([held]))) == as_held([held])


def test_folding_does_work_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the experts, twice the names read, each once: no scan of all for each."""
    counted: Counter[str] = Counter()
    real = room.fold_name
    monkeypatch.setattr(room, "fold_name", lambda name: (counted.update([name]), real(name))[1])
    fold(fragment(f"experts.{i}.w", (2,)) for i in range(1000))
    assert counted.total() == 1000


@given(fragment_lists())
def test_decode_undoes_encode(fragments: list[Fragment]) -> None:
    folded = fold(fragments)
    assert decode(encode(folded)) == folded


def test_equal_manifests_have_equal_bytes_and_digests() -> None:
    one, two = fragment("a.w", (4,), aliases=("c", "b")), fragment("layers.3.w", (2, 2))
    assert digest(encode(fold([one, two]))) == digest(encode(fold([two, one])))
    assert digest(encode(fold([one]))) != digest(encode(fold([one, two])))


def test_encode_is_a_fixed_text() -> None:
    spec = TensorSpec("layers.{}.w", (8,), [Box((0,), (2,))])
    regions = [Region(Box((1, 4), (2, 8)), "bfloat16", (2,), 2), Region(Box((0, 0), (2, 4)), "bfloat16")]
    assert encode(Manifest([Part(spec, regions)], [("b", "layers.0.w")])) == (
        b'{"members":[[[0],[2]],[[1],[1]]],"parts":[{"name":"layers.{}.w","shape":[8],"members":0,"regions":['
        b'{"box":[[0],[4]],"dtype":"bfloat16"},'
        b'{"box":[[4],[8]],"dtype":"bfloat16","members":1,"granule":[2],"copies":2}'
        b']}],"aliases":[["b","layers.0.w"]]}'
    )


def good() -> dict[str, Any]:
    part = {
        "name": "layers.{}.w",
        "shape": [8, 4],
        "members": 0,
        "regions": [{"box": [[0, 0], [4, 4]], "dtype": "float32", "members": 1}],
    }
    return {"members": [[[0, 2], [3, 1]], [[0], [3]]], "parts": [part], "aliases": []}


def text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def test_the_good_manifest_is_good() -> None:
    assert decode(text(good())).parts[0].spec.num_members == 4


Spoil = Callable[[dict[str, Any]], object]


def in_part(**fields: Any) -> Spoil:
    return lambda body: body["parts"][0].update(fields)


def in_region(**fields: Any) -> Spoil:
    return lambda body: body["parts"][0]["regions"][0].update(fields)


def listing(*columns: Any) -> Spoil:
    """Other columns in the place of the part's own members."""
    return lambda body: body["members"].__setitem__(0, list(columns))


def of_members(*columns: Any) -> Spoil:
    """Other columns in the place of the region's members."""
    return lambda body: body["members"].__setitem__(1, list(columns))


def another_part(**fields: Any) -> Spoil:
    return lambda body: body["parts"].append({**body["parts"][0], **fields})


def with_aliases(*pairs: tuple[str, str]) -> Spoil:
    return lambda body: body.update(aliases=pairs)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(lambda body: body.update(extra=1), "unknown field `extra`", id="unknown field"),
        pytest.param(in_part(code="x"), "unknown field `code`", id="unknown field, deeper"),
        pytest.param(in_region(offset=0), "unknown field `offset`", id="unknown field, deepest"),
        pytest.param(lambda body: body.pop("aliases"), "missing required field `aliases`", id="missing field"),
        pytest.param(in_part(name=7), "Expected `str`, got `int`", id="number for a name"),
        pytest.param(in_part(shape=["8", "4"]), "Expected `int`, got `str`", id="text for a number"),
        pytest.param(in_part(shape=[8, 4.5]), "Expected `int`, got `float`", id="fraction for a number"),
        pytest.param(in_part(shape=[8, True]), "Expected `int`, got `bool`", id="truth for a number"),
        pytest.param(in_part(shape=None), "Expected `array`, got `null`", id="nothing for an array"),
        pytest.param(in_part(shape=[-8, 4]), r"Expected `int` >= 0", id="negative size"),
        pytest.param(in_part(shape=[2**63, 4]), r"`int` <= 9223372036854775807", id="size over 63 bits"),
        pytest.param(in_part(shape=[2**200, 4]), "Integer value out of range|`int`", id="size over any bits"),
        pytest.param(in_part(shape=[2**62, 2**62]), "64 bits", id="absurd size in all"),
        pytest.param(in_part(shape=[1] * 65), "length <= 64", id="too many dims"),
        pytest.param(in_part(name="x" * 2000), "length <= 1024", id="endless name"),
        pytest.param(in_part(name=""), "length >= 1", id="no name"),
        pytest.param(in_part(name="layers.{0.__class__}.w"), "not a checkpoint name", id="format string for a name"),
        pytest.param(in_part(name="layers.3.{}.w"), "not a family's name", id="number left in a name"),
        pytest.param(in_part(name="layers.x{}.w"), "not a family's name", id="braces in a part of a name"),
        pytest.param(in_part(members=2), "members 2 is named where there are 2", id="members that aren't there"),
        pytest.param(in_region(members=7), "members 7 is named where there are 2", id="a region's that aren't there"),
        pytest.param(listing([], []), "no member", id="no member"),
        pytest.param(listing([0], [2**62]), "1099511627776 members", id="absurd members"),
        pytest.param(listing([0], [2**63 - 1]), "more than 62 bits", id="members beyond 62 bits"),
        pytest.param(listing([2**61, 2**61], [2**61, 2**61]), "more than 62 bits", id="members that add up to more"),
        pytest.param(listing([0, -1], [3, 4]), "Expected `int` >= 0", id="a member twice"),
        pytest.param(listing([3], [0]), "an empty range", id="an empty range of members"),
        pytest.param(listing([3], [-3]), "Expected `int` >= 0", id="stop before start"),
        pytest.param(listing([0], [3], [0], [3]), "1 stacked dims", id="members of other dims"),
        pytest.param(listing([0], [3], [0]), "need 2 columns", id="a column too many"),
        pytest.param(listing([0, 2], [3]), "of one length", id="columns of different length"),
        pytest.param(listing(), "1 stacked dims", id="no columns"),
        pytest.param(listing([0] * (1 << 21), [1]), "length <= 1048576", id="too many members"),
        pytest.param(of_members([0], [4]), "that it doesn't list", id="region of an unlisted member"),
        pytest.param(of_members([7], [1]), "that it doesn't list", id="region elsewhere"),
        pytest.param(of_members([1], [0]), "an empty range", id="region of no member"),
        pytest.param(of_members([0], [3], [0], [3]), "that it doesn't list", id="region of members of other dims"),
        pytest.param(of_members([0, 2], [3, 1]), "isn't canonical", id="a region's members stated and the same"),
        pytest.param(lambda body: body["members"].reverse(), "that it doesn't list", id="members in another order"),
        pytest.param(lambda body: body["members"].append([[9], [1]]), "isn't canonical", id="members of no part"),
        pytest.param(in_region(box=[[0, 0], [9, 4]]), "isn't a region of its shape", id="region outside the shape"),
        pytest.param(in_region(box=[[0], [4]]), "isn't a region of its shape", id="region of fewer dims"),
        pytest.param(
            in_region(box=[[3, 0], [0, 4]]), "needs 0 <= start <= stop", id="region that ends before it starts"
        ),
        pytest.param(in_region(dtype="object"), "has dtype 'object'", id="unknown dtype"),
        pytest.param(in_region(copies=0), ">= 1", id="no copies"),
        pytest.param(in_region(copies=2**40), "<= 1048576", id="absurd copies"),
        pytest.param(in_region(granule=[3, 1]), "cuts through its granule", id="cut granule"),
        pytest.param(in_region(granule=[2]), "a positive number for each dim", id="granule of other dims"),
        pytest.param(
            lambda body: body["parts"][0]["regions"].append(body["parts"][0]["regions"][0]),
            "same region twice",
            id="a region twice",
        ),
        pytest.param(another_part(), "lists a member twice", id="duplicate name"),
        pytest.param(another_part(shape=[9, 4]), "lists a member twice", id="duplicate name of another shape"),
        pytest.param(with_aliases(("b", "c")), "doesn't hold", id="alias of nothing"),
        pytest.param(with_aliases(("layers.1.w", "layers.0.w")), "a tensor of its own", id="alias that is a tensor"),
        pytest.param(with_aliases(("b", "layers.0.w"), ("b", "layers.1.w")), "can be one tensor's", id="alias of two"),
        pytest.param(
            with_aliases(("b", "layers.1.w"), ("a", "layers.0.w")), "isn't canonical", id="aliases out of order"
        ),
        pytest.param(in_region(copies=1), "isn't canonical", id="a default stated"),
    ],
)
def test_decode_refuses(spoil: Spoil, says: str) -> None:
    body = good()
    spoil(body)
    with pytest.raises(RendezvousError, match=says):
        decode(text(body))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(text(good())[:-2], id="truncated"),
        pytest.param(text(good()) + b" ", id="a space after it"),
        pytest.param(text(good()) * 2, id="two of them"),
        pytest.param(json.dumps(good()).encode(), id="spaces"),
        pytest.param(text(good()).replace(b'"aliases"', b'"aliases":[],"aliases"'), id="a field twice"),
        pytest.param(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.", id="a pickle"),
        pytest.param(b"[" * 200_000, id="deep nesting"),
        pytest.param(b'{"members":' + b"[" * 200_000, id="deep nesting in a field"),
        pytest.param(b'{"x":' + b"[" * 200_000, id="deep nesting in an unknown field"),
        pytest.param(b"\xff\xfe{}", id="not UTF-8"),
        pytest.param(text(good()).replace(b"layers", b"lay\xffers"), id="not UTF-8 in a name"),
        pytest.param(b"{" + b" " * MAX_MANIFEST_BYTES + b"}", id="too long"),
    ],
)
def test_decode_refuses_what_isn_t_a_manifest(data: bytes) -> None:
    with pytest.raises(RendezvousError, match=r"manifest"):
        decode(data)


@given(st.data())
def test_decode_refuses_any_damage_or_reads_another_manifest(data: st.DataObject) -> None:
    original = encode(decode(text(good())))
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert encode(decode(bytes(damaged))) == damaged
    except RendezvousError:
        assert damaged != original


def test_scattered_members_are_checked_against_scattered_ranges() -> None:
    body = good()
    even = [[0] + [1] * 49, [1] * 50]
    body["members"] = [even, [[4], [1]]]
    assert decode(text(body)).parts[0].spec.num_members == 50
    body["members"][1] = [[4], [2]]
    with pytest.raises(RendezvousError, match="that it doesn't list"):
        decode(text(body))
