"""Bytes from every rank of a Megatron job to every other, over the groups that it has: tensor, pipeline, then data.

The ranks of a job are a grid of these three, so what went along one axis after the other has been everywhere. Every
wait has a deadline. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from refit_sdk.errors import LayoutError

SECONDS: Final = 120.0
"""How long one gather along one axis may take."""
AXES: Final = ("tp", "pp", "dp_cp")


def gather(mine: bytes, groups: Any) -> list[bytes]:
    """What each rank gave, in one order on all of them. Without groups, or on a job of one rank, only one's own."""
    known = [mine]
    for axis in AXES:
        group = getattr(groups, axis, None)
        if group is not None and dist.is_initialized() and dist.get_world_size(group) > 1:
            packed = msgspec.msgpack.encode(known)
            known = [each for data in _along(packed, group, axis) for each in _unpacked(data)]
    return known


def _unpacked(data: bytes) -> list[bytes]:
    return msgspec.msgpack.decode(data, type=list[bytes])


def _along(mine: bytes, group: Any, axis: str) -> list[bytes]:
    device = _device(group)
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    sizes = [int(each) for each in _all_gather(size, group, axis)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    parts = _all_gather(padded.to(device), group, axis)
    return [part.cpu().numpy()[:length].tobytes() for part, length in zip(parts, sizes, strict=True)]


def _all_gather(mine: torch.Tensor, group: Any, axis: str) -> Sequence[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(parts, mine, group=group, async_op=True)
        work.wait(timedelta(seconds=SECONDS))
    except RuntimeError as error:
        raise LayoutError(
            f"the ranks of this rank's {axis} group didn't all come to compare what they hold, within {SECONDS:g} s: "
            f"{error}; every source rank has to call push"
        ) from error
    return parts


def _device(group: Any) -> torch.device:
    backend = str(dist.get_backend(group))
    only_cuda = "nccl" in backend and "gloo" not in backend
    return torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")
