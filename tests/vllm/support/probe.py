"""The oracle of what a loader does: coordinates go through it, and are read back from every parameter.

Each element of each checkpoint tensor is a number of its own, so a parameter that has been loaded says which element of
which tensor lies where; zero is where nothing was loaded. It shares nothing with the trace but the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def coordinates(checkpoint: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors whose elements are their own numbers, from 1 on."""
    made, first = {}, 1
    for name, (shape, _) in checkpoint.items():
        size = torch.Size(shape).numel()
        made[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
        first += size
    return made


def probe(model: Any, numbers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What lies where in each parameter after the model's own `load_weights`."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.data = torch.zeros(parameter.shape, dtype=torch.float64)
    model.load_weights(iter([(name, tensor.clone()) for name, tensor in numbers.items()]))
    return {name: parameter.data.clone() for name, parameter in parameters.items()}
