"""How tensor parallelism cuts a checkpoint, tensor by tensor, by name. No torch, no I/O.

1. A rule is a pattern of names (`fnmatch`) and what is done with a tensor: a dim that is cut, by heads or evenly, or
   `whole`. The first rule that matches counts; a caller's own come first.
2. Heads are cut whole. Fewer KV heads than ranks are shared: each is held by several ranks.
3. Embeddings and heads may be cut unevenly, as `torch.chunk` does; anything else must divide.
4. A name that no rule matches is an error, never a replica.

>>> layout = TensorParallel(2, Heads(4, 2))
>>> layout.box("model.layers.0.mlp.down_proj.weight", (8, 6), rank=1)
Box((0, 3), (8, 6))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from attrs import field, frozen, validators

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.packing import Part

WHOLE: Final = "whole"

RULES: Final[tuple[tuple[str, str], ...]] = (
    *((f"*{name}.weight", WHOLE) for name in ("norm", "mlp.gate", "shared_expert_gate")),
    *((f"*.{name}.weight", WHOLE) for name in ("q_a_proj", "kv_a_proj_with_mqa")),
    *((f"*{name}.bias", WHOLE) for name in ("norm", "o_proj", "down_proj")),
    ("*.e_score_correction_bias", WHOLE),
    *((f"*.{name}_proj.*", f"0 by {name}") for name in "qkv"),
    *((f"*.{name}.*", "0") for name in ("gate_proj", "up_proj", "w1", "w3")),
    *((f"*.{name}.weight", "1") for name in ("o_proj", "down_proj", "w2")),
    *((name, "0 uneven") for name in ("*embed_tokens.weight", "*lm_head.weight")),
)  # fmt: skip
"""What decoders of the Llama kind call their tensors, dense or with experts."""


@frozen
class Heads:
    """Query heads and KV heads of a model, None where its config doesn't say."""

    queries: int | None = None
    kv: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads:
        """What a `config.json` says, at its top or under `text_config`.

        >>> Heads.of({"num_attention_heads": 8})
        Heads(queries=8, kv=8)
        """
        inner = config.get("text_config")
        told = inner if isinstance(inner, dict) else config
        queries = told.get("num_attention_heads")
        kv = told.get("num_key_value_heads", queries)
        return cls(queries if isinstance(queries, int) else None, kv if isinstance(kv, int) else None)


@frozen
class TensorParallel:
    """`size` ranks. `rules` are a caller's own, (pattern, a dim's number or "whole"), and come before those here."""

    size: int = field(validator=validators.ge(1))
    heads: Heads = field(factory=Heads)
    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, layout: str, *, heads: Heads, rules: Iterable[tuple[str, str]] = ()) -> TensorParallel:
        """The layout that a string says: `whole`, or `tp=4`.

        >>> TensorParallel.parse("tp=4", heads=Heads()).size
        4
        """
        name, _, number = layout.partition("=")
        if layout == WHOLE:
            return cls(1, heads, tuple(rules))
        if name != "tp" or not number.isdecimal() or int(number) < 1:
            raise LayoutError(f"{layout!r} is not a layout: say 'whole', or 'tp=N' for N tensor-parallel ranks")
        return cls(int(number), heads, tuple(rules))

    def box(self, name: str, shape: tuple[int, ...], *, rank: int) -> Box:
        """The rank's region of a tensor. `LayoutError` if no rule says, or the rule doesn't fit."""
        rule = WHOLE if self.size == 1 else self._rule(name)
        if rule == WHOLE:
            return Box.whole(shape)
        dim, _, how = rule.partition(" ")
        if int(dim) >= len(shape):
            raise LayoutError(
                f"{name} has shape {shape}, and so no dim {dim} that could be cut; say --cut '{name}=whole'"
            )
        return Box.whole(shape).narrow(int(dim), *self._share(name, shape[int(dim)], how, rank))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`LayoutError` with every tensor that can't be cut, and why."""
        problems = []
        for name, shape in shapes.items():
            try:
                self.box(name, shape, rank=0)
            except LayoutError as error:
                problems.append(str(error))
        if problems:
            more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
            raise LayoutError("\n  ".join((f"tp={self.size} doesn't fit this checkpoint:", *problems[:8], *more)))

    def _rule(self, name: str) -> str:
        for pattern, rule in (*self.rules, *RULES):
            if fnmatchcase(name, pattern):
                return rule
        raise LayoutError(f"{name}: no rule says how it's cut; give one, --cut 'PATTERN=DIM' or --cut 'PATTERN=whole'")

    def _share(self, name: str, extent: int, how: str, rank: int) -> tuple[int, int]:
        if how == "uneven":
            step = -(-extent // self.size)
            return min(extent, rank * step), min(extent, (rank + 1) * step)
        if not how:
            return Part(name, extent).share(rank=rank, size=self.size)
        units = self.heads.queries if how == "by q" else self.heads.kv
        if units is None or units < 1 or extent % units:
            raise LayoutError(
                f"{name} has {extent} rows and the config says {units or 'nothing of'} heads; heads are cut whole, so "
                f"config.json must give num_attention_heads and num_key_value_heads that fit"
            )
        return Part(name, units, extent // units, shared=how != "by q").share(rank=rank, size=self.size)
