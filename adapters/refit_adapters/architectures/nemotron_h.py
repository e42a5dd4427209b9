"""Names of Nemotron-H's checkpoints: Mamba, attention, dense and expert layers in a pattern, one mixer a layer."""

from collections.abc import Mapping
from typing import ClassVar


class NemotronH:
    """Every layer has one norm and one mixer; projections of the dense and expert mixers aren't gated."""

    name: ClassVar[str] = "nemotron_h"
    model_types: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    names: ClassVar[Mapping[str, str]] = {
        "embed": "backbone.embeddings.weight",
        "head": "lm_head.weight",
        "final_norm": "backbone.norm_f.weight",
        "attention.norm": "backbone.layers.{layer}.norm.weight",
        "attention.q": "backbone.layers.{layer}.mixer.q_proj.weight",
        "attention.k": "backbone.layers.{layer}.mixer.k_proj.weight",
        "attention.v": "backbone.layers.{layer}.mixer.v_proj.weight",
        "attention.o": "backbone.layers.{layer}.mixer.o_proj.weight",
        "mlp.norm": "backbone.layers.{layer}.norm.weight",
        "mlp.up": "backbone.layers.{layer}.mixer.up_proj.weight",
        "mlp.down": "backbone.layers.{layer}.mixer.down_proj.weight",
        "router": "backbone.layers.{layer}.mixer.gate.weight",
        "router.bias": "backbone.layers.{layer}.mixer.gate.e_score_correction_bias",
        "latent.in": "backbone.layers.{layer}.mixer.fc1_latent_proj.weight",
        "latent.out": "backbone.layers.{layer}.mixer.fc2_latent_proj.weight",
        "expert.up": "backbone.layers.{layer}.mixer.experts.{expert}.up_proj.weight",
        "expert.down": "backbone.layers.{layer}.mixer.experts.{expert}.down_proj.weight",
        "shared.up": "backbone.layers.{layer}.mixer.shared_experts.up_proj.weight",
        "shared.down": "backbone.layers.{layer}.mixer.shared_experts.down_proj.weight",
        "mamba.norm": "backbone.layers.{layer}.norm.weight",
        "mamba.in": "backbone.layers.{layer}.mixer.in_proj.weight",
        "mamba.conv": "backbone.layers.{layer}.mixer.conv1d.weight",
        "mamba.conv_bias": "backbone.layers.{layer}.mixer.conv1d.bias",
        "mamba.a_log": "backbone.layers.{layer}.mixer.A_log",
        "mamba.d": "backbone.layers.{layer}.mixer.D",
        "mamba.dt_bias": "backbone.layers.{layer}.mixer.dt_bias",
        "mamba.gate_norm": "backbone.layers.{layer}.mixer.norm.weight",
        "mamba.out": "backbone.layers.{layer}.mixer.out_proj.weight",
    }
    sizes: ClassVar[Mapping[str, str]] = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "layers": "layers_block_type|hybrid_override_pattern|num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim|attention_head_dim",
        "mlp": "intermediate_size",
        "mamba_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_groups": "n_groups",
        "mamba_state": "ssm_state_size",
        "conv": "conv_kernel",
        "experts": "n_routed_experts",
        "expert_in": "moe_latent_size",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "moe_shared_expert_intermediate_size",
    }
