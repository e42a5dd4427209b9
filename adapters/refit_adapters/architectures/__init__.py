"""Architectures as data: one module each, registered through the door by which users add their own.

>>> names_for({"model_type": "qwen3"}).names["attention.q_norm"]
'model.layers.{layer}.self_attn.q_norm.weight'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refit_adapters.architectures.deepseek_v3 import DeepseekV3
from refit_adapters.architectures.llama import Llama
from refit_adapters.architectures.nemotron_h import NemotronH
from refit_adapters.architectures.qwen2 import Qwen2
from refit_adapters.architectures.qwen3 import Qwen3
from refit_adapters.architectures.qwen3_moe import Qwen3Moe
from refit_sdk.adapter import Architecture
from refit_sdk.errors import LayoutError, PluginError
from refit_sdk.hookspecs import hookimpl
from refit_sdk.plugins import registry


def names_for(config: Mapping[str, Any]) -> type[Architecture] | None:
    """The architecture whose `model_types` have the config's, among all that plug-ins offer; None if there is none.

    `LayoutError` for a config without a `model_type`, `PluginError` for one that two architectures are for.
    """
    model_type = config.get("model_type")
    if not model_type:
        raise LayoutError(
            "the Hugging Face config has no model_type, so it isn't known what its checkpoint's tensors are called; "
            "pass the config.json that the checkpoint has"
        )
    found = [offer for offer in registry().offers_of("architecture") if model_type in offer.offered.model_types]
    if len(found) > 1:
        raise PluginError(
            f"model_type {model_type!r} is claimed by {' and '.join(f'{o.name!r} of {o.origin}' for o in found)}; "
            f"turn one off with REFIT_PLUGINS=-{found[-1].origin.plugin}",
            plugin=found[-1].name,
        )
    return found[0].offered if found else None


@hookimpl
def refit_register_architectures() -> list[type[Architecture]]:
    """The architectures of this package."""
    return [DeepseekV3, Llama, NemotronH, Qwen2, Qwen3, Qwen3Moe]
