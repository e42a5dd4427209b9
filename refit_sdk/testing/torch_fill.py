"""The judge's bits in torch tensors: any dtype, any strides, any device. Imports nothing of refit_sdk.

>>> import torch
>>> w = torch.zeros(3, 2, dtype=torch.bfloat16)
>>> fill(w.t(), np.array([[0x3F80, 0, 0], [0x4000, 0, 0x8000]], np.uint16))
>>> w.tolist()
[[1.0, 2.0], [0.0, 0.0], [0.0, -0.0]]
>>> [hex(bits) for bits in read(w[2])]
['0x0', '0x8000']
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from refit_sdk.testing.judge import Bits, Storage, poison

_INTEGER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that torch copies on every device, by size."""


def dtype_name(tensor: torch.Tensor) -> str:
    """The judge's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_INTEGER[tensor.element_size()])


def fill(view: torch.Tensor, bits: Bits) -> None:
    """Write bits into a view's storage, in place, whatever its strides."""
    integers = _integers(view)
    if tuple(view.shape) != bits.shape or view.element_size() != bits.itemsize:
        raise ValueError(f"{bits.dtype} {bits.shape} doesn't fill {view.dtype} {tuple(view.shape)}")
    signed = np.ascontiguousarray(bits).view("u1" if bits.itemsize == 1 else f"i{bits.itemsize}")
    integers.copy_(torch.from_numpy(signed.reshape(bits.shape)))


def read(view: torch.Tensor) -> Bits:
    """A copy of the bits of a view, row-major."""
    integers = _integers(view).cpu().contiguous().numpy()
    return integers.view(f"u{view.element_size()}").copy()


def fill_poison(view: torch.Tensor) -> None:
    """Write the judge's poison into a view."""
    fill(view, poison(tuple(view.shape), dtype_name(view)))


def guarded(
    storage: Storage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """A torch view of a guarded block, poisoned. `offset` is in bytes, `strides` in elements. It is on the CPU, or in
    `memory`, a copy of the block's memory on another device.
    """
    bits = storage.view(str(dtype).removeprefix("torch."), shape, strides=strides, offset=offset)
    if memory is None:
        signed = bits.view("u1" if bits.itemsize == 1 else f"i{bits.itemsize}")
        view = torch.from_numpy(signed).view(dtype)
    else:
        steps = [step // bits.itemsize for step in bits.strides]
        begin = storage.place(offset)
        last = sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True)) if bits.size else -1
        view = memory[begin : begin + (last + 1) * bits.itemsize].view(dtype).as_strided(shape, steps)
    fill_poison(view)
    return view
