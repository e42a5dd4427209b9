"""`fsdp`: modules sharded by FSDP2's `fully_shard`, as source: 1-D, HSDP, over tensor or expert parallelism.

1. Before values are read, every `FSDPModule` is resharded: after a forward without a backward the root's parameters are
   whole, plain and in the compute dtype.
2. What each rank holds is read off the DTensors: shards, replicas of HSDP, empty shards (nothing). FSDP cuts after the
   other axes, whatever the order of the mesh.
3. Plain parameters and persistent buffers are replicas that every rank holds. Parameters stay in their own dtype (the
   fp32 masters); the planner decides on a cast.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar

from refit_adapters._describe import fragments
from refit_adapters._megatron_chunks import is_megatron
from refit_adapters._walk import tops, walk
from refit_adapters._watch import Watch
from refit_sdk.adapter import Fragment, SourceAdapter
from refit_sdk.errors import LayoutError
from refit_sdk.hookspecs import hookimpl


class FsdpAdapter:
    """A module, or a sequence of modules (pipeline stages), in which `fully_shard` was applied anywhere."""

    name: ClassVar[str] = "fsdp"

    def __init__(self, model: Any, *, rank: int, size: int) -> None:
        self._model = model
        self._watch: Watch | None = None

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether there is an `FSDPModule` in the model, which is not Megatron's and doesn't describe itself."""
        return not hasattr(model, "refit_fragments") and any(_fsdp_modules(model)) and not is_megatron(model)

    def prepare(self) -> None:
        """Reshard every `FSDPModule`. `LayoutError` if one can't be, as its forward was broken off."""
        for module in _fsdp_modules(self._model):
            module.reshard()
            if not _is_sharded(module):
                raise LayoutError(
                    f"{type(module).__name__} can't be resharded: its parameters are still gathered for a forward that "
                    f"hasn't ended; end the forward, or run one whole forward and backward, before the push"
                )

    def describe(self) -> Sequence[Fragment]:
        """This rank's shards, replicas and buffers: views of live storage, under checkpoint names."""
        self.prepare()
        walked = walk(self._model)
        self._watch = Watch(walked)
        return fragments(walked, sharded_last=True)

    def identity(self) -> Hashable:
        """Changes when a parameter, a buffer or a submodule is rebound or reshaped."""
        if self._watch is None:
            self.prepare()
            self._watch = Watch(walk(self._model))
        return self._watch.look()

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of non-persistent buffers: they aren't in checkpoints, so no push carries them."""
        return walk(self._model).uncovered


def _fsdp_modules(model: Any) -> Iterator[Any]:
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:
        for top in tops(model) or ():
            yield from (module for module in top.modules() if isinstance(module, loaded.FSDPModule))


def _is_sharded(module: Any) -> bool:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return all(group.is_sharded for group in groups if group is not None)


@hookimpl
def refit_register_source_adapters() -> list[type[SourceAdapter]]:
    """The adapter of this module."""
    return [FsdpAdapter]
