"""A tensor-parallel engine's rank as engines fuse Qwen3-MoE: qkv in one, experts stacked in slots, vocabulary in rows.

What its storages must contain is written down in plain NumPy, as engines' loaders cut and concatenate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tiny
import torch

from refit_sdk import fused
from refit_sdk.adapter import Fragment
from refit_sdk.testing import judge, torch_fill


def _rows(array: Any, rank: int, size: int) -> Any:
    each = array.shape[0] // size
    return array[rank * each : (rank + 1) * each]


def _columns(array: Any, rank: int, size: int) -> Any:
    each = array.shape[1] // size
    return array[:, rank * each : (rank + 1) * each]


class Engine:
    """Rank `rank` of `size`: storages with guard bytes, poisoned."""

    def __init__(self, checkpoint: tiny.Checkpoint, *, rank: int, size: int) -> None:
        self.checkpoint, self.rank, self.size = checkpoint, rank, size
        config = checkpoint.config
        self.layers = config["num_hidden_layers"]
        self.experts = config.get("num_experts") or config["num_local_experts"]
        self.heads, self.kv, self.dim = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.blocks: dict[str, judge.Storage] = {}
        self.storages: dict[str, torch.Tensor] = {}
        for name, wanted in self.wanted(version=1).items():
            self.blocks[name] = judge.Storage(wanted.nbytes)
            self.storages[name] = torch_fill.guarded(self.blocks[name], torch.float32, wanted.shape)

    def wanted(self, *, version: int) -> dict[str, Any]:
        """The bits of every storage, by its name."""

        def bits(name: str) -> Any:
            return self.checkpoint.bits(name, version=version)

        cut = (self.rank, self.size)
        found = {name: _rows(bits(name), *cut) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        found["model.norm.weight"] = bits("model.norm.weight")
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            q, k, v = (_rows(bits(f"{layer}.self_attn.{x}_proj.weight"), *cut) for x in "qkv")
            found[f"{layer}.qkv"] = np.concatenate([q, k, v])
            found[f"{layer}.o"] = _columns(bits(f"{layer}.self_attn.o_proj.weight"), *cut)
            gates, ups, downs = (
                [bits(f"{layer}.mlp.experts.{e}.{x}_proj.weight") for e in range(self.experts)]
                for x in ("gate", "up", "down")
            )
            found[f"{layer}.w13"] = np.stack(
                [np.concatenate([_rows(g, *cut), _rows(u, *cut)]) for g, u in zip(gates, ups, strict=True)]
            )
            found[f"{layer}.w2"] = np.stack([_columns(down, *cut) for down in downs])
            found |= {name: bits(name) for name in self._whole(layer)}
        return found

    @staticmethod
    def _whole(layer: str) -> list[str]:
        inside = ("input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.q_norm", "self_attn.k_norm")
        return [f"{layer}.{name}.weight" for name in inside]

    def refit_fragments(self) -> list[Fragment]:
        """The storages as fragments, by the helpers that engines' adapters have."""
        return list(self._fragments())

    def _fragments(self) -> Iterator[Fragment]:
        cut: dict[str, int] = {"rank": self.rank, "size": self.size}
        vocab = self.checkpoint.config["vocab_size"]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield from fused.vocab_rows(self.storages[name], name, vocab=vocab, **cut)
        yield from fused.whole(self.storages["model.norm.weight"], "model.norm.weight")
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            q, k, v = (f"{layer}.self_attn.{x}_proj.weight" for x in "qkv")
            yield from fused.fused_qkv(
                self.storages[f"{layer}.qkv"], (q, k, v), heads=self.heads, kv_heads=self.kv, head_dim=self.dim, **cut
            )
            o = self.storages[f"{layer}.o"]
            part = fused.Part(f"{layer}.self_attn.o_proj.weight", o.shape[1] * self.size)
            yield from fused.packed(o, [part], dim=1, **cut)
            owners = [f"{layer}.mlp.experts.{expert}" for expert in range(self.experts)]
            stacks = (self.storages[f"{layer}.w13"], self.storages[f"{layer}.w2"])
            yield from fused.stacked_experts(*stacks, experts=owners, **cut)
            for name in self._whole(layer):
                yield from fused.whole(self.storages[name], name)

    def faults(self, *, version: int) -> list[str]:
        """Storages that aren't what they must be, and guard bytes that were written."""
        wanted = self.wanted(version=version)
        wrong = [name for name, bits in wanted.items() if tiny.differing(torch_fill.read(self.storages[name]), bits)]
        return wrong + [f"{name}: guard byte {at}" for name, block in self.blocks.items() for at in block.damage()]
