"""Small modules, sharded by torch itself, that its own loader fills and its own exporter reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (11, 6), "up.weight": (10, 6), "up.bias": (10,), "down.weight": (6, 10), "norm.weight": (6,),
}  # fmt: skip


class Small(torch.nn.Module):
    """An embedding, two projections and a norm; 11 rows aren't shared evenly by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6, bias=False)
        self.norm = torch.nn.RMSNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run."""
        found: torch.Tensor = self.norm(self.down(self.up(self.embed(tokens)).relu()))
        return found


def sharded(size: int) -> Small:
    """By FSDP2: every parameter by rows."""
    model = Small()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def parallel(size: int) -> Small:
    """By DTensor's tensor parallelism: rows, columns, and what is left whole."""
    model = Small()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model


WHOLE = StateDictOptions(full_state_dict=True)


def load(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """By torch's own: each rank takes its part of whole tensors."""
    set_model_state_dict(model, dict(tensors), options=WHOLE)


def export(model: torch.nn.Module) -> dict[str, Any]:
    """By torch's own, whole on every rank."""
    return get_model_state_dict(model, options=WHOLE)
