"""The matrix of resharding that reference implementations publish: shapes × placements of both sides × ratios of ranks.

>>> len(matrix("quick")), matrix("full")[0].id
(183, '200x200, Shard(0) to Shard(0), 2 to 2')
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from refit_sdk.placement import Placement, Replicate, Shard
from refit_sdk.testing.cases import Case, Tier, cut

SHAPES = {
    (200, 200): (20, 20), (240, 240): (24, 24), (576, 576): (36, 36), (3072, 6144): (12, 24), (8192, 8192): (32, 32),
    (64, 128, 128): (4, 8, 8),
}  # fmt: skip
"""As published, and small ones that 2 and 3 ranks share as evenly, or as unevenly."""

RATIOS = ((2, 2), (3, 1), (1, 3))


def matrix(tier: Tier) -> list[Case]:
    """Every combination; evenly cut ones of two dims on two ranks each are required."""
    return list(_matrix(tier))


def _matrix(tier: Tier) -> Iterator[Case]:
    for published, small in SHAPES.items():
        placements: list[Placement] = [*map(Shard, range(len(published))), Replicate()]
        shape = published if tier == "full" else small
        for held, wanted, (sources, targets) in product(placements, placements, RATIOS):
            name = "x".join(map(str, published))
            yield Case(
                id=f"{name}, {_word(held)} to {_word(wanted)}, {sources} to {targets}",
                sources=cut(shape, sources, held, stored="bfloat16"),
                engines={"a": cut(shape, targets, wanted, stored="bfloat16")},
                group=f"{name}, published",
                required=len(published) == 2 and sources == targets,
            )


def _word(placement: Placement) -> str:
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate"
