"""The judge judged: it accepts the right values in every dtype, and nothing that a wrong refit would deliver."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_sdk.testing import judge, torch_fill
from refit_sdk.testing.judge import Bits, Storage, cast, compare, expected, poison

FLOATS = [name for name, dtype in judge.VALUES.items() if dtype.kind not in "iub"]
SIGNED = [name for name in FLOATS if name != "float8_e8m0fnu"]
TORCH = [name for name in judge.VALUES if hasattr(torch, name)]
dtypes = st.sampled_from(list(judge.VALUES))


def whole(name: str, shape: tuple[int, ...], dtype: str = "float32", *, seed: int = 0, version: int = 1) -> Bits:
    return expected(name, shape, (0,) * len(shape), shape, dtype, seed, version)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape and the corners of a box of it."""
    shape = draw(st.lists(st.integers(0, 6), max_size=5).map(tuple))
    corners = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return shape, tuple(a for a, _ in corners), tuple(b for _, b in corners)


@given(boxes(), dtypes)
def test_a_part_is_that_part_of_the_whole(box: Any, dtype: str) -> None:
    shape, start, stop = box
    part = expected("w", shape, start, stop, dtype, 3, 4)
    assert part.shape == tuple(b - a for a, b in zip(start, stop, strict=True))
    index = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    assert np.array_equal(part, whole("w", shape, dtype, seed=3, version=4)[index])


@pytest.mark.parametrize("dtype", judge.VALUES)
def test_values_are_finite_and_use_every_bit(dtype: str) -> None:
    bits = whole("w", (1 << 14,), dtype)
    assert bits.dtype == judge.bits_dtype(dtype)
    assert np.isfinite(bits.view(judge.VALUES[dtype]).astype(np.float64)).all()
    all_bits = 1 if dtype == "bool" else (1 << 8 * bits.itemsize) - 1
    assert (int(np.bitwise_or.reduce(bits)), int(np.bitwise_and.reduce(bits))) == (all_bits, 0)


@pytest.mark.parametrize("dtype", judge.VALUES)
def test_no_value_is_frequent(dtype: str) -> None:
    bits = whole("w", (1 << 14,), dtype)
    possible = 2 if dtype == "bool" else 1 << 8 * bits.itemsize
    assert np.unique(bits, return_counts=True)[1].max() < 3 * bits.size / possible + 10


@pytest.mark.parametrize("target", SIGNED)
@pytest.mark.parametrize("source", ["float32", "float64", "bfloat16", "float16"])
def test_values_within_a_dtype_stay_finite_when_cast(source: str, target: str) -> None:
    bits = expected("w", (1 << 14,), (0,), (1 << 14,), source, 0, 1, within=target)
    values = cast(bits, source, target).view(judge.VALUES[target]).astype(np.float64)
    assert np.isfinite(values).all()


def test_float32_stays_finite_as_bfloat16() -> None:
    bits = whole("w", (1 << 16,))
    assert np.isfinite(cast(bits, "float32", "bfloat16").view(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float64", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float8_e4m3fn"),
        ("float32", "float8_e5m2"),
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e5m2", "float32"),
        ("float8_e4m3fn", "bfloat16"),
    ],
)
def test_cast_agrees_with_torch(source: str, target: str) -> None:
    bits = expected("w", (1 << 14,), (0,), (1 << 14,), source, 0, 1, within=target)
    tensor = torch.empty(bits.shape, dtype=getattr(torch, source))
    torch_fill.fill(tensor, bits)
    assert compare(torch_fill.read(tensor.to(getattr(torch, target))), cast(bits, source, target)) == []


@pytest.mark.parametrize("dtype", judge.VALUES)
def test_poison_is_never_right(dtype: str) -> None:
    shape = (64, 64)
    wrong = compare(poison(shape, dtype), whole("w", shape, dtype), limit=64 * 64)
    integers = judge.VALUES[dtype].kind in "iu"
    assert len(wrong) >= (0.98 if integers else 1) * 64 * 64
    if dtype in FLOATS:
        assert np.isnan(poison(shape, dtype).view(judge.VALUES[dtype]).astype(np.float64)).all()


def right(version: int = 1) -> Bits:
    """Four layers of eight experts of (8, 4), as float32."""
    return np.stack(
        [np.stack([whole(f"layers.{i}.experts.{e}.w", (8, 4), version=version) for e in range(8)]) for i in range(4)]
    )


