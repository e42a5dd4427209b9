"""The judge: what each element of each tensor has to be, written over plain indices. It knows nothing of refit_sdk.

The value of an element is a hash of (seed, version, tensor name, absolute index), finite in its dtype: a rotated shard,
a swapped expert, a layer off by one, a stale version or a tensor never written can't look right. Values are raw bits,
as unsigned integers of the element's size, and are compared as bits.

1. `expected` hashes the absolute flat index of each element of a box with the key of (seed, version, name).
2. `cast` changes dtype as `ml_dtypes` and NumPy do: to nearest, ties to even.
3. `poison` is what a target holds before the first push: NaN where the dtype has one, and never an expected value of a
   float or a bool.
4. `compare` lists the first elements that differ, by absolute coordinate.
5. `Storage` is a block of memory that knows which bytes its views own, and tells which of the others were written.

>>> bits = expected("layers.0.w", (4, 4), (2, 0), (4, 4), "float32", seed=1, version=7)
>>> bits.shape, bits.dtype
((2, 4), dtype('uint32'))
>>> compare(bits, bits)
[]
>>> compare(bits[::-1], bits, start=(2, 0))[0].at
(2, 0)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import frexp, prod
from typing import Any, Final, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

VALUES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
        "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
"""The dtypes that the judge knows, by torch's names."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_AT_ONCE: Final = 1 << 20
_ALSO_FINITE_IN: Final = {"float32": "bfloat16"}
"""What a dtype is cast to without being asked: its values stay finite on the way."""


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer of an element's size.

    >>> bits_dtype("bfloat16")
    dtype('uint16')
    """
    return np.dtype(f"u{VALUES[dtype].itemsize}")


def expected(
    name: str,
    shape: Sequence[int],
    box_start: Sequence[int],
    box_stop: Sequence[int],
    dtype: str,
    seed: int,
    version: int,
    *,
    within: str | None = None,
) -> Bits:
    """The bits of the elements `box_start` to `box_stop` of a tensor of `shape`.

    Values stay finite when they're cast to `within`, too; float32's, unless said otherwise, to bfloat16. Give the dtype
    and `within` of the *source*, and `cast` to the target's.
    """
    hashes = _mix(_mix(_flat_indices(shape, box_start, box_stop) * _GOLDEN + _key(name, seed, version)))
    kind = bits_dtype(dtype)
    bits = hashes >> np.uint64(63 if dtype == "bool" else 64 - 8 * kind.itemsize)
    if VALUES[dtype].kind not in "iub":
        bits = _made_finite(bits, dtype, within or _ALSO_FINITE_IN.get(dtype, dtype))
    return bits.astype(kind).reshape([b - a for a, b in zip(box_start, box_stop, strict=True)])


def _key(name: str, seed: int, version: int) -> np.uint64:
    text = f"{seed}\n{version}\n{name}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def _flat_indices(shape: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> npt.NDArray[np.uint64]:
    """The index in the whole tensor, row-major, of each element of the box."""
    if not len(shape) == len(start) == len(stop) or not all(
        0 <= a <= b <= extent for a, b, extent in zip(start, stop, shape, strict=True)
    ):
        raise ValueError(f"{tuple(start)} to {tuple(stop)} isn't a box of shape {tuple(shape)}")
    indices = np.zeros(1, np.uint64)
    for a, b, extent in zip(start, stop, shape, strict=True):
        along: npt.NDArray[np.uint64] = np.arange(a, b, dtype=np.uint64)
        indices = np.add.outer(indices * np.uint64(extent), along).reshape(-1)
    return indices


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ words >> np.uint64(31))


def _made_finite(bits: npt.NDArray[np.uint64], dtype: str, within: str) -> npt.NDArray[np.uint64]:
    """Exponents that are too large wrap around; what isn't finite even so (the last NaNs of some float8) becomes 0."""
    info = _finfo(dtype)
    mantissa, exponents = np.uint64(info.nmant), np.uint64(1 << int(info.nexp))
    field = (bits >> mantissa) % exponents
    found = bits ^ ((field ^ field % np.uint64(_num_exponents(dtype, within))) << mantissa)
    values = found.astype(bits_dtype(dtype)).view(VALUES[dtype]).astype(np.float64)
    return np.where(np.isfinite(values), found, np.uint64(0))


def _num_exponents(dtype: str, within: str) -> int:
    """How many exponent fields of `dtype`, from 0, are safe: those of finite values, and, for another dtype, of values
    that can't be rounded up to its infinity."""
    own, other = _finfo(dtype), _finfo(within)
    bias = 2 - frexp(float(own.smallest_normal))[1]
    finite, safe = (bias + frexp(float(info.max))[1] for info in (own, other))
    return int(finite if dtype == within else min(finite, safe - 1))


