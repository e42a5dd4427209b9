"""Slots → fragments: what this rank holds, under checkpoint names.

1. Slots that hold the same tensor, or the same memory with the same layout, are one tensor with several names.
2. A tensor is cut into checkpoint tensors (`_checkpoint`), and into the boxes that this rank holds (`_dtensor`).
3. Each overlap of the two is a fragment; further names of a tied tensor are its aliases.

>>> from refit_adapters._walk import walk
>>> for fragment in fragments(walk({"a": torch.ones(2, 3)})):
...     print(fragment.name, fragment.shape, fragment.box)
a (2, 3) [0:2, 0:3]
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from refit_adapters._checkpoint import Piece, pieces
from refit_adapters._dtensor import held, is_dtensor, refuse_foreign
from refit_adapters._walk import Slot, Walked
from refit_sdk.adapter import Fragment
from refit_sdk.errors import LayoutError


def fragments(walked: Walked, *, sharded_last: bool = False) -> tuple[Fragment, ...]:
    """This rank's fragments, in the model's order. `LayoutError` for a tensor that can't be described.

    `sharded_last`: FSDP cut the tensors, after any other axes.
    """
    for slot in walked.slots:
        refuse_foreign(slot.tensor, name=slot.name)
    stored = pieces(walked.places, {slot.name: tuple(slot.tensor.shape) for slot in walked.slots})
    return tuple(
        fragment
        for tied in _tied(walked.slots)
        for fragment in _of_tensor(tied, _with_aliases(tied, stored), sharded_last)
    )


def _of_tensor(
    tied: Sequence[Slot], stored: Sequence[tuple[Piece, tuple[str, ...]]], sharded_last: bool
) -> Iterator[Fragment]:
    for box, view in held(tied[0].tensor, name=tied[0].name, sharded_last=sharded_last).parts:
        for piece, aliases in stored:
            taken = piece.take(box, view)
            if taken is not None:
                yield Fragment(piece.name, piece.shape, *taken, aliases=aliases)


def _tied(slots: Sequence[Slot]) -> list[list[Slot]]:
    groups: dict[Hashable, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(_memory(slot), []).append(slot)
    return list(groups.values())


def _memory(slot: Slot) -> Hashable:
    """Equal for two slots if they're the same memory, laid out alike; a tensor without memory is only itself."""
    tensor: Any = slot.tensor
    inner = tensor._local_tensor if is_dtensor(tensor) else tensor
    plain = type(inner) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or inner.is_meta or inner.layout is not torch.strided or not inner.numel():
        return id(tensor)
    spec = (tensor.device_mesh, tensor.placements) if inner is not tensor else ()
    shape = (tuple(tensor.shape), tuple(inner.shape), inner.stride())
    return (inner.device, inner.data_ptr() or id(tensor), inner.dtype, shape, spec)


def _with_aliases(
    tied: Sequence[Slot], stored: dict[str, tuple[Piece, ...]]
) -> tuple[tuple[Piece, tuple[str, ...]], ...]:
    first, *others = (stored[slot.name] for slot in tied)
    for slot, other in zip(tied[1:], others, strict=True):
        if [(p.region, p.dims) for p in first] != [(p.region, p.dims) for p in other]:
            raise LayoutError(
                f"{tied[0].name} and {slot.name} are tied, but a checkpoint cuts them differently: {len(first)} and "
                f"{len(other)} tensors; untie them, or pass an object with refit_fragments()"
            )
    return tuple(
        (piece, tuple(dict.fromkeys(other[number].name for other in others if other[number].name != piece.name)))
        for number, piece in enumerate(first)
    )
