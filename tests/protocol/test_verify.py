"""Digests that don't depend on the cut: any partition adds up, and whatever refits get wrong changes the sum."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refit_sdk import verify
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError

DTYPES = ("u1", "i2", "f2", "f4", "i8", "f8", "c8", "?")
tensors = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5))


def whole(array: npt.NDArray[Any]) -> int:
    return verify.digest(array, box=Box.whole(array.shape), shape=array.shape)


def part(array: npt.NDArray[Any], box: Box) -> int:
    return verify.digest(array[box.slices()], box=box, shape=array.shape)


@st.composite
def partitions(draw: st.DrawFn, box: Box) -> list[Box]:
    """The box cut in two, and its halves again, at random."""
    cuttable = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not cuttable or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(cuttable))
    at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
    halves = box.narrow(dim, box.start[dim], at), box.narrow(dim, at, box.stop[dim])
    return [piece for half in halves for piece in draw(partitions(half))]


@given(st.data(), tensors)
def test_any_partition_adds_up(data: st.DataObject, array: npt.NDArray[Any]) -> None:
    boxes = data.draw(st.permutations(data.draw(partitions(Box.whole(array.shape)))))
    assert verify.combine(part(array, box) for box in boxes) == whole(array)


@given(tensors, st.integers(1, 7))
def test_chunks_don_t_matter(array: npt.NDArray[Any], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        expected = whole(array)
        patch.setattr(verify, "CHUNK", chunk)
        assert whole(array) == expected


def reference(array: npt.NDArray[Any], box: Box, shape: tuple[int, ...]) -> int:
    """The definition, one Python integer at a time."""

    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    total = 0
    for at in np.ndindex(*array.shape):
        place = 0
        for coordinate, offset, extent in zip(at, box.start, shape, strict=True):
            place = place * extent + coordinate + offset
        bits = int.from_bytes(array[at].tobytes(), "little")
        total += mix(mix((place + array.itemsize * 0x9E3779B97F4A7C15) % 2**64) ^ bits)
    return total % 2**64


@given(tensors, st.integers(0, 2**60))
def test_equals_its_definition(array: npt.NDArray[Any], offset: int) -> None:
    box = Box.whole(array.shape).translate([offset] + [1] * (array.ndim - 1) if array.ndim else [])
    shape = tuple(stop + 2 for stop in box.stop)
    assert verify.digest(array, box=box, shape=shape) == reference(array, box, shape)


@given(tensors.filter(lambda array: array.size > 0), st.data())
def test_one_flipped_bit_changes_it(array: npt.NDArray[Any], data: st.DataObject) -> None:
    flipped = array.copy()
    raw = flipped.reshape(-1).view("u1")
    at = data.draw(st.integers(0, raw.size - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    assert whole(flipped) != whole(array)


@given(tensors.filter(lambda array: array.size > 1), st.data())
def test_a_swapped_pair_changes_it(array: npt.NDArray[Any], data: st.DataObject) -> None:
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    i, j = data.draw(st.lists(st.integers(0, bits.size - 1), min_size=2, max_size=2, unique=True))
    swapped = bits.copy()
    swapped[i], swapped[j] = bits[j], bits[i]
    assert (whole(swapped.reshape(array.shape)) != whole(array)) == (bits[i] != bits[j])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda w: np.roll(w, 1, axis=0), id="rows shifted"),
        pytest.param(lambda w: np.roll(w, 8, axis=1), id="columns rotated"),
        pytest.param(lambda w: w[::-1], id="rows reversed"),
        pytest.param(lambda w: w[:, ::-1], id="columns reversed"),
        pytest.param(lambda w: np.concatenate([w[8:], w[:8]]), id="shards swapped"),
        pytest.param(lambda w: np.zeros_like(w), id="nothing arrived"),
        pytest.param(lambda w: np.vstack([w[:15], w[:1]]), id="one row stale"),
    ],
)
def test_what_refits_get_wrong_changes_it(wrong: Any) -> None:
    right = np.arange(256, dtype="f4").reshape(16, 16)
    assert whole(wrong(right)) != whole(right)


def test_a_shard_at_another_place_differs() -> None:
    shard = np.ones((2, 2), "f4")
    at = [verify.digest(shard, box=Box((row, 0), (row + 2, 2)), shape=(8, 2)) for row in range(7)]
    assert len(set(at)) == 7


def test_zeros_of_another_size_differ() -> None:
    assert whole(np.zeros(4, "u1")) != whole(np.zeros(4, "u2"))


@given(tensors)
def test_strides_don_t_matter(array: npt.NDArray[Any]) -> None:
    assert whole(np.asfortranarray(array)) == whole(np.ascontiguousarray(array))


def test_takes_any_buffer() -> None:
    values = np.arange(6, dtype="i4")
    assert verify.digest(values.data, box=Box.whole((6,)), shape=(6,)) == whole(values)


def test_indices_have_64_bits() -> None:
    shape = (2**31, 2**31)
    corner = Box((2**31 - 1, 2**31 - 2), (2**31, 2**31))
    values = np.array([[1.0, 2.0]], "f4")
    assert verify.digest(values, box=corner, shape=shape) == reference(values, corner, shape)


def test_memory_is_bounded() -> None:
    big = np.zeros((64, 1 << 17), "u1")
    tracemalloc.start()
    whole(big)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("values", "box", "shape"),
    [
        pytest.param(np.zeros((2, 2)), Box((0, 0), (2, 3)), (4, 4), id="values of another shape"),
        pytest.param(np.zeros((2, 2)), Box((3, 0), (5, 2)), (4, 4), id="a box outside the tensor"),
        pytest.param(np.zeros(2, "c16"), Box((0,), (2,)), (2,), id="16 bytes an element"),
        pytest.param(np.array([None]), Box((0,), (1,)), (1,), id="objects"),
    ],
)
def test_refuses(values: Any, box: Box, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="a digest of"):
        verify.digest(values, box=box, shape=shape)
