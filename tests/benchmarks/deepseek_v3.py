"""DeepSeek-V3 as a cluster holds it, without a byte of it: names, shapes, and what each rank has of them.

Sources are cut as Megatron does it for 1,024 GPUs: pipeline stages of four layers, attention and dense layers by tensor
parallelism, experts whole and divided over the tensor and data ranks of a stage. Targets are engines as vLLM makes
them: attention, dense and shared layers by tensor parallelism, experts whole and divided over all ranks of the engine,
with redundant ones placed as a balancer would, if asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from attrs import frozen

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.fold import fold
from refit_sdk.world import Manifest

HIDDEN, VOCAB, HEADS, EXPERTS = 7168, 129280, 128, 256
LAYERS, DENSE_LAYERS = 61, 3
MTP = LAYERS
"""The number of the layer that predicts one token more; a layer like the last, with tensors of its own."""

ATTENTION = {
    "input_layernorm.weight": ((HIDDEN,), None),
    "post_attention_layernorm.weight": ((HIDDEN,), None),
    "self_attn.q_a_proj.weight": ((1536, HIDDEN), None),
    "self_attn.q_a_layernorm.weight": ((1536,), None),
    "self_attn.q_b_proj.weight": ((HEADS * 192, 1536), 0),
    "self_attn.kv_a_proj_with_mqa.weight": ((576, HIDDEN), None),
    "self_attn.kv_a_layernorm.weight": ((512,), None),
    "self_attn.kv_b_proj.weight": ((HEADS * 256, 512), 0),
    "self_attn.o_proj.weight": ((HIDDEN, HEADS * 128), 1),
}
"""Shape of each tensor, and the dim that tensor parallelism cuts."""
DENSE = {
    "mlp.gate_proj.weight": ((18432, HIDDEN), 0),
    "mlp.up_proj.weight": ((18432, HIDDEN), 0),
    "mlp.down_proj.weight": ((HIDDEN, 18432), 1),
}
MIXTURE = {
    "mlp.gate.weight": ((EXPERTS, HIDDEN), None),
    "mlp.shared_experts.gate_proj.weight": ((2048, HIDDEN), 0),
    "mlp.shared_experts.up_proj.weight": ((2048, HIDDEN), 0),
    "mlp.shared_experts.down_proj.weight": ((HIDDEN, 2048), 1),
}
EXPERT = {"gate_proj.weight": (2048, HIDDEN), "up_proj.weight": (2048, HIDDEN), "down_proj.weight": (HIDDEN, 2048)}
EXTRA = {
    "embed_tokens.weight": ((VOCAB, HIDDEN), 0),
    "enorm.weight": ((HIDDEN,), None),
    "hnorm.weight": ((HIDDEN,), None),
    "eh_proj.weight": ((HIDDEN, 2 * HIDDEN), None),
    "shared_head.norm.weight": ((HIDDEN,), None),
    "shared_head.head.weight": ((VOCAB, HIDDEN), 0),
}


@frozen
class Shadow:
    """What folding asks of a view."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"


@frozen
class Sources:
    """The training side: `tp` ranks of a stage cut its tensors, all ranks of a stage divide its experts."""

    tp: int = 2
    pp: int = 16
    dp: int = 32
    ep: int = 64

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.pp * self.dp

    def manifest(self, rank: int) -> Manifest:
        """What a rank holds: tensor ranks are next to each other, then data ranks, then stages."""
        stage, inside = divmod(rank, self.tp * self.dp)
        return _source(self, stage, inside % self.tp, inside % self.ep)


@frozen
class Engines:
    """The generating side: `count` engines of `tp * dp` ranks, that have all experts and `redundant` twice.

    With a `seed`, experts are placed at random, in every layer and engine anew; without, in order.
    """

    count: int = 32
    tp: int = 4
    dp: int = 8
    redundant: int = 0
    seed: int | None = None

    @property
    def each(self) -> int:
        """How many ranks an engine has."""
        return self.tp * self.dp

    def name(self, rank: int) -> str:
        """The engine that one of all target ranks is in."""
        return f"rollout-{rank // self.each:02}"

    def manifest(self, rank: int) -> Manifest:
        """What one of all target ranks holds."""
        engine, inside = divmod(rank, self.each)
        return _target(self, engine if self.seed is not None else 0, inside)

    def experts(self, engine: int, layer: int, inside: int) -> list[int]:
        """The experts that a rank has of a layer, slot by slot."""
        slots = list(range(EXPERTS))
        if self.seed is not None:
            dice = random.Random(f"{self.seed} {engine} {layer}")
            slots += dice.sample(slots, self.redundant)
            dice.shuffle(slots)
        share = len(slots) // self.each
        return slots[inside * share : (inside + 1) * share]


@cache
def _source(side: Sources, stage: int, tensor: int, expert: int) -> Manifest:
    layers = range(stage * 4, stage * 4 + 4) if stage < side.pp - 1 else range(stage * 4, MTP + 1)
    share = EXPERTS // side.ep
    held = {layer: list(range(expert * share, (expert + 1) * share)) for layer in layers}
    return fold(_fragments(held, tensor, side.tp, first=stage == 0, last=stage == side.pp - 1))


@cache
def _target(side: Engines, engine: int, inside: int) -> Manifest:
    held = {layer: side.experts(engine, layer, inside) for layer in range(MTP + 1)}
    return fold(_fragments(held, inside % side.tp, side.tp, first=True, last=True))


def _fragments(experts: dict[int, list[int]], tensor: int, tp: int, *, first: bool, last: bool) -> Iterator[Fragment]:
    """What a rank has: layers with experts, as tensor rank `tensor` of `tp`, and what comes before and after them."""
    ends = {"model.embed_tokens.weight": first, "lm_head.weight": last}
    yield from (_cut(name, (VOCAB, HIDDEN), 0, tensor, tp) for name, is_held in ends.items() if is_held)
    if last:
        yield _cut("model.norm.weight", (HIDDEN,), None, tensor, tp)
    for layer, held in experts.items():
        dense = layer < DENSE_LAYERS
        tensors = ATTENTION | (DENSE if dense else MIXTURE) | (EXTRA if layer == MTP else {})
        for name, (shape, dim) in tensors.items():
            yield _cut(f"model.layers.{layer}.{name}", shape, dim, tensor, tp)
        if not dense:
            yield _cut(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (EXPERTS,), None, 0, 1, "float32")
            for expert in held:
                for name, shape in EXPERT.items():
                    yield _cut(f"model.layers.{layer}.mlp.experts.{expert}.{name}", shape, None, 0, 1)


def _cut(
    name: str, shape: tuple[int, ...], dim: int | None, part: int, parts: int, dtype: str = "bfloat16"
) -> Fragment:
    start, stop = [0] * len(shape), list(shape)
    if dim is not None:
        start[dim], stop[dim] = part * shape[dim] // parts, (part + 1) * shape[dim] // parts
    box = Box(start, stop)
    return Fragment(name, shape, box, Shadow(box.shape, dtype))
