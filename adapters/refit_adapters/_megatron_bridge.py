"""Names of architectures that no table is for, from Megatron-Bridge where it's installed: names only, no data.

1. Megatron-Bridge is asked once for each kind of parameter, under a layer's and an expert's number that nothing else
   has; where these are in the names that come back, `{layer}` and `{expert}` go.
2. Only mappings that do nothing but rename, cut and fuse as our own formats do are taken: the others, and bridges that
   change values on the way, would give a checkpoint another model. What isn't taken has no name, and is refused later.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Final

from refit_adapters._megatron_keys import INSIDE, OUTSIDE, QKV
from refit_sdk.adapter import Architecture
from refit_sdk.errors import LayoutError

_LAYER: Final = "70001"
_EXPERT: Final = "80002"
_RENAMING: Final = frozenset(
    {"DirectMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "AutoMapping"}
)
_HALVES: Final = {"weight_w": "gate", "weight_v": "up", "bias_w": "gate", "bias_v": "up"}
_CHANGING: Final = ("maybe_modify_loaded_hf_weight", "maybe_modify_converted_hf_weight")

Lookup = Callable[[str], Any]


def names_from_bridge(config: Mapping[str, Any]) -> type[Architecture] | None:
    """The architecture of a config as Megatron-Bridge names it; None where it isn't installed or doesn't know it."""
    if not _is_installed():
        return None
    bridge = _bridge(config)
    if bridge is None:
        return None
    changed = _changing(type(bridge))
    if changed:
        raise LayoutError(
            f"no architecture is known for model_type {config.get('model_type')!r}, and Megatron-Bridge's "
            f"{type(bridge).__name__} changes values on the way ({', '.join(changed)}), so its names alone don't do; "
            f"register an architecture (refit_register_architectures)"
        )
    found = dict(_names(bridge.mapping_registry().megatron_to_hf_lookup))

    class FromBridge:
        """Names that Megatron-Bridge gave."""

        name: ClassVar[str] = f"{config.get('model_type')} (by Megatron-Bridge)"
        model_types: ClassVar[tuple[str, ...]] = (str(config.get("model_type")),)
        names: ClassVar[Mapping[str, str]] = found
        sizes: ClassVar[Mapping[str, str]] = {
            "vocab": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers",
        }  # fmt: skip

    return FromBridge if found else None


def _changing(bridge: type) -> list[str]:
    """The methods by which a bridge changes values, among those that its base leaves alone."""
    base = next((cls for cls in bridge.__mro__ if cls.__name__ == "MegatronModelBridge"), bridge)
    return [name for name in _CHANGING if getattr(bridge, name, None) is not getattr(base, name, None)]


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ImportError:
        return False


def _bridge(config: Mapping[str, Any]) -> Any:
    bridges, transformers = import_module("megatron.bridge"), import_module("transformers")
    try:
        made = bridges.AutoBridge.from_hf_config(transformers.AutoConfig.for_model(**config))._model_bridge
    except (ValueError, KeyError, NotImplementedError):
        return None
    return made


def _names(lookup: Lookup) -> Iterator[tuple[str, str]]:
    for key, role in OUTSIDE.items():
        yield from _named(lookup, key, {"": role})
    for key, role in INSIDE.items():
        parameter, half = _parameter(key)
        yield from _named(lookup, f"decoder.layers.{_LAYER}.{parameter}", {half: role})
    for key, roles in QKV.items():
        yield from _named(lookup, f"decoder.layers.{_LAYER}.{key}", dict(zip("qkv", roles, strict=True)))


def _parameter(key: str) -> tuple[str, str]:
    """The parameter that a key is of, and which half of it. Experts' weights carry the number at the end.

    >>> _parameter("mlp.experts.experts.{}.linear_fc1.weight_w")
    ('mlp.experts.linear_fc1.weight80002', 'gate')
    """
    stem, _, last = key.rpartition(".")
    half = _HALVES.get(last, "")
    parameter = f"{stem}.{last[:-2]}" if half else key
    if "experts.{}." in parameter:
        parameter = parameter.replace("experts.{}.", "", 1) + _EXPERT
    return parameter, half


def _named(lookup: Lookup, parameter: str, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of a parameter's parts, for the roles that they have."""
    mapping = lookup(parameter)
    kind = type(mapping).__name__
    names = getattr(mapping, "hf_param", None)
    if kind in _RENAMING and isinstance(names, str) and getattr(mapping, "permute_dims", None) is None:
        names = {"": names}
    elif kind not in ("QKVMapping", "GatedMLPMapping") or not isinstance(names, Mapping):
        return
    for part, role in roles.items():
        if part in names:
            yield role, names[part].replace(_LAYER, "{layer}").replace(_EXPERT, "{expert}")
