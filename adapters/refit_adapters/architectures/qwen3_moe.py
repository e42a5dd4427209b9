"""Names of Qwen3's checkpoints with experts."""

from collections.abc import Mapping
from typing import ClassVar

from refit_adapters.architectures.qwen3 import Qwen3


class Qwen3Moe:
    """Qwen3's names; layers with experts have a router, and each expert's three projections by themselves."""

    name: ClassVar[str] = "qwen3_moe"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    names: ClassVar[Mapping[str, str]] = {
        **Qwen3.names,
        "router": "model.layers.{layer}.mlp.gate.weight",
        "expert.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "expert.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        "expert.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    }
    sizes: ClassVar[Mapping[str, str]] = {
        **Qwen3.sizes,
        "experts": "num_experts|num_local_experts",
        "expert_mlp": "moe_intermediate_size",
    }
