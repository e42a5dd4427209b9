"""Names of DeepSeek-V3's checkpoints (V3, V3.1, R1), without the scales of its FP8 form."""

from collections.abc import Mapping
from typing import ClassVar


class DeepseekV3:
    """Latent attention, experts with shared ones beside them, and MTP layers numbered after the others.

    An MTP layer's own copies of the embedding and the head (`embed_tokens`, `shared_head.head`) are the model's.
    """

    name: ClassVar[str] = "deepseek_v3"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    names: ClassVar[Mapping[str, str]] = {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "attention.norm": "model.layers.{layer}.input_layernorm.weight",
        "mla.q": "model.layers.{layer}.self_attn.q_proj.weight",
        "mla.q_a": "model.layers.{layer}.self_attn.q_a_proj.weight",
        "mla.q_a_norm": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
        "mla.q_b": "model.layers.{layer}.self_attn.q_b_proj.weight",
        "mla.kv_a": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
        "mla.kv_a_norm": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
        "mla.kv_b": "model.layers.{layer}.self_attn.kv_b_proj.weight",
        "mla.o": "model.layers.{layer}.self_attn.o_proj.weight",
        "mlp.norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "mlp.gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "mlp.up": "model.layers.{layer}.mlp.up_proj.weight",
        "mlp.down": "model.layers.{layer}.mlp.down_proj.weight",
        "router": "model.layers.{layer}.mlp.gate.weight",
        "router.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "expert.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "expert.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        "expert.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
        "shared.gate": "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
        "shared.up": "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
        "shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
        "mtp.embed_norm": "model.layers.{layer}.enorm.weight",
        "mtp.hidden_norm": "model.layers.{layer}.hnorm.weight",
        "mtp.project": "model.layers.{layer}.eh_proj.weight",
        "mtp.norm": "model.layers.{layer}.shared_head.norm.weight",
    }
    sizes: ClassVar[Mapping[str, str]] = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "mtp_layers": "num_nextn_predict_layers",
        "heads": "num_attention_heads",
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "qk_nope": "qk_nope_head_dim",
        "qk_rope": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
        "mlp": "intermediate_size",
        "experts": "n_routed_experts",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "moe_intermediate_size*n_shared_experts",
    }
