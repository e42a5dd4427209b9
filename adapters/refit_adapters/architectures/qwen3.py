"""Names of Qwen3's checkpoints, dense."""

from collections.abc import Mapping
from typing import ClassVar

from refit_adapters.architectures.llama import Llama


class Qwen3:
    """Llama's names, with a norm on each head's q and k; `attention_bias` puts biases on q, k, v and o."""

    name: ClassVar[str] = "qwen3"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    names: ClassVar[Mapping[str, str]] = {
        **{role: name for role, name in Llama.names.items() if not (role.startswith("mlp.") and "bias" in role)},
        "attention.q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
        "attention.k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    }
    sizes: ClassVar[Mapping[str, str]] = Llama.sizes
