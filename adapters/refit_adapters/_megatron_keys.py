"""What a key of Megatron's is: the role of its tensor, the layer and expert it belongs to, and how it lies in storage.

1. A key's numbers are taken out: `decoder.layers.{}.self_attention.linear_qkv.weight`, (3,).
2. The part of it inside a layer is looked up in a table. MTP layers have the same inside; their number follows the
   model's last layer's.
3. A key that isn't in the table is its own role, with `{layer}` and `{expert}` for its numbers, so that an architecture
   may name tensors that only one model has.

Specs of Megatron's own modules and of TransformerEngine spell some norms differently; both are listed.

>>> place_of("decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_w", layers=4, latent=False)
Place(roles=('expert.gate',), form='plain', layer=3, expert=7)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, Literal

from attrs import frozen

from refit_sdk.tensor import fold_name

Form = Literal["plain", "qkv", "vocab", "parts"]
"""`plain`: the entry is a box of the tensor. `qkv`: head group by head group. `vocab`: rows, perhaps padded. `parts`: a
run of the tensor's rows, beside the parameter's other parts."""


@frozen
class Place:
    """The roles of an entry's tensors (three for `qkv`, else one), its form, and its layer's and expert's numbers."""

    roles: tuple[str, ...]
    form: Form
    layer: int | None = None
    expert: int | None = None


OUTSIDE: Final[Mapping[str, str]] = {
    "embedding.word_embeddings.weight": "embed",
    "output_layer.weight": "head",
    "decoder.final_layernorm.weight": "final_norm",
    "decoder.final_norm.weight": "final_norm",
}
"""Keys outside layers."""

INSIDE: Final[Mapping[str, str]] = {
    "input_layernorm.weight": "attention.norm",
    "self_attention.linear_qkv.layer_norm_weight": "attention.norm",
    "self_attention.q_layernorm.weight": "attention.q_norm",
    "self_attention.k_layernorm.weight": "attention.k_norm",
    "self_attention.linear_proj.weight": "attention.o",
    "self_attention.linear_proj.bias": "attention.o_bias",
    "self_attention.linear_q_proj.weight": "mla.q",
    "self_attention.linear_q_down_proj.weight": "mla.q_a",
    "self_attention.linear_q_up_proj.layer_norm_weight": "mla.q_a_norm",
    "self_attention.linear_q_up_proj.weight": "mla.q_b",
    "self_attention.linear_kv_down_proj.weight": "mla.kv_a",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "mla.kv_a_norm",
    "self_attention.kv_layernorm.weight": "mla.kv_a_norm",
    "self_attention.linear_kv_up_proj.weight": "mla.kv_b",
    "pre_mlp_layernorm.weight": "mlp.norm",
    "mlp.linear_fc1.layer_norm_weight": "mlp.norm",
    "mlp.linear_fc1.weight_w": "mlp.gate",
    "mlp.linear_fc1.weight_v": "mlp.up",
    "mlp.linear_fc1.weight": "mlp.up",
    "mlp.linear_fc1.bias_w": "mlp.gate_bias",
    "mlp.linear_fc1.bias_v": "mlp.up_bias",
    "mlp.linear_fc1.bias": "mlp.up_bias",
    "mlp.linear_fc2.weight": "mlp.down",
    "mlp.linear_fc2.bias": "mlp.down_bias",
    "mlp.router.weight": "router",
    "mlp.router.expert_bias": "router.bias",
    "mlp.fc1_latent_proj.weight": "latent.in",
    "mlp.fc2_latent_proj.weight": "latent.out",
    "mlp.experts.experts.{}.linear_fc1.weight_w": "expert.gate",
    "mlp.experts.experts.{}.linear_fc1.weight_v": "expert.up",
    "mlp.experts.experts.{}.linear_fc1.weight": "expert.up",
    "mlp.experts.experts.{}.linear_fc2.weight": "expert.down",
    "mlp.shared_experts.linear_fc1.weight_w": "shared.gate",
    "mlp.shared_experts.linear_fc1.weight_v": "shared.up",
    "mlp.shared_experts.linear_fc1.weight": "shared.up",
    "mlp.shared_experts.linear_fc2.weight": "shared.down",
    "mlp.shared_experts.gate_weight": "shared.router",
    "norm.weight": "mamba.norm",
    "mixer.in_proj.layer_norm_weight": "mamba.norm",
    "mixer.dt_bias": "mamba.dt_bias",
    "mixer.A_log": "mamba.a_log",
    "mixer.D": "mamba.d",
    "mixer.norm.weight": "mamba.gate_norm",
    "mixer.out_proj.weight": "mamba.out",
}
"""Keys inside a layer that are a box of one tensor."""

