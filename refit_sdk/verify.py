"""Digests of weights that don't depend on how they're cut: for tied tensors, replicas and checks of a whole push.

The digest of a region is the sum, mod 2⁶⁴, over its elements, of a hash of the element's bits and its place: the
digests of disjoint regions add up to that of their union, so ranks that cut a tensor differently find the same number.

1. An element's place is its flat index in the whole tensor, row-major, and counts with its bytes per element.
2. The term is `mix(mix(place) ^ bits)`, where `mix` is the finaliser of splitmix64 (Steele, Lea, Flood, 2014). It is
   one-to-one, so any change of one element's bits changes the sum; swapped elements do unless two hashes collide.
3. Regions are read in chunks, so that memory is bounded whatever their size.

It tells faults apart, not forgeries: who chooses the bits can make them collide.

>>> weight = np.arange(12, dtype="float32").reshape(3, 4)
>>> whole = digest(weight, box=Box.whole((3, 4)), shape=(3, 4))
>>> halves = [digest(weight[:, :2], box=Box((0, 0), (3, 2)), shape=(3, 4)),
...           digest(weight[:, 2:], box=Box((0, 2), (3, 4)), shape=(3, 4))]
>>> combine(halves) == whole
True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError

Words: TypeAlias = npt.NDArray[np.uint64]

CHUNK: Final = 1 << 16
"""Elements that are read at a time: some 2 MiB of temporaries."""
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def digest(values: Any, *, box: Box, shape: tuple[int, ...]) -> int:
    """The digest of the elements `box` of a tensor of `shape`, from 0 to 2⁶⁴.

    `values` is a NumPy array, or anything with the buffer protocol, of shape `box.shape`, with any strides; only its
    bits count. Elements have 1, 2, 4 or 8 bytes. A torch dtype that NumPy lacks is given as integers of its size.
    """
    bits = _bits(values)
    if bits.shape != box.shape or not Box.whole(shape).contains(box):
        raise LayoutError(f"a digest of {box} of shape {shape} was asked for, and values of shape {bits.shape} given")
    steps = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    total = 0
    for part in _chunks(box):
        words = mix(_places(part, steps, bits.itemsize))
        words ^= bits[part.relative_to(box).slices()].reshape(-1)
        total += int(mix(words).sum(dtype=np.uint64))
    return total & _MASK


def combine(digests: Iterable[int]) -> int:
    """The digest of a union of disjoint regions.

    >>> combine([2**64 - 1, 3])
    2
    """
    return sum(digests) & _MASK


def mix(words: Words) -> Words:
    """The finaliser of splitmix64, word by word, in place.

    >>> [hex(word) for word in mix(np.array([0, 0x9E3779B97F4A7C15], np.uint64)).tolist()]
    ['0x0', '0xe220a8397b1dcdaf']
    """
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _bits(values: Any) -> npt.NDArray[np.unsignedinteger[Any]]:
    array = np.asarray(values)
    if array.dtype.hasobject or array.itemsize not in (1, 2, 4, 8):
        raise LayoutError(f"a digest of {array.dtype} values was asked for; elements have 1, 2, 4 or 8 bytes")
    return array.view(f"u{array.itemsize}")


def _chunks(box: Box) -> Iterator[Box]:
    """The box cut into boxes of at most `CHUNK` elements, along the outermost dims that need it."""
    if box.size <= CHUNK:
        if box.size:
            yield box
        return
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    rows = max(1, CHUNK * box.shape[dim] // box.size)
    for start in range(box.start[dim], box.stop[dim], rows):
        yield from _chunks(box.narrow(dim, start, min(start + rows, box.stop[dim])))


def _places(box: Box, steps: tuple[int, ...], itemsize: int) -> Words:
    """The hash input of each place, row-major: the flat index, in a sequence of its own for each element size."""
    places = np.array([(itemsize * _GOLDEN) & _MASK], np.uint64)
    for start, stop, step in zip(box.start, box.stop, steps, strict=True):
        along = np.arange(start, stop, dtype=np.uint64) * np.uint64(step)
        places = (places[:, None] + along).reshape(-1)
    return places