WRONG = {
    "a rotated shard": lambda w: np.roll(w, 2, axis=2),
    "a rotated shard of one expert": lambda w: np.concatenate([w[:, :7], np.roll(w[:, 7:], 4, axis=2)], axis=1),
    "columns rotated": lambda w: np.roll(w, 1, axis=3),
    "shards swapped": lambda w: np.concatenate([w[:, :, 4:], w[:, :, :4]], axis=2),
    "two experts swapped": lambda w: w[:, [1, 0, *range(2, 8)]],
    "local expert numbers": lambda w: w[:, [0, 1, 2, 3, 0, 1, 2, 3]],
    "a layer off by one": lambda w: np.roll(w, 1, axis=0),
    "the last layer again": lambda w: w[[0, 1, 2, 2]],
    "layers exchanged": lambda w: w[[0, 2, 1, 3]],
    "a stale version": lambda w: right(version=0),
    "a stale window": lambda w: np.concatenate([w[:3], right(version=0)[3:]]),
    "a stale row": lambda w: np.concatenate([w[..., :7, :], right(version=0)[..., 7:, :]], axis=2),
    "nothing arrived": lambda w: poison(w.shape, "float32"),
    "zeros": np.zeros_like,
    "gate for up": lambda w: w[:, :, [4, 5, 6, 7, 0, 1, 2, 3]],
    "a transposed block": lambda w: np.concatenate([w[:, :, :4].swapaxes(2, 3), w[:, :, 4:]], axis=2),
    "one bit": lambda w: w ^ (np.arange(w.size).reshape(w.shape) == 100).astype("u4"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_refit_can_t_pass(wrong: str) -> None:
    assert compare(right(), right()) == []
    assert compare(WRONG[wrong](right()), right())


@given(
    st.integers(1, 64), st.integers(2, 64), st.sampled_from(["bool", "uint8", "float8_e4m3fn", "bfloat16", "float32"])
)
def test_no_rotation_passes(rows: int, columns: int, dtype: str) -> None:
    bits = whole("w", (rows * 4, columns * 4), dtype)
    for shift in {1, rows, 2 * rows, 3 * rows} - {0}:
        assert compare(np.roll(bits, shift, axis=0), bits)
    for shift in {1, columns, 2 * columns}:
        assert compare(np.roll(bits, shift, axis=1), bits)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"seed": 2}, id="seed"),
        pytest.param({"version": 2}, id="version"),
        pytest.param({"name": "layers.1.w"}, id="name"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_values_depend_on(other: dict[str, Any], dtype: str) -> None:
    base = {"name": "layers.0.w", "seed": 1, "version": 1}
    one, two = whole(shape=(4096,), dtype=dtype, **base), whole(shape=(4096,), dtype=dtype, **base | other)  # type: ignore[arg-type]
    assert (one == two).mean() < 0.01


def test_indices_have_64_bits() -> None:
    shape = (2**31, 2**31)
    corner = (2**31 - 1, 2**31 - 1)
    last = expected("w", shape, corner, shape, "int64", 0, 1)
    first = expected("w", shape, (0, 0), (1, 1), "int64", 0, 1)
    wrapped = expected("w", shape, (0, 2**31 - 1), (1, 2**31), "int64", 0, 1)
    assert len({int(bits[0, 0]) for bits in (first, wrapped, last)}) == 3


def test_compare_names_the_first_elements() -> None:
    bits = whole("w", (4, 4), "uint8")
    other = bits.copy()
    other[1, 2] ^= 1
    other[3, 0] ^= 128
    found = compare(other, bits, start=(10, 20))
    assert [mismatch.at for mismatch in found] == [(11, 22), (13, 20)]
    assert str(found[0]) == f"at (11, 22): {other[1, 2]:#x}, not {bits[1, 2]:#x}"
    assert len(compare(~bits, bits, limit=3)) == 3


def test_compare_tells_minus_zero_and_nans_apart() -> None:
    assert compare(np.array([0x80000000], "u4"), np.array([0], "u4"))
    assert compare(np.array([0x7FC00001], "u4"), np.array([0x7FC00000], "u4"))


@pytest.mark.parametrize("other", [np.zeros((2, 3), "u4"), np.zeros((3, 2), "u2")], ids=["shape", "size"])
def test_compare_refuses_another(other: Bits) -> None:
    with pytest.raises(ValueError, match="can't be compared"):
        compare(other, np.zeros((3, 2), "u4"))


@pytest.mark.parametrize("box", [((4,), (0,), (5,)), ((4,), (3,), (2,)), ((4,), (0, 0), (1, 1)), ((4,), (-1,), (2,))])
def test_expected_refuses_what_isn_t_a_box(box: Any) -> None:
    with pytest.raises(ValueError, match="isn't a box"):
        expected("w", *box, "float32", 0, 1)


def test_storage_guards_what_no_view_owns() -> None:
    storage = Storage(64, margin=8)
    left = storage.view("int16", (4, 2), strides=(8, 1))
    right_half = storage.view("int16", (4, 2), strides=(8, 1), offset=8)
    left[...], right_half[...] = 1, 2
    assert storage.damage() == []
    storage.block[4] ^= 1
    assert storage.damage() == [4]


@pytest.mark.parametrize("offset", [-1, 64, -8, 71])
def test_storage_guards_both_ends(offset: int) -> None:
    storage = Storage(64, margin=8)
    storage.view("uint8", (64,))[...] = 0
    np.frombuffer(storage.block.base, "u1")[8 + offset] ^= 0x10
    assert storage.damage() == [offset]


def test_storage_refuses_a_view_that_leaves_it() -> None:
    with pytest.raises(ValueError, match="leaves the block"):
        Storage(64).view("float32", (17,))
    with pytest.raises(ValueError, match="isn't aligned"):
        Storage(64).view("float32", (1,), offset=2)


@st.composite
def strided(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """A view with a transposed order, steps and gaps, as slicing makes them."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    wide = torch.zeros([shape[dim] * steps[dim] + 1 for dim in order], dtype=torch.uint8).to(dtype)
    view = wide.permute([order.index(dim) for dim in range(len(shape))])
    return view[tuple(slice(1, None, step) if step > 1 else slice(0, -1) for step in steps)]


@pytest.mark.parametrize("dtype", TORCH)
@settings(max_examples=20)
@given(data=st.data())
def test_fill_and_read_any_view(dtype: str, data: st.DataObject) -> None:
    view = data.draw(strided(getattr(torch, dtype)))
    bits = whole("w", tuple(view.shape), dtype)
    address, strides = view.data_ptr(), view.stride()
    torch_fill.fill(view, bits)
    assert compare(torch_fill.read(view), bits) == []
    assert (view.data_ptr(), view.stride()) == (address, strides)


def test_fill_writes_the_view_alone() -> None:
    w = torch.zeros(6, 6)
    torch_fill.fill(w.t()[1:3, ::2], whole("w", (2, 3)) | 1)
    assert w.nonzero().tolist() == [[0, 1], [0, 2], [2, 1], [2, 2], [4, 1], [4, 2]]


def test_fill_takes_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    torch_fill.fill(parameter, whole("w", (3,)))
    assert compare(torch_fill.read(parameter), whole("w", (3,))) == []


def test_read_is_a_copy() -> None:
    w = torch.zeros(3)
    bits = torch_fill.read(w)
    w.fill_(1)
    assert bits.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", [np.zeros((2, 3), "u4"), np.zeros((3, 2), "u2")], ids=["shape", "size"])
def test_fill_refuses_another(bits: Bits) -> None:
    with pytest.raises(ValueError, match="doesn't fill"):
        torch_fill.fill(torch.zeros(3, 2), bits)


@pytest.mark.parametrize("dtype", TORCH)
def test_a_guarded_view_is_poisoned_and_live(dtype: str) -> None:
    size = judge.VALUES[dtype].itemsize
    storage = Storage(32 * size)
    view = torch_fill.guarded(storage, getattr(torch, dtype), (4, 4), strides=(8, 1), offset=2 * size)
    assert compare(torch_fill.read(view), poison((4, 4), dtype)) == []
    torch_fill.fill(view, whole("w", (4, 4), dtype))
    assert storage.damage() == []
    storage.block[0] ^= 1
    assert storage.damage() == [0]


@pytest.mark.parametrize("file", ["judge.py", "torch_fill.py"])
def test_the_judge_is_independent(file: str) -> None:
    tree = ast.parse(Path(judge.__file__).with_name(file).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in imported}
    assert {name for name in imported if name.startswith("refit_")} <= {"refit_sdk.testing.judge"}
    assert file == "torch_fill.py" or "torch" not in roots
