"""Which checkpoint tensors a parameter stores, by running transformers' own conversion on probes.

Since version 5, transformers may hold a model otherwise than its checkpoint: the experts of a layer as one
`experts.gate_up_proj` of shape (E, 2I, H), or other names. What `save_pretrained` would write is what engines load, so:

1. Every transformers model inside the given one gets a stand-in of its unwrapped class (FSDP and compilers change
   classes, and transformers looks conversions up by class).
2. `revert_weight_conversion`, which `save_pretrained` calls, runs on one probe a parameter: a tensor on the meta
   device, with copies turned off, so that each tensor it returns is a view of a probe.
3. The view's strides and offset say which region of the parameter a checkpoint tensor is, and in which order of dims.
   What isn't a region of one parameter (interleaved, permuted, concatenated) is refused by name.

Parameters outside transformers models are checkpoint tensors as they are.

>>> piece = Piece.whole("w", (4, 2))
>>> piece.take(Box((2, 0), (4, 2)), torch.ones(2, 2))[0]
Box((2, 0), (4, 2))
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from attrs import frozen
from torch.overrides import TorchFunctionMode

from refit_adapters._walk import Place
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError


@frozen
class Piece:
    """A checkpoint tensor as a region of a parameter.

    `name` and `shape` are the checkpoint tensor's; `region` lies in the parameter; `dims` has, for each dim of the
    checkpoint tensor, the parameter's dim that it runs along, or None for a dim of extent 1 that the parameter lacks.
    """

    name: str
    shape: tuple[int, ...]
    region: Box
    dims: tuple[int | None, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Piece:
        """The piece of a parameter that is a checkpoint tensor itself."""
        return cls(name, shape, Box.whole(shape), tuple(range(len(shape))))

    def take(self, box: Box, view: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        """The piece's part of what a view stores of the parameter: its box in the checkpoint tensor, and its view."""
        common = self.region.intersect(box)
        if common is None:
            return None
        inner = common.relative_to(self.region)
        start = (0 if dim is None else inner.start[dim] for dim in self.dims)
        stop = (1 if dim is None else inner.stop[dim] for dim in self.dims)
        return Box(start, stop), self._arranged(view[common.relative_to(box).slices()])

    def _arranged(self, view: torch.Tensor) -> torch.Tensor:
        kept = [dim for dim in self.dims if dim is not None]
        dropped = [dim for dim in range(view.ndim) if dim not in kept]
        view = view.permute([*kept, *dropped])
        for _ in dropped:
            view = view.select(-1, 0)
        for position, dim in enumerate(self.dims):
            view = view.unsqueeze(position) if dim is None else view
        return view


