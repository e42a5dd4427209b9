"""Checkpoint directories as transformers writes them, for every architecture that the demo reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.fixture
def save() -> Callable[..., Any]:
    """Writes a model of an architecture, every parameter random, and returns it in float32."""
    return write


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    """Each architecture in turn, by the name that `save` takes."""
    return str(request.param)


def write(arch: str, directory: Path, *, shard_size: str = "5GB", dtype: torch.dtype = torch.float32) -> Any:
    config_class, model_class, more = ARCHITECTURES[arch]
    model = model_class(config_class(**SHAPE, **more)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator, std=0.3)
        parameter.data.copy_(parameter.data.to(dtype))
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    return model.float()
