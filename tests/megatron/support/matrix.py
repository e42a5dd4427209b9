"""Which layouts are tried with which models: all that Megatron can build here, or a sample with every pair of values.

What Megatron or Megatron-Bridge refuses by itself is listed in `refused`, with the reason, and isn't counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from attrs import frozen
from build import Layout

VALUES: dict[str, tuple[Any, ...]] = {
    "kind": (
        "llama", "qwen2", "qwen3", "qwen3-tied", "qwen3-odd-vocab", "qwen3-uneven", "qwen3-moe", "deepseek",
        "deepseek-plain-q", "deepseek-mtp", "nemotron-h",
    ),
    "local": (False, True),
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "vp": (None, 2),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "cp": (1, 2),
    "dp": (1, 2),
}  # fmt: skip
EXPERTS = ("qwen3-moe", "deepseek", "deepseek-plain-q", "deepseek-mtp", "nemotron-h")
LARGEST = 8
"""The most ranks a case may have."""


@frozen
class Case:
    """A kind of model in a layout."""

    kind: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout}"


def case(**chosen: Any) -> Case:
    """The case of a choice of values."""
    kind = chosen.pop("kind")
    if kind not in EXPERTS:
        chosen["etp"] = None
    uneven = {"first": 2} if kind == "qwen3-uneven" and chosen["pp"] > 1 else {}
    return Case(kind, Layout(**chosen, **uneven, pad=384 if kind == "qwen3-odd-vocab" else None))


def refused(chosen: dict[str, Any]) -> str:
    """Why a choice of values can't be built; nothing if it can."""
    kind, local, pp, vp = (chosen[name] for name in ("kind", "local", "pp", "vp"))
    ranks = chosen["tp"] * chosen["cp"]
    expert = chosen["ep"] * chosen["etp"]
    if kind not in EXPERTS and expert > 1:
        return "a dense model has no experts to cut"
    if vp and pp == 1:
        return "virtual stages need a pipeline"
    if vp and kind == "nemotron-h":
        return "Megatron-Bridge asserts that a hybrid model has no virtual stages"
    if vp and kind == "qwen3-uneven":
        return "five layers aren't four virtual stages"
    if local and chosen["cp"] > 1:
        return "Megatron: context parallelism is TransformerEngine's attention alone"
    if local and kind == "nemotron-h":
        return "hybrid models have a spec of TransformerEngine's layers alone"
    if kind == "qwen3-odd-vocab" and chosen["tp"] == 1:
        return "Megatron-Bridge pads what it loads only where tensor parallelism cuts it"
    if case(**chosen).layout.world > LARGEST:
        return f"more than {LARGEST} ranks"
    if kind in EXPERTS and max(ranks, expert) % min(ranks, expert):
        return "the experts' grid and the others' don't fill the same ranks"
    return ""


def choices() -> Iterator[dict[str, Any]]:
    """Every choice of values that can be built."""
    for values in product(*VALUES.values()):
        chosen = dict(zip(VALUES, values, strict=True))
        if not refused(chosen):
            yield chosen


def whole() -> list[Case]:
    """Every case."""
    return [case(**chosen) for chosen in choices()]


def _pairs(chosen: dict[str, Any]) -> frozenset[Any]:
    return frozenset(combinations(chosen.items(), 2))


def sample() -> list[Case]:
    """Cases such that every two values that go together at all are in one of them. Smaller ones first, so they're few
    and small: the next is always the one with the most new pairs, of equals the one with the fewest ranks."""
    left = {number: (_pairs(chosen), chosen) for number, chosen in enumerate(choices())}
    wanted = frozenset().union(*(pairs for pairs, _ in left.values()))
    taken = []
    while wanted:
        best = max(left, key=lambda n: (len(left[n][0] & wanted), -case(**left[n][1]).layout.world, -n))
        pairs, chosen = left.pop(best)
        wanted -= pairs
        taken.append(case(**chosen))
    return taken