def _finfo(dtype: str) -> Any:
    return ml_dtypes.finfo(VALUES[dtype])  # type: ignore[no-untyped-call]


def cast(bits: Bits, source: str, target: str) -> Bits:
    """The bits in another dtype, rounded to nearest, ties to even.

    >>> cast(np.array([0x3F808000, 0x3F818000], np.uint32), "float32", "bfloat16").tolist() == [0x3F80, 0x3F82]
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(bits.view(VALUES[source]).astype(VALUES[target])).view(bits_dtype(target))


def poison(shape: Sequence[int], dtype: str) -> Bits:
    """What a target holds before anything arrives: NaN in every float, neither true nor false in bool."""
    fnuz = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80}
    byte = 0xA5 if VALUES[dtype].kind in "iu" else fnuz.get(dtype, 0xFF)
    bits = np.full((*shape, bits_dtype(dtype).itemsize), byte, np.uint8)
    return bits.view(bits_dtype(dtype)).reshape(tuple(shape))


class Mismatch(NamedTuple):
    """An element that isn't what it has to be, by its absolute coordinate."""

    at: tuple[int, ...]
    actual: int
    expected: int

    def __str__(self) -> str:
        return f"at {self.at}: {self.actual:#x}, not {self.expected:#x}"


def compare(actual: Bits, expected: Bits, *, start: Sequence[int] | None = None, limit: int = 8) -> list[Mismatch]:
    """The first `limit` elements, row-major, that differ; `start` is the coordinate of the first element."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"bits of {actual.dtype} {actual.shape} can't be compared with {expected.dtype} {expected.shape}"
        )
    origin = np.zeros(actual.ndim, np.int64) if start is None else np.asarray(start, np.int64)
    found = np.argwhere(actual != expected)[:limit]
    return [Mismatch(tuple((at + origin).tolist()), int(actual[tuple(at)]), int(expected[tuple(at)])) for at in found]


class Storage:
    """A block of `nbytes`, with guard bytes before and after it, in which views own what they cover.

    >>> storage = Storage(16)
    >>> columns = storage.view("int16", (2, 2), strides=(4, 1))
    >>> columns[...] = 7
    >>> storage.damage()
    []
    >>> storage.block[5] += 1
    >>> storage.damage()
    [5]
    """

    def __init__(self, nbytes: int, *, margin: int = 64) -> None:
        self._margin = margin
        self._pattern = np.empty(nbytes + 2 * margin, np.uint8)
        for begin in range(0, len(self._pattern), _AT_ONCE):
            places: npt.NDArray[np.uint64] = np.arange(
                begin, min(begin + _AT_ONCE, len(self._pattern)), dtype=np.uint64
            )
            self._pattern[begin : begin + _AT_ONCE] = _mix(places * _GOLDEN) >> np.uint64(56)
        self._bytes = self._pattern.copy()
        self._owned = np.zeros(self._bytes.shape, np.bool_)
        self.block = self._bytes[margin : margin + nbytes]
        """The bytes between the guards."""

    def view(self, dtype: str, shape: Sequence[int], *, strides: Sequence[int] | None = None, offset: int = 0) -> Bits:
        """Bits of the block, from byte `offset`, owned from now on; `strides` are in elements (None: row-major)."""
        kind = bits_dtype(dtype)
        steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))] if strides is None else strides
        in_bytes = tuple(step * kind.itemsize for step in steps)
        last = sum((extent - 1) * step for extent, step in zip(shape, in_bytes, strict=True))
        if offset % kind.itemsize or offset < 0 or offset + last + kind.itemsize > self.block.size:
            raise ValueError(
                f"a view of {dtype} {tuple(shape)} at byte {offset} with strides {tuple(steps)} isn't aligned, or "
                f"leaves the block of {self.block.size} bytes"
            )
        place = self._margin + offset
        np.ndarray((*shape, kind.itemsize), np.bool_, self._owned.data, place, (*in_bytes, 1))[...] = True
        return np.ndarray(tuple(shape), kind, self._bytes.data, place, in_bytes)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The block with its guards, for who keeps a copy of it elsewhere; what is written to it counts."""
        return self._bytes

    def place(self, offset: int) -> int:
        """Where in `memory` byte `offset` of the block is."""
        return self._margin + offset

    def damage(self, *, limit: int = 8) -> list[int]:
        """The first bytes, counted from the start of the block, that no view owns and that were changed."""
        changed = np.flatnonzero((self._bytes != self._pattern) & ~self._owned)
        return [int(at) - self._margin for at in changed[:limit]]
