"""Where a model keeps its tensors: slots with clean names, wrappers stripped, what can't be described refused.

1. A model is a module, a sequence of modules (pipeline stages), or a mapping of names to tensors.
2. Modules are walked along every path, so a module or tensor that is reached twice has two names. Wrappers that only
   add a segment to names are walked through: `_orig_mod`, `_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, and a
   module whose one child is called `module` and which holds nothing else (DDP and its like).
3. Parameters and persistent buffers make slots; other buffers are listed as uncovered.
4. Unmerged LoRA wrappers and parametrizations are refused: no tensor of theirs is the weight that is computed with.

>>> class Wrapper(torch.nn.Module):
...     def __init__(self, inner):
...         super().__init__()
...         self.module = inner
>>> [slot.name for slot in walk(Wrapper(torch.nn.Linear(2, 2))).slots]
['weight', 'bias']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import frozen

from refit_sdk.errors import LayoutError

WRAPPER_KEYS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Keys under which wrappers keep the module they wrap, and which checkpoint names don't have."""

_LORA_KEYS: Final = frozenset({"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})


@frozen(eq=False)
class Slot:
    """One name of one tensor, and the dict that holds it: `owner[key]` is the tensor as it is now."""

    name: str
    owner: Mapping[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the slot holds now."""
        tensor: torch.Tensor = self.owner[self.key]
        return tensor


@frozen(eq=False)
class Place:
    """A module by one of its paths; `prefix` is the clean path with its dot, `""` for the top."""

    prefix: str
    module: torch.nn.Module


@frozen(eq=False)
class Walked:
    """What a walk found: slots in the model's order, modules by every path, and names of non-persistent buffers."""

    slots: tuple[Slot, ...]
    places: tuple[Place, ...]
    uncovered: tuple[str, ...]


def tops(model: Any) -> tuple[torch.nn.Module, ...] | None:
    """The modules that a model is, or None for what is neither a module nor a sequence of modules.

    >>> len(tops([torch.nn.Identity(), torch.nn.Identity()])), tops({"w": torch.ones(1)})
    (2, None)
    """
    if isinstance(model, torch.nn.Module):
        return (model,)
    if isinstance(model, Sequence) and model and all(isinstance(part, torch.nn.Module) for part in model):
        return tuple(model)
    return None


def is_tensor_mapping(model: Any) -> bool:
    """Whether a model is a non-empty mapping of names to tensors.

    >>> is_tensor_mapping({"w": torch.ones(1)}), is_tensor_mapping({})
    (True, False)
    """
    return (
        isinstance(model, Mapping)
        and bool(model)
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in model.items())
    )


def walk(model: Any) -> Walked:
    """Every slot of a model. `LayoutError` for adapters that aren't merged and for one name that means two tensors."""
    modules = tops(model)
    if modules is None:
        slots = tuple(Slot(name, model, name) for name in model)
        return Walked(slots, (), ())
    places = tuple(place for module in modules for place in _places(module, ""))
    _refuse_wrapped_weights(places)
    slots = _one_tensor_a_name(slot for place in places for slot in _slots(place))
    return Walked(slots, places, tuple(name for place in places for name in _uncovered(place)))


def _places(module: torch.nn.Module, prefix: str) -> Iterator[Place]:
    yield Place(prefix, module)
    for key, child in module._modules.items():
        if child is not None:
            yield from _places(child, prefix if _is_wrapped(module, key) else f"{prefix}{key}.")


def _is_wrapped(module: torch.nn.Module, key: str) -> bool:
    bare = len(module._modules) == 1 and not module._parameters and not module._buffers
    return key in WRAPPER_KEYS or (key == "module" and bare)


def _slots(place: Place) -> Iterator[Slot]:
    module = place.module
    for owner in (module._parameters, module._buffers):
        for key, tensor in owner.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield Slot(place.prefix + key, owner, key)


def _uncovered(place: Place) -> Iterator[str]:
    module = place.module
    for key in sorted(module._non_persistent_buffers_set):
        if module._buffers.get(key) is not None:
            yield place.prefix + key


def _one_tensor_a_name(slots: Iterator[Slot]) -> tuple[Slot, ...]:
    found: dict[str, Slot] = {}
    for slot in slots:
        if found.setdefault(slot.name, slot).tensor is not slot.tensor:
            raise LayoutError(
                f"two tensors have the checkpoint name {slot.name!r}, once wrapper prefixes are stripped; "
                f"rename one, or pass the modules in a dict of your own names to tensors"
            )
    return tuple(found.values())


def _refuse_wrapped_weights(places: Sequence[Place]) -> None:
    lora = [place.prefix for place in places if _LORA_KEYS & {*place.module._modules, *place.module._parameters}]
    if lora:
        raise LayoutError(
            f"{_some(lora)}: wrapped by a LoRA adapter (base_layer, lora_A, lora_B), so no tensor here is the weight "
            f"that is computed with; pass the model that merge_and_unload() returns, or one without the adapter"
        )
    changed = [place.prefix for place in places if "parametrizations" in place.module._modules]
    if changed:
        raise LayoutError(
            f"{_some(changed)}: parametrized, so the weight is computed at each use; "
            f"call torch.nn.utils.parametrize.remove_parametrizations first"
        )


def _some(prefixes: Sequence[str]) -> str:
    names = [prefix.removesuffix(".") or "the model itself" for prefix in prefixes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
