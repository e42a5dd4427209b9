"""What tensors a language model's checkpoint has: roles, their shapes in the sizes of a config, and names by role.

1. A *role* says what a tensor is, whatever it's called: `attention.q`, `expert.down`. An architecture's table (one file
   each, beside this one) has a checkpoint name for each role, with `{layer}` and `{expert}` where numbers go.
2. A *size* is a number that a config states: heads, hidden. `sizes_of` reads them by the table's keys.
3. `shape_of` gives the shape that a role's tensor has with these sizes, None where a size isn't known.

An architecture may name other roles than those here: an adapter that knows such a tensor by its framework's own key
asks for the name under that key, numbers replaced by `{layer}` and `{expert}`.

>>> shape_of("attention.k", {"kv_heads": 2, "head_dim": 64, "hidden": 512})
(128, 512)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from refit_sdk.adapter import Architecture

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "embed": ("vocab", "hidden"),
    "head": ("vocab", "hidden"),
    "final_norm": ("hidden",),
    "attention.norm": ("hidden",),
    "attention.q": ("heads*head_dim", "hidden"),
    "attention.k": ("kv_heads*head_dim", "hidden"),
    "attention.v": ("kv_heads*head_dim", "hidden"),
    "attention.q_bias": ("heads*head_dim",),
    "attention.k_bias": ("kv_heads*head_dim",),
    "attention.v_bias": ("kv_heads*head_dim",),
    "attention.q_norm": ("head_dim",),
    "attention.k_norm": ("head_dim",),
    "attention.o": ("hidden", "heads*head_dim"),
    "attention.o_bias": ("hidden",),
    "mla.q": ("heads*qk_nope+heads*qk_rope", "hidden"),
    "mla.q_a": ("q_rank", "hidden"),
    "mla.q_a_norm": ("q_rank",),
    "mla.q_b": ("heads*qk_nope+heads*qk_rope", "q_rank"),
    "mla.kv_a": ("kv_rank+qk_rope", "hidden"),
    "mla.kv_a_norm": ("kv_rank",),
    "mla.kv_b": ("heads*qk_nope+heads*v_dim", "kv_rank"),
    "mla.o": ("hidden", "heads*v_dim"),
    "mlp.norm": ("hidden",),
    "mlp.gate": ("mlp", "hidden"),
    "mlp.up": ("mlp", "hidden"),
    "mlp.down": ("hidden", "mlp"),
    "mlp.gate_bias": ("mlp",),
    "mlp.up_bias": ("mlp",),
    "mlp.down_bias": ("hidden",),
    "router": ("experts", "hidden"),
    "router.bias": ("experts",),
    "expert.gate": ("expert_mlp", "expert_in"),
    "expert.up": ("expert_mlp", "expert_in"),
    "expert.down": ("expert_in", "expert_mlp"),
    "latent.in": ("expert_in", "hidden"),
    "latent.out": ("hidden", "expert_in"),
    "shared.gate": ("shared_mlp", "hidden"),
    "shared.up": ("shared_mlp", "hidden"),
    "shared.down": ("hidden", "shared_mlp"),
    "shared.router": ("1", "hidden"),
    "mtp.embed_norm": ("hidden",),
    "mtp.hidden_norm": ("hidden",),
    "mtp.project": ("hidden", "2*hidden"),
    "mtp.norm": ("hidden",),
    "mamba.norm": ("hidden",),
    "mamba.in": (
        "2*mamba_heads*mamba_head_dim+2*mamba_groups*mamba_state+mamba_heads", "hidden"
    ),
    "mamba.conv": ("mamba_heads*mamba_head_dim+2*mamba_groups*mamba_state", "1", "conv"),
    "mamba.conv_bias": ("mamba_heads*mamba_head_dim+2*mamba_groups*mamba_state",),
    "mamba.a_log": ("mamba_heads",),
    "mamba.d": ("mamba_heads",),
    "mamba.dt_bias": ("mamba_heads",),
    "mamba.gate_norm": ("mamba_heads*mamba_head_dim",),
    "mamba.out": ("hidden", "mamba_heads*mamba_head_dim"),
}  # fmt: skip
"""The shape of each role's tensor, dims as sums of products of sizes."""


def sizes_of(architecture: type[Architecture], config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that a config states. Sizes that most configs leave out follow from others.

    A table's `a|b` is the first key that the config has, `a*b` a product; of a list or a text its length counts.

    >>> class Small:
    ...     name, model_types, names = "small", ("small",), {}
    ...     sizes = {"hidden": "hidden_size", "heads": "num_attention_heads", "layers": "num_layers|pattern"}
    >>> sizes_of(Small, {"hidden_size": 64, "num_attention_heads": 4, "pattern": "M*M-"})
    {'hidden': 64, 'heads': 4, 'layers': 4, 'head_dim': 16, 'kv_heads': 4, 'expert_in': 64}
    """
    found = {size: _stated(keys, config) for size, keys in architecture.sizes.items()}
    sizes = {size: number for size, number in found.items() if number is not None}
    if "hidden" in sizes and sizes.get("heads"):
        sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
        sizes.setdefault("kv_heads", sizes["heads"])
    if "hidden" in sizes:
        sizes.setdefault("expert_in", sizes["hidden"])
    return sizes


def _stated(keys: str, config: Mapping[str, Any]) -> int | None:
    for choice in keys.split("|"):
        values = [config.get(key) for key in choice.split("*")]
        if all(value is not None for value in values):
            return prod(value if isinstance(value, int) else len(value) for value in values if value is not None)
    return None


def shape_of(role: str, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """The shape of a role's tensor; None for a dim whose sizes aren't all known, `()` for a role that isn't listed.

    >>> shape_of("mla.kv_a", {"kv_rank": 512, "qk_rope": 64}), shape_of("shared.router", {"hidden": 8})
    ((576, None), (1, 8))
    """
    return tuple(_extent(dim, sizes) for dim in ROLES.get(role, ()))


def _extent(dim: str, sizes: Mapping[str, int]) -> int | None:
    terms = [[_number(factor, sizes) for factor in term.split("*")] for term in dim.split("+")]
    if any(number is None for term in terms for number in term):
        return None
    return sum(prod(number for number in term if number is not None) for term in terms)


def _number(factor: str, sizes: Mapping[str, int]) -> int | None:
    return int(factor) if factor.isdigit() else sizes.get(factor)
