"""Tiny checkpoints of each architecture, as transformers writes them, with the judge's values in every tensor.

An element's value follows from its tensor's name and its place in it, so a layer, an expert or a row that ended up
elsewhere can't look right. Which tensors there are, and their shapes, is transformers' word, not ours; it doesn't write
MTP layers, so theirs are added by DeepSeek's own naming.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen

from refit_sdk.testing import judge, torch_fill

SEED = 11
BASE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "intermediate_size": 128, "max_position_embeddings": 128, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "hybrid_override_pattern": "M*-E", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 8,
    "conv_kernel": 4, "expand": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1, "chunk_size": 16,
    "layers_block_type": ["mamba", "attention", "mlp", "moe"],
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-odd-vocab": ("qwen3", {"vocab_size": 500}),
    "qwen3-uneven": ("qwen3", {"num_hidden_layers": 5}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "deepseek": ("deepseek_v3", MLA),
    "deepseek-plain-q": ("deepseek_v3", {**MLA, "q_lora_rank": None}),
    "deepseek-mtp": ("deepseek_v3", {**MLA, "num_nextn_predict_layers": 1}),
    "mistral": ("mistral", {}),
    "olmoe": (
        "olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": None,
            "num_key_value_heads": 4,
        },
    ),
    "nemotron-h": ("nemotron_h", MAMBA),
}
"""Kind → (model_type, what differs from `BASE`)."""


@frozen
class Checkpoint:
    """A directory, its config as JSON has it, and the shape and dtype of each tensor."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str]]

    def bits(self, name: str, start: Any = None, stop: Any = None, *, version: int = 1) -> Any:
        """What a region of a tensor holds, by the judge."""
        shape, dtype = self.tensors[name]
        start, stop = start or (0,) * len(shape), stop or shape
        return judge.expected(name, shape, start, stop, dtype, SEED, version)


def config_of(kind: str, **over: Any) -> dict[str, Any]:
    """A kind's config, as JSON has it."""
    import transformers

    model_type, differing = CONFIGS[kind]
    stated = {name: value for name, value in {**BASE, **differing, **over}.items() if value is not None}
    if differing.get("q_lora_rank", 0) is None:
        stated["q_lora_rank"] = None
    config = transformers.AutoConfig.for_model(model_type, **stated)
    architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    made = {**config.to_dict(), "architectures": [architecture]}
    made.update({key: value for key, value in stated.items() if key in ("hybrid_override_pattern", "q_lora_rank")})
    return json.loads(json.dumps(made, default=str))


def write(kind: str, folder: Path, *, dtype: str = "float32", version: int = 1, **over: Any) -> Checkpoint:
    """Write a kind's checkpoint into a folder."""
    from safetensors.torch import save_file

    config = config_of(kind, **over)
    made = Checkpoint(folder, config, tensors_of(config, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(config))
    values = {}
    for name, (shape, kept) in made.tensors.items():
        values[name] = torch.empty(shape, dtype=getattr(torch, kept))
        torch_fill.fill(values[name], made.bits(name, version=version))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return made


def tensors_of(config: dict[str, Any], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → (shape, dtype) of what transformers would save of this config, MTP layers added."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    for_class = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(for_class, dtype=getattr(torch, dtype))
    state = revert_weight_conversion(model, model.state_dict())
    absent = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    if config.get("q_lora_rank", 0) is None:
        absent.append("kv_a_layernorm")  # Megatron's norms on q and kv come together, and here q has none
    found = {
        _published(name): (tuple(tensor.shape), _kept(name, dtype))
        for name, tensor in state.items()
        if not any(part in name for part in absent)
    }
    return {**found, **_mtp(config, found, dtype)}


def _published(name: str) -> str:
    """Nemotron-H's embedding as its checkpoints have it; transformers reads that name and writes another."""
    return name.replace("backbone.embedding.weight", "backbone.embeddings.weight")


def _kept(name: str, dtype: str) -> str:
    return "float32" if "e_score_correction_bias" in name else dtype


def _mtp(config: dict[str, Any], found: dict[str, Any], dtype: str) -> dict[str, Any]:
    layers, hidden = config.get("num_hidden_layers", 0), config["hidden_size"]
    added = {}
    for number in range(layers, layers + (config.get("num_nextn_predict_layers") or 0)):
        like, prefix = f"model.layers.{layers - 1}.", f"model.layers.{number}."
        added |= {prefix + name.removeprefix(like): what for name, what in found.items() if name.startswith(like)}
        own = {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
        added |= {f"{prefix}{name}.weight": (shape, dtype) for name, shape in own.items()}
    return added


def differing(actual: Any, wanted: Any) -> int:
    """How many elements of two bit arrays differ."""
    return int(np.count_nonzero(actual != wanted))
