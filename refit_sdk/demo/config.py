"""The shape of a decoder, from a Hugging Face `config.json` or by size. No torch.

1. Only `llama`, `qwen2` and `qwen3` are read, and only settings that `refit_sdk.demo.model` computes; anything else
   that would change the logits (scaled RoPE of another kind, sliding windows, quantization) is refused by name.
2. What a file leaves out gets the default of that architecture's own configuration class.
3. `parameter_shapes` lists every checkpoint tensor that such a model has.

>>> from refit_sdk.demo.config import SIZES
>>> config = SIZES["tiny"]
>>> config.num_heads, config.num_kv_heads, config.num_parameters
(8, 4, 131424)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from attrs import frozen

from refit_sdk.errors import RefitError

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The architectures that the demo's model computes, by `model_type`."""


_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


class ConfigError(RefitError):
    """A model configuration that the demo can't build."""


@frozen
class RopeScaling:
    """The stretched frequencies of Llama 3.1: how much, and between which wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder of grouped-query attention and gated MLPs. Sizes are in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None

    def __attrs_post_init__(self) -> None:
        if wrong := {name: getattr(self, name) for name in _SIZES if getattr(self, name) < 1}:
            raise ConfigError(f"the model's sizes must be at least 1, found {wrong}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"attention needs num_heads a multiple of num_kv_heads and an even head_dim, found num_heads="
                f"{self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
            )

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied head counted once."""
        return sum(prod(shape) for shape in self.parameter_shapes().values())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every checkpoint tensor, by its Hugging Face name; a tied head is not among them.

        >>> SIZES["tiny"].parameter_shapes()["model.layers.0.self_attn.k_proj.weight"]
        (32, 64)
        """
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, wide = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, q, self.o_bias),
            "mlp.gate_proj": (wide, hidden, self.mlp_bias),
            "mlp.up_proj": (wide, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, wide, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, into) for name, (out, into, _) in linears.items()}
        shapes |= {f"{name}.bias": (out,) for name, (out, _, bias) in linears.items() if bias}
        shapes |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes

    def check_tensor_parallel(self, size: int) -> None:
        """`ConfigError` unless heads and MLP columns can be split evenly over `size` ranks.

        >>> SIZES["tiny"].check_tensor_parallel(4)
        """
        cut = {"num_kv_heads": self.num_kv_heads, "intermediate_size": self.intermediate_size}
        if wrong := {name: value for name, value in cut.items() if value % size}:
            fits = [n for n in range(1, self.num_kv_heads + 1) if all(value % n == 0 for value in cut.values())]
            raise ConfigError(
                f"{size} target ranks can't split the model evenly, found {wrong}; "
                f"pass --targets as one of {', '.join(map(str, fits))}"
            )


SIZES: Final = {
    "tiny": DecoderConfig(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8
    ),
    "small": DecoderConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32
    ),
    "medium": DecoderConfig(
        vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_layers=12, num_heads=16, num_kv_heads=8,
        head_dim=64,
    ),
}  # fmt: skip
"""Qwen3 shapes to choose from: about 0.1, 7 and 190 million parameters."""


def from_hugging_face(data: Mapping[str, Any]) -> DecoderConfig:
    """The shape that a `config.json` states. `ConfigError` for what is missing or can't be computed here.

    >>> from_hugging_face({"model_type": "gemma3"})
    Traceback (most recent call last):
    refit_sdk.demo.config.ConfigError: the demo reads llama, qwen2 and qwen3 models, found model_type 'gemma3'
    """
    kind = _model_type(data)
    _refuse_unsupported(data, kind)
    heads = _number(data, "num_attention_heads")
    biased = bool(data.get("attention_bias", False)) and kind != "qwen2"
    theta, scaling = _rope(data)
    return DecoderConfig(
        vocab_size=_number(data, "vocab_size"),
        hidden_size=_number(data, "hidden_size"),
        intermediate_size=_number(data, "intermediate_size"),
        num_layers=_number(data, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_number(data, "num_key_value_heads", heads if kind == "llama" else 32),
        head_dim=_number(data, "head_dim", 128 if kind == "qwen3" else _number(data, "hidden_size") // max(heads, 1)),
        qk_norm=kind == "qwen3",
        qkv_bias=biased or kind == "qwen2",
        o_bias=biased,
        mlp_bias=bool(data.get("mlp_bias", False)) and kind == "llama",
        tied=bool(data.get("tie_word_embeddings", False)),
        norm_eps=_real(data, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _model_type(data: Mapping[str, Any]) -> str:
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ConfigError(f"the demo reads llama, qwen2 and qwen3 models, found model_type {kind!r}")
    stated = data.get("architectures") or [ARCHITECTURES[kind]]
    if stated != [ARCHITECTURES[kind]]:
        raise ConfigError(f"the demo reads {ARCHITECTURES[kind]} of {kind} models, found architectures {stated!r}")
    return kind


def _refuse_unsupported(data: Mapping[str, Any], kind: str) -> None:
    windows = [layer for layer in data.get("layer_types") or () if layer != "full_attention"]
    found = {
        "hidden_act": data.get("hidden_act", "silu") != "silu",
        "quantization_config": data.get("quantization_config") is not None,
        "use_sliding_window": kind != "llama" and bool(data.get("use_sliding_window", False)),
        "layer_types": bool(windows),
        "partial_rotary_factor": data.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if wrong := {name: data[name] for name, refused in found.items() if refused}:
        raise ConfigError(f"the demo's model computes silu, unquantized, full attention only; the config has {wrong}")


def _rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, as either `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` state them."""
    rope: dict[str, Any] = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    theta = _real(rope if "rope_theta" in rope else data, "rope_theta", 1e4)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"the demo computes RoPE of type default and llama3 over whole heads, the config has {rope}")
    if kind == "default":
        return theta, None
    length = rope if "original_max_position_embeddings" in rope else data
    scaling = RopeScaling(
        _real(rope, "factor"),
        _real(rope, "low_freq_factor"),
        _real(rope, "high_freq_factor"),
        _number(length, "original_max_position_embeddings", data.get("max_position_embeddings")),
    )
    return theta, scaling


def _number(data: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if data.get(name) is None else data[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"the config needs {name} as a positive integer, found {value!r}")
    return value


def _real(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if data.get(name) is None else data[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"the config needs {name} as a positive number, found {value!r}")
    return float(value)
