"""A cheap value that changes when any described storage is rebound, resized or reshaped, or a tensor comes or goes.

1. The dicts that hold the tensors and the modules are remembered, once, so no module tree is walked again.
2. A look collects which keys those dicts have that aren't None; which object stands at each module's path; and for
   every described tensor which object it is, and how its bits are read. The hash of all that is the identity.

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

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from refit_adapters._walk import Walked

_PLAIN: Final = frozenset({torch.nn.Parameter, torch.Tensor})
_NOTHING: Final = torch.empty(0)


def states(tensors: Sequence[torch.Tensor | None]) -> int:
    """A hash of where tensors' bits are and how they are read. A DTensor's is that of its local tensor.

    Twenty thousand tensors are looked at twice in a push. So each is asked in one go, while it is in the processor's
    cache, and no tuple a tensor stays, which would wake the garbage collector.

    >>> tensors = [torch.ones(2), None]
    >>> states(tensors) == states(tensors), states(tensors) == states([torch.ones(2), None])
    (True, False)
    """
    stored: Sequence[Any] = tensors if _PLAIN.issuperset(map(type, tensors)) else list(map(_stored, tensors))
    each = [hash((t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg())) for t in stored]
    return hash(tuple(each))


def _stored(tensor: Any) -> Any:
    return _NOTHING if tensor is None else getattr(tensor, "_local_tensor", tensor)


class Watch:
    """Remembers where the tensors and modules of a walk are kept; `look` is the identity of what is there now."""

    def __init__(self, walked: Walked) -> None:
        modules = [place.module for place in walked.places]
        dicts = [held for module in modules for held in (module._parameters, module._buffers, module._modules)]
        self._owners = list({id(owner): owner for owner in (*dicts, *(slot.owner for slot in walked.slots))}.values())
        self._children: list[Mapping[str, Any]] = [module._modules for module in modules]
        self._tensors: list[tuple[Mapping[str, Any], str]] = [(slot.owner, slot.key) for slot in walked.slots]
        self._kept = [child for children in self._children for child in children.values()]

    def look(self) -> int:
        """The identity now: one hash, equal as long as nothing came, went, was rebound or reshaped."""
        keys = [hash(tuple([key for key, held in owner.items() if held is not None])) for owner in self._owners]
        modules = [id(child) for children in self._children for child in children.values()]
        tensors = [owner.get(key) for owner, key in self._tensors]
        return hash((tuple(keys), tuple(modules), tuple(map(id, tensors)), states(tensors)))
