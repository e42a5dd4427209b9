"""Configs: what `config.json` states, in old and new spelling, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from refit_sdk.demo.config import SIZES, ConfigError, DecoderConfig, RopeScaling, from_hugging_face

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def read(kind: str = "qwen3", **more: Any) -> DecoderConfig:
    return from_hugging_face({"model_type": kind, **SHAPE, **more})


def test_what_each_architecture_has() -> None:
    qwen3, qwen2, llama = read("qwen3"), read("qwen2"), read("llama")
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias, qwen3.head_dim) == (True, False, False, 128)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias, qwen2.head_dim) == (False, True, False, 8)
    assert (llama.qk_norm, llama.qkv_bias, llama.mlp_bias, llama.head_dim) == (False, False, False, 8)
    biased = read("llama", attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_rope_in_both_spellings() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    new = read("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **llama3})
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 64))
    assert read("qwen3", rope_theta=1e6, rope_scaling=None).rope_theta == 1e6


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("qwen3_moe", {}, "qwen3_moe"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("qwen3", {"hidden_size": "32"}, "hidden_size"),
        ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("qwen3", {"vocab_size": None}, "vocab_size"),
        ("qwen3", {"num_key_value_heads": 3}, "num_kv_heads=3"),
        ("qwen3", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ],
)
def test_refused_by_name(kind: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(kind, **more)


def test_a_split_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"num_kv_heads': 4.*one of 1, 2, 4"):
        SIZES["tiny"].check_tensor_parallel(3)


def test_llama_ignores_a_sliding_window_that_qwen_would_use() -> None:
    assert read("llama", use_sliding_window=True, sliding_window=8) == read("llama")
