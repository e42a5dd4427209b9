"""Names of Llama's checkpoints (Llama 2 and 3, and models that say they are Llama)."""

from collections.abc import Mapping
from typing import ClassVar


class Llama:
    """Attention with q, k and v by themselves, gate and up by themselves, two norms a layer."""

    name: ClassVar[str] = "llama"
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    names: ClassVar[Mapping[str, str]] = {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "attention.norm": "model.layers.{layer}.input_layernorm.weight",
        "attention.q": "model.layers.{layer}.self_attn.q_proj.weight",
        "attention.k": "model.layers.{layer}.self_attn.k_proj.weight",
        "attention.v": "model.layers.{layer}.self_attn.v_proj.weight",
        "attention.o": "model.layers.{layer}.self_attn.o_proj.weight",
        "attention.q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
        "attention.k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
        "attention.v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
        "attention.o_bias": "model.layers.{layer}.self_attn.o_proj.bias",
        "mlp.norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "mlp.gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "mlp.up": "model.layers.{layer}.mlp.up_proj.weight",
        "mlp.down": "model.layers.{layer}.mlp.down_proj.weight",
        "mlp.gate_bias": "model.layers.{layer}.mlp.gate_proj.bias",
        "mlp.up_bias": "model.layers.{layer}.mlp.up_proj.bias",
        "mlp.down_bias": "model.layers.{layer}.mlp.down_proj.bias",
    }
    sizes: ClassVar[Mapping[str, str]] = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "mlp": "intermediate_size",
    }
