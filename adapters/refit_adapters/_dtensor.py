"""The edge to torch's tensors: what one rank stores of a tensor, as boxes and views of them.

1. A tensor that isn't plain strided memory on a device is refused by name: meta, sparse, freed, lazily made, or a
   wrapper class of another library. So are tensors that carry another framework's mark of a sharding
   (`refuse_foreign`, before anything is asked of the tensor).
2. A plain tensor is the whole tensor. A DTensor's mesh and placements become a `Layout`; the mesh is numbered by
   position, because only this rank's coordinate matters, and the local tensor must have the layout's local shape.
3. Empty shards, and meshes that this rank isn't in, store nothing.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Final

import torch
from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard

_FOREIGN_MARKS: Final = {
    "ds_id": "DeepSpeed ZeRO-3 partitions it; gather it first, or train with FSDP2",
    "tensor_model_parallel": "Megatron shards it; use the megatron adapter",
    "_is_flat_param": "FSDP1 flattened it; wrap the model with torch.distributed.fsdp.fully_shard (FSDP2)",
    "_is_sharded": "FSDP1 shards it; wrap the model with torch.distributed.fsdp.fully_shard (FSDP2)",
}


@frozen(eq=False)
class Held:
    """What one rank stores of a tensor of this shape: (box of the whole tensor, view that stores it) pairs."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, torch.Tensor], ...]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; imports nothing.

    >>> is_dtensor(torch.ones(2))
    False
    """
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank: a DTensor's local tensor, or the tensor itself, outside autograd."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        inner: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return inner.detach()


def held(tensor: torch.Tensor, *, name: str, sharded_last: bool = False) -> Held:
    """What this rank stores of a tensor. `LayoutError`, with `name`, for what can't be understood.

    `sharded_last`: FSDP cut the tensor, so axes whose placement is strided cut after those to their right.

    >>> held(torch.ones(2, 3), name="w").parts[0][0]
    Box((0, 0), (2, 3))
    """
    shape = tuple(tensor.shape)
    view = _plain(local(tensor), name)
    if is_dtensor(tensor):
        return Held(shape, _shards(tensor, view, name, sharded_last))
    return Held(shape, ((Box.whole(shape), view),) if view.numel() else ())


def _shards(tensor: Any, view: torch.Tensor, name: str, sharded_last: bool) -> tuple[tuple[Box, torch.Tensor], ...]:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    layout, rank = _layout(tensor, name, sharded_last), _position(coordinate, tuple(mesh.shape))
    expected = layout.local_shape(shape, rank=rank)
    if expected != tuple(view.shape):
        raise LayoutError(
            f"{name}: the local tensor has shape {tuple(view.shape)}, but {_placed(tensor)} of {shape} gives this rank "
            f"{expected}; shards cut by hand need explicit boxes: pass an object with refit_fragments()"
        )
    parts = layout.parts(shape, rank=rank)
    return tuple((box, view[inside.slices()]) for box, inside in parts)


def _layout(tensor: Any, name: str, sharded_last: bool) -> Layout:
    mesh = tensor.device_mesh
    placements = tuple(_placement(placement, tensor, name) for placement in tensor.placements)
    layout = Layout(Mesh(range(prod(mesh.shape)), shape=mesh.shape, axes=mesh.mesh_dim_names), placements)
    return layout.in_cutting_order() if sharded_last else layout


def _placement(placement: Any, tensor: Any, name: str) -> Shard | StridedShard | Replicate:
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "_StridedShard":
        return StridedShard(placement.dim, int(placement.split_factor))
    if kind == "Replicate":
        return Replicate()
    raise LayoutError(
        f"{name}: placement {placement!r} in {_placed(tensor)} says no region of the tensor; "
        f"redistribute it to Shard and Replicate placements first"
    )


def _position(coordinate: list[int], shape: tuple[int, ...]) -> int:
    position = 0
    for index, extent in zip(coordinate, shape, strict=True):
        position = position * extent + index
    return position


def _placed(tensor: Any) -> str:
    placements = ", ".join(map(str, tensor.placements))
    return f"placements ({placements}) on a mesh of {tuple(tensor.device_mesh.shape)}"


def refuse_foreign(tensor: torch.Tensor, *, name: str) -> None:
    """`LayoutError` for a tensor that has no shape yet, or whose shape isn't the whole as another framework cut it.

    >>> refuse_foreign(torch.nn.UninitializedParameter(), name="w")
    Traceback (most recent call last):
        ...
    refit_sdk.errors.LayoutError: w: it isn't initialised yet; run the module once
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise LayoutError(f"{name}: it isn't initialised yet; run the module once")
    for mark, reason in _FOREIGN_MARKS.items():
        if getattr(tensor, mark, None) not in (None, False):
            raise LayoutError(f"{name}: its sharding isn't known here ({mark} is set): {reason}")


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    reason = _not_plain(tensor)
    if reason:
        raise LayoutError(f"{name}: {reason}; only plain strided memory can be described")
    return tensor


def _not_plain(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "it is on the meta device and has no memory: load or initialise the model first"
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return f"it is a {type(tensor).__name__}, which wraps its memory in a way that isn't known here"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"its layout is {'quantized' if tensor.is_quantized else tensor.layout}"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "its storage was freed or offloaded: bring it back before describing it"
    return ""