QKV: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attention.linear_qkv.weight": ("attention.q", "attention.k", "attention.v"),
    "self_attention.linear_qkv.bias": ("attention.q_bias", "attention.k_bias", "attention.v_bias"),
}
"""Keys of fused query, key and value."""

PARTS: Final[Mapping[str, str]] = {
    **{f"mixer.in_proj.weight.{part}": "mamba.in" for part in ("z", "x", "B", "C", "dt")},
    **{f"mixer.conv1d.weight.{part}": "mamba.conv" for part in ("x", "B", "C")},
    **{f"mixer.conv1d.bias.{part}": "mamba.conv_bias" for part in ("x", "B", "C")},
}
"""Keys of parts that follow one another in a checkpoint's tensor, each cut by itself."""

LATENT: Final[Mapping[str, str]] = {
    "self_attention.q_layernorm.weight": "mla.q_a_norm",
    "self_attention.linear_proj.weight": "mla.o",
}
"""What two keys mean where attention is latent."""

MTP: Final[Mapping[str, str]] = {
    "enorm.weight": "mtp.embed_norm",
    "hnorm.weight": "mtp.hidden_norm",
    "eh_proj.weight": "mtp.project",
    "final_layernorm.weight": "mtp.norm",
}
"""Keys of an MTP layer beside the layer inside it."""

_DECODER: Final = "decoder.layers.{}."
_MTP: Final = "mtp.layers.{}."
_MTP_INSIDE: Final = ("transformer_layer.", "mtp_model_layer.")


def place_of(key: str, *, layers: int, latent: bool) -> Place:
    """Where an entry's tensors belong. `layers`: how many the model has before MTP; `latent`: attention is latent."""
    template, numbers = fold_name(key)
    roles, form, prefix = _kind(template, latent)
    if not prefix or len(numbers) > 2:
        return Place(roles, form)
    layer = numbers[0] + (layers if prefix == _MTP else 0)
    return Place(roles, form, layer, numbers[1] if len(numbers) > 1 else None)


@cache
def _kind(template: str, latent: bool) -> tuple[tuple[str, ...], Form, str]:
    """Roles and form of a key without its numbers, and how it begins if it is inside a layer."""
    outside = OUTSIDE.get(template)
    if outside is not None:
        return (outside,), "vocab" if outside in ("embed", "head") else "plain", ""
    prefix = next((prefix for prefix in (_DECODER, _MTP) if template.startswith(prefix)), "")
    known: tuple[tuple[str, ...], Form] = ((), "plain")
    if prefix and template.count("{}") < 3:
        known = _inside(template.removeprefix(prefix), latent, is_mtp=prefix == _MTP)
    return known[0] or (_as_role(template),), known[1], prefix


def _inside(key: str, latent: bool, *, is_mtp: bool) -> tuple[tuple[str, ...], Form]:
    """Roles and form of a key inside a layer; no roles if it isn't known."""
    if is_mtp:
        if key in MTP:
            return (MTP[key],), "plain"
        prefix = next((prefix for prefix in _MTP_INSIDE if key.startswith(prefix)), None)
        if prefix is None:
            return (), "plain"
        key = key.removeprefix(prefix)
    if key in QKV:
        return QKV[key], "qkv"
    if key in PARTS:
        return (PARTS[key],), "parts"
    role = LATENT.get(key) if latent else None
    role = role or INSIDE.get(key)
    return ((role,) if role else ()), "plain"


def _as_role(template: str) -> str:
    """A key as its own role: its first number is the layer's, the next the expert's.

    >>> _as_role("decoder.layers.{}.mlp.extra.weight")
    'decoder.layers.{layer}.mlp.extra.weight'
    """
    return template.replace("{}", "{layer}", 1).replace("{}", "{expert}", 1)
