"""Values that are new everywhere: a parameter all-gather that an optimizer step has put off is completed.

With `overlap_param_gather`, after a step each data-parallel rank has new values for its own shard alone; the rest come
when the next forward needs them. `start_param_sync(force_sync=True)` fetches them now, as Megatron does before it
saves; one that is under way is waited for. The next forward then finds them fetched, so nothing is gathered twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from refit_adapters._megatron_chunks import Chunk
from refit_sdk.errors import LayoutError


def overlaps(chunk: Chunk) -> bool:
    """Whether the chunk's parameter all-gather is put off."""
    return bool(getattr(getattr(chunk.ddp, "ddp_config", None), "overlap_param_gather", False))


def check(chunks: Iterable[Chunk]) -> None:
    """`LayoutError` for a chunk whose gather is put off and can't be completed from here."""
    for chunk in chunks:
        if overlaps(chunk) and not callable(getattr(chunk.ddp, "start_param_sync", None)):
            raise LayoutError(
                f"this {type(chunk.ddp).__name__} puts its parameter all-gather off (overlap_param_gather) and has no "
                f"start_param_sync that would complete it, so replicas are old after a step; train without the overlap"
            )


def complete(chunks: Iterable[Chunk]) -> None:
    """Complete every gather that is put off. A collective of the data-parallel groups: all source ranks call it."""
    for chunk in chunks:
        if overlaps(chunk):
            with torch.no_grad():
                chunk.ddp.start_param_sync(force_sync=True)
            _check_done(chunk.ddp)


def _check_done(ddp: Any) -> None:
    groups = [*getattr(ddp, "bucket_groups", ()), *getattr(ddp, "expert_parallel_bucket_groups", ())]
    if any(getattr(group, "param_gather_handle", None) is not None for group in groups):
        raise LayoutError(
            "a parameter all-gather is still under way after start_param_sync(force_sync=True), so replicas may be "
            "old; train without overlap_param_gather"
        )
