"""Megatron's own account of what a rank holds: the entries of `sharded_state_dict`, one a shard of a tensor.

1. With singleton shards, an entry's key has the layer's and the expert's number in it; factories (gate and up, Mamba's
   parts) are built into one entry a part. It needs no collective.
2. An entry says the whole shape, where the shard begins, and whose copy it is: (pipeline, tensor, data) numbers, all
   zero for the one rank that owns it.
3. Its data must be a view of a parameter or buffer as it lives, else nobody would read the values of later steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from refit_adapters._megatron_chunks import Chunk, memory_of
from refit_sdk.errors import LayoutError


@frozen(eq=False)
class Entry:
    """A shard: `key` of the tensor or part, its whole `shape`, where the shard starts, and its storage.

    `parameter` is the chunk's own name; entries of one parameter come one after another. `replica` is (pipeline,
    tensor, data), all zero for the owner. `padded`: the whole shape may have rows that no checkpoint has.
    """

    key: str
    parameter: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    view: Any
    replica: tuple[int, ...] = (0, 0, 0)
    padded: bool = False

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the one that owns the shard; the others have copies."""
        return not any(self.replica)

    @property
    def stop(self) -> tuple[int, ...]:
        """Where the shard ends."""
        return tuple(start + extent for start, extent in zip(self.start, self.view.shape, strict=True))


def entries_of(chunk: Chunk) -> tuple[Entry, ...]:
    """A chunk's entries, in its own order. `LayoutError` for what isn't a view of live, plain memory."""
    metadata: dict[str, Any] = {"singleton_local_shards": True}
    group = getattr(chunk.groups, "dp_cp", None)
    if group is not None:
        metadata["dp_cp_group"] = group
    state: Mapping[str, Any] = chunk.module.sharded_state_dict(metadata=metadata)
    found = tuple(entry for name, item in state.items() for entry in _entries(name, item))
    _check_live(found, memory_of(chunk))
    _check_all_there(found, chunk)
    return found


def _entries(name: str, item: Any) -> Iterator[Entry]:
    for part in _built(item):
        ahead = part.prepend_axis_num
        if ahead:
            raise LayoutError(
                f"{part.key}: this version of Megatron stacks {ahead} numbers in front of the shape where the key "
                f"should have them; a version with singleton shards is needed (megatron-core 0.16 or later)"
            )
        view = part.data.detach()
        yield Entry(
            key=part.key,
            parameter=name,
            shape=tuple(part.global_shape),
            start=tuple(part.global_offset),
            view=view,
            replica=_replica(part.replica_id),
            padded=bool(part.allow_shape_mismatch),
        )


def _built(item: Any) -> list[Any]:
    """The shards in an item: what a factory builds, the item itself, or nothing for objects that aren't tensors."""
    if callable(getattr(item, "build", None)):
        built = item.build()
        parts = list(built.values()) if isinstance(built, dict) else built
        return [part for part in parts if hasattr(part, "global_offset")]
    return [item] if hasattr(item, "replica_id") and hasattr(item, "prepend_axis_num") else []


def _replica(number: Any) -> tuple[int, ...]:
    return tuple(number) if isinstance(number, (tuple, list)) else (0, 0, int(number))


def _check_live(entries: tuple[Entry, ...], memory: set[int]) -> None:
    copies = [entry.key for entry in entries if entry.view.numel() and not _lives_in(entry.view, memory)]
    if copies:
        raise LayoutError(
            f"{_some(copies)}: Megatron hands out a copy, not the parameter itself (quantised, gathered or converted "
            f"for saving), so its later values can't be read in place; such weights aren't supported"
        )


def _lives_in(view: Any, memory: set[int]) -> bool:
    return not view.is_meta and view.untyped_storage().data_ptr() in memory


def _check_all_there(entries: tuple[Entry, ...], chunk: Chunk) -> None:
    """No parameter without an entry: a module that describes only a part of itself would lose it."""
    begun = {entry.view.data_ptr() for entry in entries}
    parameters = chunk.module.named_parameters()
    lost = [name for name, parameter in parameters if parameter.numel() and parameter.data_ptr() not in begun]
    if lost:
        raise LayoutError(f"{_some(lost)}: a parameter, but sharded_state_dict has no entry for it")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
