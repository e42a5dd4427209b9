"""A decoder in plain torch, with the names of a Hugging Face checkpoint: Llama, Qwen2 and Qwen3 by its config.

Nothing in it knows how it is sharded. FSDP2 wraps the layers; tensor parallelism replaces weights by DTensors and hands
`forward` the local heads, which is why no head count appears in it. RoPE's tables are computed from the config at every
call: there are no buffers, so a model made on the meta device needs its parameters only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from refit_sdk.demo.config import DecoderConfig, RopeScaling


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in float32 whatever the dtype."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """RoPE's frequencies, (head_dim / 2,) in float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return _stretched(frequencies, config.rope_scaling) if config.rope_scaling else frequencies


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long waves slowed by `factor`, short ones kept, a linear blend between."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(config: DecoderConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 … length - 1, (length, head_dim) each."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(config))
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn (batch, heads, length, head_dim) by position; the two halves of a head are the pairs' coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * tables[0] + torch.cat((-second, first), dim=-1) * tables[1]


class Attention(nn.Module):
    """Causal grouped-query attention over however many heads the projections yield."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm: nn.Module = RMSNorm(config.head_dim, eps=config.norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, length, hidden) → the same."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), tables)
        k = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), tables)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class MLP(nn.Module):
    """The gated feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, wide, bias=bias)
        self.up_proj = nn.Linear(hidden, wide, bias=bias)
        self.down_proj = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) → the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, length, hidden) → the same."""
        x = x + self.self_attn(self.input_layernorm(x), tables)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything up to the head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of token numbers → (batch, length, hidden)."""
        x = self.embed_tokens(tokens)
        tables = rotary_tables(self.config, tokens.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, tables)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """A causal language model. With `config.tied` the head is the embedding's own parameter."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding again, where the config says so; needed after a wrapper replaced either."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, length, vocab), for (batch, length) of token numbers."""
        out: Tensor = self.lm_head(self.model(tokens))
        return out


def make_decoder(config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the meta device: shapes and dtypes, no storage."""
    with torch.device("meta"):
        return Decoder(config).to(dtype)
