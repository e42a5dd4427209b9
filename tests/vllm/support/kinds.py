"""Tiny models of each kind: a config, and the names and shapes of the checkpoint that transformers would save of it.

Heads have 32 elements, as the CPU's attention wants; 500 rows of vocabulary are no multiple of the padding to 64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

BASE: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": None, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
SINKS: dict[str, Any] = {
    "num_key_value_heads": 8, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": 128,
}  # fmt: skip
DELTA: dict[str, Any] = {
    **EXPERTS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 64,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "hybrid_override_pattern": "M*-", "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 8, "ssm_state_size": 16, "conv_kernel": 4, "expand": 2,
    "chunk_size": 16,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "image_size": 56,
    "patch_size": 14, "num_channels": 3,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek-v3": ("deepseek_v3", LATENT),
    "gpt-oss": ("gpt_oss", SINKS),
    "idefics3": ("idefics3", {}),
    "qwen3-next": ("qwen3_next", DELTA),
    "nemotron-h": ("nemotron_h", MAMBA),
}  # fmt: skip
"""Kind → (model_type, what differs from `BASE`)."""


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **EXPERTS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048,
            "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "vocab_size": 151936,
        },
    ),
}  # fmt: skip
"""The same, of the size of a real model."""


@frozen
class Kind:
    """A directory with a config and no weights, and shape and dtype of each checkpoint tensor."""

    path: Path
    checkpoint: dict[str, tuple[tuple[int, ...], torch.dtype]]


def config_of(name: str, **over: Any) -> Any:
    """A kind's config, as transformers has it."""
    import transformers

    model_type, differing = (CONFIGS | LARGE)[name]
    stated = {key: value for key, value in {**BASE, **differing, **over}.items() if value is not None}
    if name == "idefics3":
        text = {**stated, "model_type": "llama"}
        stated = {"text_config": text, "vision_config": SIGHT, "tie_word_embeddings": False, "scale_factor": 2}
    return transformers.AutoConfig.for_model(model_type, **stated)


def write(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Kind:
    """Write a kind's config into a folder."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = config_of(name)
    mappings = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    found = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    with torch.device("meta"):
        model = found._from_config(config, dtype=dtype)
    state = revert_weight_conversion(model, model.state_dict())
    tied = {"lm_head.weight"} if config.get_text_config().tie_word_embeddings else set()
    folder.mkdir(parents=True, exist_ok=True)
    stated = {
        **(CONFIGS | LARGE)[name][1],
        **config.to_dict(),
        "architectures": [found.__name__],
        "dtype": str(dtype).removeprefix("torch."),
    }
    folder.joinpath("config.json").write_text(json.dumps(stated, default=str))
    return Kind(folder, {key: (tuple(t.shape), t.dtype) for key, t in state.items() if key not in tied})
