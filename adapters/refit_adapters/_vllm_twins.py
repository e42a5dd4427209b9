"""The parameters of a vLLM model as its loader expects them, in the place of the live ones while the loader is traced.

What runs after loading may have packed a parameter, replaced it, or dropped it. vLLM itself remembers, for its own
reload, what each layer's parameters were when the model was built: class, shape, strides, dtype, loader, as tensors of
the meta device. Those stand in for the live ones; modules and buffers stay what they are.

1. Each live parameter gets the twin that vLLM remembers. Parameters that vLLM keeps as they are (biases, correction
   biases) get a twin made of themselves. A parameter at several places has one twin.
2. What was made after loading has no twin (`made_later`), and what is gone has no live tensor (`gone`).
3. A loader that sets attributes of modules would leave tensors without values behind: that is undone, and refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen

from refit_sdk.errors import LayoutError


@frozen(eq=False)
class Twin:
    """A place of a parameter: its name, the module that has it under `key`, the live tensor and what stands for it."""

    name: str
    module: torch.nn.Module
    key: str
    live: torch.Tensor
    twin: torch.Tensor


@frozen(eq=False)
class Twins:
    """All places, in the model's order; what was made after loading, and names of parameters that are gone."""

    places: tuple[Twin, ...]
    made_later: tuple[tuple[str, torch.nn.Module], ...]
    gone: tuple[str, ...]

    @property
    def first(self) -> dict[str, Twin]:
        """Each tensor once, by the first of its names."""
        found: dict[int, Twin] = {}
        for place in self.places:
            found.setdefault(id(place.twin), place)
        return {place.name: place for place in found.values()}

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """All names of each tensor, by the first."""
        found: dict[int, tuple[str, ...]] = {}
        for each in self.places:
            found[id(each.twin)] = (*found.get(id(each.twin), ()), each.name)
        return {names[0]: names for names in found.values()}


def twins_of(model: torch.nn.Module) -> Twins:
    """Twins of all parameters. `LayoutError` if vLLM remembers nothing of the model."""
    from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize

    places: list[Twin] = []
    made_later: list[tuple[str, torch.nn.Module]] = []
    gone: list[str] = []
    made: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        if module not in layerwise.LAYERWISE_INFO:
            raise LayoutError(f"vLLM doesn't remember how {path or 'the model'} was built, so its layout isn't known")
        remembered: Mapping[str, torch.Tensor] = layerwise.LAYERWISE_INFO[module].restore_metadata[0]
        live = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
        gone += [_joined(path, key) for key in remembered if key not in live]
        for key, tensor in live.items():
            if key not in remembered and key not in meta.SKIP_TENSORS:
                made_later.append((_joined(path, key), module))
                continue
            if id(tensor) not in made:
                twin = meta.to_meta_tensor(remembered.get(key, tensor))
                made[id(tensor)] = sanitize.restore_layer_refs(twin, module)
            places.append(Twin(_joined(path, key), module, key, tensor, made[id(tensor)]))
    return Twins(tuple(places), tuple(made_later), tuple(gone))


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@contextmanager
def in_place(model: torch.nn.Module, twins: Twins) -> Iterator[dict[str, torch.Tensor]]:
    """Twins stand in for live parameters inside the block. `LayoutError` if attributes of modules were set in it."""
    before = {module: _attributes(module) for module in model.modules()}
    try:
        for place in twins.places:
            place.module._parameters[place.key] = place.twin  # type: ignore[assignment]
        yield {name: place.twin for name, place in twins.first.items()}
    finally:
        for place in twins.places:
            place.module._parameters[place.key] = place.live  # type: ignore[assignment]
        changed = [_undo(module, kept) for module, kept in before.items()]
    if any(changed):
        names = sorted(
            {f"{type(module).__name__}.{key}" for module, keys in zip(before, changed, strict=True) for key in keys}
        )
        raise LayoutError(
            f"the loader of {type(model).__name__} makes tensors of its own ({', '.join(names[:4])}), which a push "
            f"wouldn't renew; this model is not supported"
        )


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _undo(module: torch.nn.Module, kept: Mapping[str, Any]) -> list[str]:
    """Give a module its tensors back; which attributes had changed."""
    now = _attributes(module)
    changed = [key for key in {**now, **kept} if now.get(key) is not kept.get(key)]
    for key in changed:
        vars(module).pop(key, None)
        if key in kept:
            vars(module)[key] = kept[key]
    return changed
