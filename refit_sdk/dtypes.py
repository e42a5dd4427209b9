"""Element types by their torch names, without torch: sizes, and which casts keep values.

The wire has the narrower of the two dtypes of a move: narrowing is done by the source, once; lossless widening by
the target.

>>> wire_dtype("float32", "bfloat16"), wire_dtype("bfloat16", "float32")
('bfloat16', 'bfloat16')
"""

from __future__ import annotations

from typing import Final

from refit_sdk.errors import LayoutError

ITEMSIZE: Final[dict[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes of one element, by dtype name."""

_LOSSLESS: Final = {
    "bool": {"uint8", "int8", "int16", "int32", "int64"},
    "uint8": {"int16", "int32", "int64"},
    "int8": {"int16", "int32", "int64"},
    "int16": {"int32", "int64"},
    "int32": {"int64"},
    "bfloat16": {"float32", "float64"},
    "float16": {"float32", "float64"},
    "float32": {"float64"},
    "float8_e4m3fn": {"bfloat16", "float16", "float32", "float64"},
    "float8_e5m2": {"bfloat16", "float16", "float32", "float64"},
}

DEFAULT_CASTS: Final[frozenset[tuple[str, str]]] = frozenset({("float32", "bfloat16")})
"""Value-changing casts that need no declaration."""


def itemsize(dtype: str) -> int:
    """Bytes of one element. `LayoutError` for a name that isn't known.

    >>> itemsize("bfloat16")
    2
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise LayoutError(f"dtype {dtype!r} is not known; known are {', '.join(sorted(ITEMSIZE))}") from None


def is_lossless(source: str, target: str) -> bool:
    """Whether every value of `source` is one of `target`'s.

    >>> is_lossless("bfloat16", "float32"), is_lossless("float32", "bfloat16")
    (True, False)
    """
    return source == target or target in _LOSSLESS.get(source, ())


def wire_dtype(source: str, target: str) -> str:
    """The dtype that travels: the source's where the target widens without loss, else the target's."""
    return source if is_lossless(source, target) else target
