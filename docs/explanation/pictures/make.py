"""The pictures of the chapter on layouts, drawn by plans of small worlds; run, it writes them beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from refit_backends.reshard import Reshard

from refit_sdk import fused
from refit_sdk.adapter import Fragment
from refit_sdk.fold import fold
from refit_sdk.layout import AnyLayout, Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Replicate, Shard, StridedShard
from refit_sdk.plan import Plan, make_plan
from refit_sdk.settings import Settings
from refit_sdk.topology import Topology
from refit_sdk.world import Seat, World

Ranks = Sequence[Iterable[Fragment]]
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def plan_of(sources: Ranks, targets: Ranks) -> Plan:
    """The plan of one side of sources and one engine, each rank a process."""
    sides = [("source", "", rank, held) for rank, held in enumerate(sources)]
    sides += [("target", "rollout-0", rank, held) for rank, held in enumerate(targets)]
    seats = tuple(Seat(side, engine, rank, n) for n, (side, engine, rank, _) in enumerate(sides))  # type: ignore[arg-type]
    manifests = tuple(fold(held) for *_, held in sides)
    world = World(0, seats, manifests, tuple(range(len(sides))))
    topology = Topology.single(len(sides))
    return make_plan(world, settings=Settings(), transports={"reshard": Reshard()}, topology=topology)


def spread(name: str, shape: tuple[int, ...], layout: AnyLayout, size: int) -> Ranks:
    """What each rank holds by a layout."""
    boxes = [layout.boxes(shape, rank=rank) for rank in range(size)]
    return [[Fragment(name, shape, box, _nothing(box.shape)) for box in held] for held in boxes]


def _nothing(shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, "float32")


def fused_attention(size: int, kv_heads: int) -> Ranks:
    """A fused projection of eight query heads, over ranks."""
    counts: Mapping[str, Any] = {"heads": 8, "kv_heads": kv_heads, "head_dim": 2, "size": size}
    rows = 2 * (8 // size + 2 * max(1, kv_heads // size))
    return [fused.fused_qkv(_nothing((rows, 16)), (Q, K, V), rank=rank, **counts) for rank in range(size)]


def pictures() -> dict[str, str]:
    """Every picture, by the name of its file."""
    rows, columns = Layout(Mesh(range(3)), [Shard(0)]), Layout(Mesh(range(2)), [Shard(1)])
    first = "model.layers.0.mlp.down_proj.weight"
    tensor = plan_of(spread(first, (12, 8), rows, 3), spread(first, (12, 8), columns, 2))
    mesh = Mesh([[0, 1], [2, 3]], axes=("dp", "tp"))
    strided = Layout(mesh, (StridedShard(0, split_factor=2), Shard(0)))
    replicated = Layout(mesh, (Replicate(), Shard(0)))
    over = "model.layers.0.mlp.up_proj.weight"
    two = plan_of(spread(over, (12, 8), strided, 4), spread(over, (12, 8), replicated, 4))
    heads = plan_of(fused_attention(2, 2), fused_attention(4, 2))
    return {
        "rows-to-columns.svg": tensor.draw(first),
        "strided.svg": two.draw(over),
        "query-heads.svg": heads.draw(Q),
        "shared-kv-heads.svg": heads.draw(K),
    }


HERE: Final = Path(__file__).parent

if __name__ == "__main__":
    for file, text in pictures().items():
        (HERE / file).write_text(text)
