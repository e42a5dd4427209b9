"""`dtensor`: plain modules and modules with DTensor parameters (`parallelize_module`), on either side.

1. What a rank holds is read off each parameter: a DTensor's shards, or the whole of a plain tensor. A mapping of
   checkpoint names to tensors is described the same way.
2. Nothing in a plain module is derived from its weights, so installing does nothing. Non-persistent buffers aren't in
   checkpoints: they're listed as `uncovered`.
3. Fenced, the module's forward raises `FencedError`.

Modules with an `FSDPModule` inside are `fsdp`'s; those of engines and of Megatron have adapters of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final

import torch

from refit_adapters._describe import fragments
from refit_adapters._fence import Fence
from refit_adapters._walk import is_tensor_mapping, tops, walk
from refit_adapters._watch import Watch
from refit_adapters.fsdp import FsdpAdapter
from refit_sdk.adapter import Fragment, SourceAdapter, TargetAdapter
from refit_sdk.errors import LayoutError
from refit_sdk.hookspecs import hookimpl

FOREIGN_PACKAGES: Final = frozenset({"vllm", "sglang", "megatron", "deepspeed"})
"""Packages whose modules shard plain parameters without saying so in the tensors."""

_FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"


class DTensorAdapter:
    """A module, a sequence of modules, or a mapping of checkpoint names to tensors."""

    name: ClassVar[str] = "dtensor"

    def __init__(self, model: Any, *, rank: int, size: int) -> None:
        self._model = model
        self._fence = Fence(tops(model) or ())
        self._watch: Watch | None = None

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether the object is made of torch's own tensors and modules, without FSDP2, and doesn't describe itself."""
        if hasattr(model, "refit_fragments") or FsdpAdapter.accepts(model):
            return False
        modules = tops(model)
        return is_tensor_mapping(model) if modules is None else not _packages(modules) & FOREIGN_PACKAGES

    def prepare(self) -> None:
        """Nothing to do: the parameters are what they are."""

    def describe(self) -> Sequence[Fragment]:
        """This rank's shards and whole tensors: views of live storage, under checkpoint names."""
        _refuse_fsdp1(tops(self._model) or ())
        walked = walk(self._model)
        self._watch = Watch(walked)
        return fragments(walked)

    def identity(self) -> Hashable:
        """Changes when a parameter, a buffer or a submodule is rebound or reshaped."""
        if self._watch is None:
            self._watch = Watch(walk(self._model))
        return self._watch.look()

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of non-persistent buffers: they aren't in checkpoints, so no push writes them."""
        return walk(self._model).uncovered

    @property
    def fenced(self) -> str | None:
        """Why the model may not serve, or None. A mapping of tensors has no forward that could refuse: ask here."""
        return self._fence.reason

    def install(self, *, version: int) -> None:
        """Nothing to do: the push wrote the parameters themselves."""

    def fence(self, reason: str) -> None:
        """Let the module's forward raise `FencedError` until `unfence`. Called again, it keeps the first reason."""
        self._fence.close(reason)

    def unfence(self) -> None:
        """Let the module run again."""
        self._fence.open()


def _packages(modules: Sequence[torch.nn.Module]) -> set[str]:
    classes = {type(module) for top in modules for module in top.modules()}
    return {cls.__module__.partition(".")[0] for cls in classes}


def _refuse_fsdp1(modules: Sequence[torch.nn.Module]) -> None:
    for top in modules:
        for name, module in top.named_modules():
            if type(module).__module__ == _FSDP1:
                raise LayoutError(
                    f"{name or 'the model'} is wrapped by FSDP1 (FullyShardedDataParallel), whose flat shards can't be "
                    f"described; wrap the model with torch.distributed.fsdp.fully_shard (FSDP2)"
                )


@hookimpl
def refit_register_source_adapters() -> list[type[SourceAdapter]]:
    """The adapter of this module, for trainers."""
    return [DTensorAdapter]


@hookimpl
def refit_register_target_adapters() -> list[type[TargetAdapter]]:
    """The adapter of this module, for generating ranks."""
    return [DTensorAdapter]
