"""The judge of the demo: what every element of every target must be, known without refit_sdk.

1. The sources gather each parameter whole with torch's own collective (`full_tensor`), cast it with torch, and rank 0
   writes it to a file, with the logits of the model on a fixed prompt.
2. A target cuts its share out of each whole tensor with `torch.chunk` and compares raw bits, element by element.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

import torch
from attrs import frozen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

LOGITS = "demo.logits"
DTYPE = torch.bfloat16


@frozen
class Verdict:
    """Elements compared, how many are wrong, how many are new since the version before, and the first wrong tensor."""

    elements: int
    wrong: int
    changed: int
    first_wrong: str


def expectation_path(directory: Path, version: int) -> Path:
    """The file of a version."""
    return directory / f"expected-{version}.safetensors"


def gather_expectation(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Every parameter whole, in bfloat16, on ranks that keep them. A collective: every rank of the mesh calls it."""
    gathered = ((name, _whole(parameter)) for name, parameter in model.named_parameters())
    return {name: whole.to(DTYPE).contiguous() for name, whole in gathered if keep}


def _whole(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_expectation(tensors: dict[str, Tensor], logits: Tensor, *, directory: Path, version: int) -> None:
    """Write a version's file; whoever finds it finds it whole."""
    path = expectation_path(directory, version)
    partial = path.with_suffix(".partial")
    save_file({**tensors, LOGITS: logits.float().contiguous()}, partial)
    os.replace(partial, path)


def judge(model: nn.Module, *, directory: Path, version: int) -> Verdict:
    """Compare every local element with the version's file, and count what changed since the file before it."""
    elements, wrong, changed, first_wrong = 0, 0, 0, ""
    now = _shares(model, expectation_path(directory, version))
    before: Iterable[Tensor | None] = repeat(None)
    if version > 1:
        before = _shares(model, expectation_path(directory, version - 1))
    for (name, parameter), expected, earlier in zip(model.named_parameters(), now, before, strict=False):
        differing = _bits_differ(local_of(parameter), expected)
        elements, wrong = elements + expected.numel(), wrong + differing
        changed += expected.numel() if earlier is None else _bits_differ(earlier, expected)
        first_wrong = first_wrong or (name if differing else "")
    return Verdict(elements, wrong, changed, first_wrong)


def _shares(model: nn.Module, path: Path) -> Iterator[Tensor]:
    with safe_open(path, framework="pt") as whole:
        for name, parameter in model.named_parameters():
            yield share_of(whole.get_tensor(name), parameter)


def share_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """The part of a whole tensor that this rank's parameter must hold, on a mesh of one axis."""
    if not isinstance(parameter, DTensor):
        return whole
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        return whole
    chunks = whole.chunk(parameter.device_mesh.size(), placement.dim)
    rank = parameter.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)


def local_of(parameter: Tensor) -> Tensor:
    """This rank's storage of a parameter."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bits_differ(found: Tensor, expected: Tensor) -> int:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return expected.numel()
    return int((found.contiguous().view(torch.int16) != expected.contiguous().view(torch.int16)).sum())


def logits_error(found: Tensor, *, directory: Path, version: int) -> float:
    """How far logits are from the source's, as a share of the source's norm; infinite if any of them isn't finite.

    The source computes in its own precision and the target in bfloat16, so a right answer is not zero.
    """
    with safe_open(expectation_path(directory, version), framework="pt") as whole:
        expected = whole.get_tensor(LOGITS)
    error = float((found.float() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf
