"""A cheap value that changes when any described storage is rebound, resized or reshaped.

1. The dicts that hold the tensors and the modules are remembered, once, so no names are walked again.
2. A look collects, for every tensor, which object it is, its address, shape, strides and dtype; and for every module,
   which object stands at its path. The hash of all that is the identity.

Addresses can't be reused unnoticed while someone keeps the described views, which a session does.

>>> from refit_adapters._walk import walk
>>> layer = torch.nn.Linear(2, 2)
>>> watch = Watch(walk(layer))
>>> before = watch.look()
>>> watch.look() == before
True
>>> layer.weight.data = layer.weight.data.clone()
>>> watch.look() == before
False
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from refit_adapters._walk import Walked

_PLAIN: Final = (torch.nn.Parameter, torch.Tensor)


def state(tensor: torch.Tensor | None) -> int:
    """A hash of what changes when a tensor is rebound, resized or reshaped. A DTensor's is that of its local tensor.

    It's one integer, as twenty thousand tuples at a time would wake the garbage collector.

    >>> tensor = torch.ones(2)
    >>> state(tensor) == state(tensor), state(tensor) == state(torch.ones(2))
    (True, False)
    """
    if tensor is None:
        return 0
    inner: Any = getattr(tensor, "_local_tensor", tensor) if type(tensor) not in _PLAIN else tensor
    return hash((inner.data_ptr(), inner.shape, inner.stride(), inner.dtype))


class Watch:
    """Remembers where the tensors and modules of a walk are kept; `look` is the identity of what is there now."""

    def __init__(self, walked: Walked) -> None:
        self._tensors: list[tuple[Mapping[str, Any], str]] = [(slot.owner, slot.key) for slot in walked.slots]
        self._modules: list[tuple[Mapping[str, Any], str]] = [
            (place.module._modules, key) for place in walked.places for key in place.module._modules
        ]
        self._kept = [owner.get(key) for owner, key in self._modules]

    def look(self) -> int:
        """The identity now: one hash, equal as long as nothing was rebound or reshaped."""
        modules = hash(tuple([id(owner.get(key)) for owner, key in self._modules]))
        tensors = [owner.get(key) for owner, key in self._tensors]
        return hash((modules, tuple(map(id, tensors)), tuple(map(state, tensors))))
