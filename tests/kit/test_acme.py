"""The third party's own tests, as its repository would have them: `tests/refit_acme`, found by its entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from refit_acme.weights import Weights

from refit_sdk.testing import AdapterSuite, FabricSuite, TransportSuite
from refit_sdk.testing.adapters import Side


class TestTransport(TransportSuite):
    transport = "acme"


class TestFabric(FabricSuite):
    fabric = "acme"


class TestAdapter(AdapterSuite):
    adapter = "acme"

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {"table.weight": ((7, 4), "float32"), "layers.0.w": ((5, 2, 3), "float32")}

    def build(self, *, side: Side, rank: int, size: int, folder: Path) -> Weights:
        return Weights({name: shape for name, (shape, _) in self.checkpoint().items()}, rank, size)

    def load(self, model: Weights, tensors: Mapping[str, torch.Tensor]) -> None:
        model.load(tensors)

    def export(self, model: Weights) -> Mapping[str, torch.Tensor]:
        return model.gather()

    def serve(self, model: Weights) -> None:
        model.run()
