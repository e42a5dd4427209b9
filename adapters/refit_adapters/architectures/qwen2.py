"""Names of Qwen2's checkpoints (Qwen2 and Qwen2.5, dense)."""

from collections.abc import Mapping
from typing import ClassVar

from refit_adapters.architectures.llama import Llama


class Qwen2:
    """Llama's names with biases on q, k and v alone."""

    name: ClassVar[str] = "qwen2"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    names: ClassVar[Mapping[str, str]] = {
        role: name
        for role, name in Llama.names.items()
        if role not in ("attention.o_bias", "mlp.gate_bias", "mlp.up_bias", "mlp.down_bias")
    }
    sizes: ClassVar[Mapping[str, str]] = Llama.sizes
