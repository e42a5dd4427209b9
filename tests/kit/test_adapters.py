"""Our own adapters, by the kit: torch's loader and exporter, and safetensors' own library, are the oracles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models_of_torch as small
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from refit_sdk.exporting import Export, Wanted
from refit_sdk.testing import AdapterSuite
from refit_sdk.testing.adapters import Side

FLOATS = {name: (shape, "float32") for name, shape in small.SHAPES.items()}


class TestFsdp(AdapterSuite):
    adapter = "fsdp"
    sides = ("source",)

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return FLOATS

    def build(self, *, side: Side, rank: int, size: int, folder: Path) -> Any:
        return small.sharded(size)

    def load(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        small.load(model, tensors)

    def export(self, model: Any) -> Mapping[str, torch.Tensor]:
        return small.export(model)

    def serve(self, model: Any) -> None:
        model(torch.arange(3))


class TestDTensor(TestFsdp):
    adapter = "dtensor"
    sides = ("source", "target")

    def build(self, *, side: Side, rank: int, size: int, folder: Path) -> Any:
        return small.parallel(size)


class TestSafetensors(AdapterSuite):
    adapter = "safetensors"
    keeps_storage = False

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {**FLOATS, "head.weight": ((11, 6), "bfloat16"), "scale": ((), "float32")}

    def build(self, *, side: Side, rank: int, size: int, folder: Path) -> Any:
        if side == "source":
            return folder
        wanted = {name: Wanted(shape, dtype) for name, (shape, dtype) in self.checkpoint().items()}
        return Export(directory=folder / "out", tensors=wanted)

    def load(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        if dist.get_rank() == 0:
            save_file(dict(tensors), model / "next")
            (model / "next").rename(model / "model.safetensors")
        dist.barrier()

    def export(self, model: Any) -> Mapping[str, torch.Tensor]:
        dist.barrier()
        found: dict[str, torch.Tensor] = {}
        for path in sorted(Path(model.directory).glob("*.safetensors")):
            found |= load_file(path)
        return found
