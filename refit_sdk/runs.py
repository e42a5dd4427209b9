"""The bytes of a message where they lie: runs of memory, in order, in place of one contiguous buffer.

1. A tensor's elements in row-major order are runs of contiguous bytes. Runs of equal length at equal steps are one
   *block*: address of the first, their count, the step from one to the next, the length of each.
2. `spans` gives the runs of any stretch of the message as (address, length) pairs, which is what the calls of operating
   systems that gather and scatter take. Nothing else of a message is ever unfolded.
3. `gather` and `scatter` copy a stretch to and from contiguous memory of this process, whole runs of a block at once.

Addresses are of host memory; the tensors are kept as long as the runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen

Table = npt.NDArray[np.int64]

LEAST: Final = 1024
"""Bytes that runs of a tensor have at least if it pays to leave it where it is; finer ones are faster copied first.
A tensor that is one run stays where it is, however small."""


@frozen(eq=False)
class Runs:
    """Runs of memory. `blocks` is (blocks, 4): address of the first run, number of runs, step, length of a run."""

    blocks: Table
    owners: tuple[torch.Tensor, ...] = ()
    nbytes: int = field(init=False)
    num_runs: int = field(init=False)
    address: int | None = field(init=False)
    """Where all bytes lie, if they are one run."""
    _ends: Table = field(init=False)
    _first: Table = field(init=False)
    """Bytes up to the end of each block, and the number of each block's first run."""
    _flat: Table | None = field(init=False)
    """Address and length of every run, if each block is one."""

    def __attrs_post_init__(self) -> None:
        counts = self.blocks[:, 1]
        ends = np.cumsum(counts * self.blocks[:, 3])
        one_run = len(self.blocks) == 1 and counts[0] == 1
        for name, value in (
            ("_ends", ends),
            ("_first", np.cumsum(counts) - counts),
            ("nbytes", int(ends[-1]) if len(ends) else 0),
            ("num_runs", int(counts.sum())),
            ("address", int(self.blocks[0, 0]) if one_run else None),
            ("_flat", np.ascontiguousarray(self.blocks[:, ::3]) if bool(np.all(counts == 1)) else None),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Runs:
        """The elements of tensors on the host, each in row-major order, one tensor after another.

        >>> wide = torch.arange(12, dtype=torch.uint8).view(3, 4)
        >>> runs = Runs.of([wide[:, :3], wide[0]])
        >>> runs.nbytes, runs.blocks[:, 1:].tolist()
        (13, [[3, 4, 3], [1, 0, 4]])
        """
        tables = [_blocks(tensor) for tensor in tensors]
        return cls(np.concatenate(tables) if tables else np.empty((0, 4), np.int64), tuple(tensors))

    def spans(self, at: int, *, most: int, most_nbytes: int) -> Table:
        """(address, length) of the runs from byte `at` on: at most `most` of them, and at most so many bytes.

        >>> runs = Runs(np.array([[1000, 3, 100, 10]]))
        >>> runs.spans(4, most=2, most_nbytes=100).tolist()
        [[1004, 6], [1100, 10]]
        >>> runs.spans(4, most=9, most_nbytes=8).tolist()
        [[1004, 6], [1100, 2]]
        """
        if not 0 <= at < self.nbytes or most_nbytes < 1:
            return np.empty((0, 2), np.int64)
        if self.address is not None:
            return np.array([[self.address + at, min(self.nbytes - at, most_nbytes)]], np.int64)
        first, inside = self._run_at(at)
        last, _ = self._run_at(min(at + most_nbytes, self.nbytes) - 1)
        found = self._unfolded(first, min(last + 1, first + most))
        found[0] += (inside, -inside)
        found[-1, 1] -= max(0, int(found[:, 1].sum()) - most_nbytes)
        return found

    def _unfolded(self, start: int, stop: int) -> Table:
        """(address, length) of some runs, by number."""
        if self._flat is not None:
            return self._flat[start:stop].copy()
        found = np.empty((stop - start, 2), np.int64)
        numbers = np.arange(start, stop)
        of: Any = self._first.searchsorted(start, side="right") - 1
        if self._first.searchsorted(stop - 1, side="right") - 1 != of:
            of = self._first.searchsorted(numbers, side="right") - 1
        base, _, step, length = self.blocks[of].T
        found[:, 0], found[:, 1] = base + (numbers - self._first[of]) * step, length
        return found

    def _run_at(self, at: int) -> tuple[int, int]:
        """The number of the run that byte `at` is in, and how far into it."""
        block = int(self._ends.searchsorted(at, side="right"))
        _, count, _, length = self.blocks[block].tolist()
        run, inside = divmod(at - (int(self._ends[block]) - count * length), length)
        return int(self._first[block]) + run, inside

    def gather(self, at: int, *, into: int, nbytes: int) -> None:
        """Copy the stretch `at:at + nbytes` to an address of this process.

        >>> held, out = torch.arange(8, dtype=torch.uint8).view(2, 4), torch.zeros(3, dtype=torch.uint8)
        >>> Runs.of([held[:, 1:3]]).gather(1, into=out.data_ptr(), nbytes=3)
        >>> out.tolist()
        [2, 5, 6]
        """
        for address, count, step, length in self._stretches(at, nbytes):
            _copy((into, count, length, length), (address, count, step, length))
            into += count * length

    def scatter(self, at: int, *, out_of: int, nbytes: int) -> None:
        """Copy from an address of this process to the stretch `at:at + nbytes`.

        >>> held, new = torch.zeros(2, 4, dtype=torch.uint8), torch.tensor([7, 8, 9], dtype=torch.uint8)
        >>> Runs.of([held[:, 1:3]]).scatter(1, out_of=new.data_ptr(), nbytes=3)
        >>> held.tolist()
        [[0, 0, 7, 0], [0, 8, 9, 0]]
        """
        for address, count, step, length in self._stretches(at, nbytes):
            _copy((address, count, step, length), (out_of, count, length, length))
            out_of += count * length

    def _stretches(self, at: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Blocks that make up a stretch: a part of a run, whole runs, a part of a run."""
        block = int(np.searchsorted(self._ends, at, side="right"))
        while nbytes:
            address, count, step, length = self.blocks[block].tolist()
            run, inside = divmod(at - (int(self._ends[block]) - count * length), length)
            if inside or nbytes < length:
                taken = (address + run * step + inside, 1, step, min(length - inside, nbytes))
            else:
                taken = (address + run * step, min(count - run, nbytes // length), step, length)
            yield taken
            at, nbytes = at + taken[1] * taken[3], nbytes - taken[1] * taken[3]
            block += at == self._ends[block]


def place_of(table: Table) -> int:
    """The address of a table itself, for a call of the operating system. (`ndarray.ctypes` makes garbage in cycles.)"""
    address: int = table.__array_interface__["data"][0]
    return address


def is_worth_leaving(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are best left where they are: plain numbers on the host, in runs that are long enough.

    >>> wide = torch.zeros(4, 4096)
    >>> is_worth_leaving(wide[:, :2048]), is_worth_leaving(wide[:, :100]), is_worth_leaving(wide.t())
    (True, False, False)
    """
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    shape, strides = _merged(tensor)
    return not shape or (strides[-1] == 1 and shape[-1] * tensor.element_size() >= min(LEAST, tensor.nbytes))


def _merged(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides in elements with all dims merged that can be, dims of one element left out."""
    shape: list[int] = []
    strides: list[int] = []
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if count == 1:
            continue
        if shape and strides[-1] == count * stride:
            shape[-1], strides[-1] = shape[-1] * count, stride
        else:
            shape.append(count)
            strides.append(stride)
    return shape, strides


def _blocks(tensor: torch.Tensor) -> Table:
    """The blocks of one tensor."""
    if not tensor.numel():
        return np.empty((0, 4), np.int64)
    size, (shape, strides) = tensor.element_size(), _merged(tensor)
    if not shape or strides[-1] != 1:
        shape, strides = [*shape, 1], [*strides, 1]
    length = shape[-1] * size
    count, step = (shape[-2], strides[-2] * size) if len(shape) > 1 else (1, 0)
    starts = np.array([tensor.data_ptr()], np.int64)
    for outer, stride in zip(shape[:-2], strides[:-2], strict=True):
        starts = (starts[:, None] + np.arange(outer) * (stride * size)).reshape(-1)
    table = np.empty((len(starts), 4), np.int64)
    table[:, 0], table[:, 1:] = starts, (count, step, length)
    return table


class _Memory:
    """Memory of this process as NumPy sees it."""

    def __init__(self, address: int, count: int, step: int, length: int) -> None:
        self.__array_interface__ = {
            "shape": (count, length),
            "typestr": "|u1",
            "data": (address, False),
            "strides": (step, 1),
            "version": 3,
        }


Block = tuple[int, int, int, int]


def _copy(into: Block, out_of: Block) -> None:
    if into[1] == 1:
        ctypes.memmove(into[0], out_of[0], into[3])
    else:
        target: Any = np.asarray(_Memory(*into))
        np.copyto(target, np.asarray(_Memory(*out_of)))
