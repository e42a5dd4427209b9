"""A live view as NumPy integers of its element's size, on the host: what digests are made of.

>>> host_bits(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist()
[16256, 49152]
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_INTEGERS: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def host_bits(view: torch.Tensor) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The elements' bits, shape as the view's. A view of host memory is not copied."""
    plain = view.detach()
    bits: npt.NDArray[np.unsignedinteger[Any]] = plain.view(_INTEGERS[plain.element_size()]).cpu().numpy()
    return bits