class _KeepViews(TorchFunctionMode):
    """Copies are turned off: what would be copied stays a view of its probe."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def pieces(places: Sequence[Place], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Piece, ...]]:
    """The checkpoint tensors in each named parameter, in the order in which they lie there."""
    found: dict[str, tuple[Piece, ...]] = {name: (Piece.whole(name, shape),) for name, shape in shapes.items()}
    for root in _roots(places):
        inside = {name: shape for name, shape in shapes.items() if name.startswith(root.prefix)}
        found.update(_converted(root, places, inside))
    return found


def _roots(places: Sequence[Place]) -> Iterator[Place]:
    """The outermost transformers models."""
    loaded = sys.modules.get("transformers.modeling_utils")
    outer: list[str] = []
    for place in places:
        covered = any(place.prefix.startswith(prefix) for prefix in outer)
        if loaded is not None and isinstance(place.module, loaded.PreTrainedModel) and not covered:
            outer.append(place.prefix)
            yield place


def _converted(
    root: Place, places: Sequence[Place], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Piece, ...]]:
    probes = {
        name.removeprefix(root.prefix): torch.empty(shape, device="meta", dtype=torch.uint8)
        for name, shape in shapes.items()
    }
    written = _written(root, places, probes)
    of_storage = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    found: dict[str, list[Piece]] = {name: [] for name in probes}
    strange = []
    for name, view in written.items():
        owner = of_storage.get(view.untyped_storage()._cdata, "")
        piece = _decode(root.prefix + name, view, probes[owner]) if owner else None
        if piece is None:
            strange.append(root.prefix + name)
        else:
            found[owner].append(piece)
    _refuse_strange(strange, found, probes, root)
    return {root.prefix + name: tuple(sorted(held, key=lambda piece: piece.region)) for name, held in found.items()}


def _written(root: Place, places: Sequence[Place], probes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model: Any = root.module
    loading = import_module("transformers.core_model_loading") if _converts(model) else None
    if loading is None:
        return probes
    try:
        with _KeepViews():
            written: dict[str, torch.Tensor] = loading.revert_weight_conversion(
                _stand_in(root, places, probes), dict(probes)
            )
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise LayoutError(
            f"{_original(model).__name__}: transformers can't say what it would save ({error}); "
            f"pass a dict of checkpoint names to tensors, or an object with refit_fragments()"
        ) from error
    return written


def _converts(model: Any) -> bool:
    """Whether this transformers converts at saving; an older one must have nothing to rename."""
    if "transformers.core_model_loading" in sys.modules:
        return True
    if getattr(model, "_checkpoint_conversion_mapping", None):
        raise LayoutError(
            f"{_original(model).__name__} has other names in memory than in its checkpoint, and this transformers "
            f"doesn't say which; install transformers 5 or newer"
        )
    return False


def _stand_in(root: Place, places: Sequence[Place], probes: Mapping[str, torch.Tensor]) -> SimpleNamespace:
    """What `revert_weight_conversion` asks of a model, answered with clean names and unwrapped classes."""
    model: Any = root.module
    pretrained = sys.modules["transformers.modeling_utils"].PreTrainedModel
    inner = [
        (place.prefix.removeprefix(root.prefix).removesuffix("."), _bare(place.module))
        for place in places
        if place.prefix.startswith(root.prefix) and isinstance(place.module, pretrained)
    ]
    return SimpleNamespace(
        config=model.config,
        base_model_prefix=model.base_model_prefix,
        _weight_conversions=getattr(model, "_weight_conversions", None),
        named_modules=lambda: iter(inner),
        get_parameter=probes.__getitem__,
    )


def _bare(model: Any) -> Any:
    """An empty instance of a model's own class, with its config: enough to be looked up by."""
    cls: Any = _original(model)
    bare = cls.__new__(cls)
    bare.__dict__["config"] = model.config
    return bare


def _original(model: torch.nn.Module) -> type:
    """A module's class before FSDP replaced it by a subclass of its own."""
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed."))


def _decode(name: str, view: torch.Tensor, probe: torch.Tensor) -> Piece | None:
    """A view of a probe as a region of it and an order of dims; None if it isn't one."""
    along = {stride: dim for dim, stride in enumerate(probe.stride()) if probe.shape[dim] > 1}
    dims = [along.get(stride) if extent > 1 else None for extent, stride in zip(view.shape, view.stride(), strict=True)]
    if any(extent > 1 and dim is None for extent, dim in zip(view.shape, dims, strict=True)):
        return None
    dims = _with_single(dims, view.ndim == probe.ndim)
    extents = dict(zip(dims, view.shape, strict=True))
    start = _coordinate(int(view.storage_offset()), probe)
    stop = [first + extents.get(dim, 1) for dim, first in enumerate(start)]
    if any(last > extent for last, extent in zip(stop, probe.shape, strict=True)):
        return None
    return Piece(name, tuple(view.shape), Box(start, stop), tuple(dims))


def _coordinate(offset: int, probe: torch.Tensor) -> list[int]:
    """Where an element of a contiguous probe lies, given its offset."""
    found = []
    for stride in probe.stride():
        index, offset = divmod(offset, max(stride, 1))
        found.append(index)
    return found


def _with_single(dims: list[int | None], same_ndim: bool) -> list[int | None]:
    """Dims of extent 1 paired with the parameter's leftover dims, in order, where there are as many of both."""
    if not same_ndim:
        return dims
    left = iter(dim for dim in range(len(dims)) if dim not in dims)
    return [next(left) if dim is None else dim for dim in dims]


def _refuse_strange(
    strange: Sequence[str], found: Mapping[str, list[Piece]], probes: Mapping[str, torch.Tensor], root: Place
) -> None:
    partly = [
        root.prefix + name
        for name, held in found.items()
        if sum(piece.region.size for piece in held) != prod(probes[name].shape)
    ]
    if strange or partly:
        raise LayoutError(
            f"{_original(root.module).__name__}: in its checkpoint, {_some(strange) or 'nothing'} isn't a region of "
            f"one parameter, and {_some(partly) or 'no parameter'} isn't written in whole regions; pass a dict of "
            f"checkpoint names to tensors, or an object with refit_fragments()"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
