"""Runs are the bytes of tensors in row-major order, whatever their strides, and any stretch of them can be had."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk.runs import LEAST, Runs, is_worth_leaving


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of storage that is larger: sliced, stepped, permuted, of 1- to 8-byte elements, or without dims."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    view = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    for dim, extent in enumerate(shape):
        start = draw(st.integers(0, extent - 1))
        step = draw(st.sampled_from([1, 1, 2]))
        view = view[(slice(None),) * dim + (slice(start, draw(st.integers(start + 1, extent)), step),)]
    return view.permute(draw(st.permutations(range(view.ndim))))


def flat(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(
        bytes(t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()) for t in tensors
    )


@given(st.lists(views(), min_size=1, max_size=3), st.data())
def test_any_stretch_is_had_as_spans_and_by_gathering(tensors: list[torch.Tensor], data: st.DataObject) -> None:
    runs, whole = Runs.of(tensors), flat(tensors)
    assert runs.nbytes == len(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    nbytes = data.draw(st.integers(1, len(whole) - at))
    found = b"".join(
        ctypes.string_at(address, length)
        for address, length in runs.spans(at, most=runs.num_runs, most_nbytes=nbytes).tolist()
    )
    assert found == whole[at : at + nbytes]
    out = torch.zeros(nbytes, dtype=torch.uint8)
    runs.gather(at, into=out.data_ptr(), nbytes=nbytes)
    assert bytes(out.tolist()) == whole[at : at + nbytes]


@given(st.lists(views(), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 40))
def test_spans_of_few_runs_and_bytes_go_on_where_the_last_ended(
    tensors: list[torch.Tensor], most: int, most_nbytes: int
) -> None:
    runs, found = Runs.of(tensors), b""
    while len(found) < runs.nbytes:
        spans = runs.spans(len(found), most=most, most_nbytes=most_nbytes)
        assert 0 < len(spans) <= most
        assert 0 < spans[:, 1].sum() <= most_nbytes
        found += b"".join(ctypes.string_at(address, length) for address, length in spans.tolist())
    assert found == flat(tensors)
    assert len(runs.spans(runs.nbytes, most=1, most_nbytes=1)) == 0


@given(views(), st.data())
def test_scattering_writes_a_stretch_and_nothing_else(view: torch.Tensor, data: st.DataObject) -> None:
    runs = Runs.of([view])
    base = view if view._base is None else view._base
    before = flat([base])
    at = data.draw(st.integers(0, runs.nbytes - 1))
    nbytes = data.draw(st.integers(1, runs.nbytes - at))
    expected = bytearray(before)
    addresses = [a + i for a, length in runs.spans(at, most=999, most_nbytes=nbytes).tolist() for i in range(length)]
    for address in addresses:
        expected[address - base.data_ptr()] = 0xA5
    new = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    runs.scatter(at, out_of=new.data_ptr(), nbytes=nbytes)
    assert flat([base]) == bytes(expected)


def test_a_tensor_without_elements_has_no_runs() -> None:
    runs = Runs.of([torch.zeros(0, 3), torch.ones(2)[:0]])
    assert (runs.nbytes, runs.num_runs, runs.address) == (0, 0, None)
    assert Runs.of([]).nbytes == 0


WIDE = torch.zeros(4, LEAST)


@pytest.mark.parametrize(
    ("tensor", "worth"),
    [
        (WIDE, True),
        (WIDE[:, : LEAST // 4], True),
        (WIDE[:, : LEAST // 4 - 1], False),
        (torch.zeros(3), True),
        (torch.zeros(()), True),
        (WIDE.t(), False),
        (torch.zeros(LEAST, dtype=torch.complex64).conj(), False),
        (torch.zeros(LEAST, dtype=torch.complex64).conj().imag, False),
    ],
    ids=["whole", "long runs", "short runs", "small and whole", "a scalar", "transposed", "conjugated", "negated"],
)
def test_what_is_left_where_it_is(tensor: torch.Tensor, worth: bool) -> None:
    assert is_worth_leaving(tensor) is worth
