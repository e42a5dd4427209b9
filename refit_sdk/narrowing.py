"""Narrowing casts: has a finite value become infinite on the way to the wire?

What was packed is looked at first, as one run of numbers. Only if that run has an infinity or a NaN in it (which a
tensor may well have had before) are its tensors looked at one by one, in blocks, so that little memory is needed.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen

from refit_sdk.dtypes import is_lossless
from refit_sdk.errors import RefitError

_BLOCK: Final = 1 << 18
"""Elements looked at in one go: their copy in float64 is 2 MiB."""


class NarrowingError(RefitError):
    """A finite value became infinite on the way to the wire's dtype."""


@frozen(eq=False)
class Narrowed:
    """A live view of a tensor that is sent, or copied, as another dtype."""

    name: str
    view: torch.Tensor
    dtype: torch.dtype

    def check(self) -> None:
        """`NarrowingError` naming the tensor if a finite value of it has no finite counterpart."""
        if _overflows(self.view, self.dtype):
            raise NarrowingError(
                f"{self.name}: a finite value of {_word(self.view.dtype)} became infinite as {_word(self.dtype)}; the "
                "tensor doesn't fit that dtype: keep it wider on the targets, or find why the value grew"
            )


@frozen(eq=False)
class NarrowedRun:
    """Narrowed tensors that were packed into one run of numbers (others may lie between them)."""

    packed: torch.Tensor
    tensors: tuple[Narrowed, ...]

    def check(self) -> None:
        """`NarrowingError` naming the first tensor of which a finite value became infinite."""
        if not _all_finite(self.packed):
            for tensor in self.tensors:
                tensor.check()


def may_overflow(source: torch.dtype, wire: torch.dtype) -> bool:
    """Whether a cast could make an infinity of a finite value.

    >>> may_overflow(torch.float32, torch.bfloat16), may_overflow(torch.bfloat16, torch.float32)
    (True, False)
    """
    floats = source.is_floating_point and wire.is_floating_point
    return floats and not is_lossless(_word(source), _word(wire))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _all_finite(values: torch.Tensor) -> bool:
    """Of a 1-D tensor. aminmax makes no temporary and keeps NaN; it doesn't know one-byte floats."""
    if values.element_size() == 1:
        return all(_all_finite(block.float()) for block in torch.split(values, _BLOCK))
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())


def _overflows(view: torch.Tensor, dtype: torch.dtype) -> bool:
    if view.numel() > _BLOCK:
        longest = max(range(view.ndim), key=lambda dim: view.shape[dim])
        return any(_overflows(half, dtype) for half in view.tensor_split(2, dim=longest))
    cast = view.to(dtype)
    return not _all_finite(cast.reshape(-1)) and bool((_finite(view) & ~_finite(cast)).any())


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).isfinite()
