"""`vllm`: a worker's model inside a running vLLM, as target. Its layout is learnt from vLLM's own loader.

1. The loader is traced (`loadtrace`) over tensors with the names and shapes of a checkpoint, into twins of the
   parameters as they were when the model was built (`_vllm_twins`). Nothing live is touched.
2. Only what the live layers compute with is written in place (`_vllm_layers`); else the model is refused, naming every
   parameter.
3. What the loader computes with on the way, and so can't be a view of a checkpoint tensor, lands: it is received whole
   into scratch, and vLLM's own `load_weights` installs it. `shares` says how much that is.
4. Installing also writes what the loader fills in by itself (padding), and renews what vLLM derives (`_vllm_derived`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import field, frozen

from refit_adapters import _vllm_version
from refit_adapters._fence import Fence
from refit_adapters._vllm_derived import renew
from refit_adapters._vllm_layers import check
from refit_adapters._vllm_twins import Twins, in_place, twins_of
from refit_adapters._watch import states
from refit_adapters.loadtrace import Checkpoint, Trace, fragments, trace
from refit_sdk.adapter import Fragment, TargetAdapter
from refit_sdk.box import Box
from refit_sdk.checkpoint import TORCH_NAMES, stored_tensors
from refit_sdk.errors import LayoutError
from refit_sdk.hookspecs import hookimpl


@frozen(eq=False)
class VllmModel:
    """A worker's model, with what it doesn't say itself: give this to `RefitSession.target`.

    `config` is vLLM's `VllmConfig` of the engine. `checkpoint` says which tensors there are: a directory of
    safetensors, of which only headers are read, or (shape, dtype) by name; by default, the engine's own directory.
    """

    model: Any
    config: Any = field(kw_only=True)
    checkpoint: Any = field(default=None, kw_only=True)


@frozen
class Shares:
    """Bytes of this rank that a push writes directly, and bytes that land. `landing` names what lands, with reasons."""

    direct: int
    lands: int
    landing: Mapping[str, str]

    def __str__(self) -> str:
        """A line for logs.

        >>> print(Shares(990, 10, {"a.A_log": "aten.exp isn't a copy"}))
        99.0 % of 1000 bytes are written directly, 1.0 % land: a.A_log (aten.exp isn't a copy)
        """
        whole = max(1, self.direct + self.lands)
        text = f"{self.direct / whole:.1%}".replace("%", " %")
        rest = f"{self.lands / whole:.1%}".replace("%", " %")
        names = ", ".join(f"{name} ({reason})" for name, reason in list(self.landing.items())[:4])
        more = f" and {len(self.landing) - 4} more" if len(self.landing) > 4 else ""
        return f"{text} of {whole} bytes are written directly, {rest} land" + (f": {names}{more}" if names else "")


class VllmAdapter:
    """A `VllmModel`."""

    name: ClassVar[str] = "vllm"

    def __init__(self, model: Any, *, rank: int, size: int) -> None:
        if not isinstance(model, VllmModel):
            raise LayoutError(
                f"a vLLM model comes with its config: pass VllmModel(model, config=...), not {type(model)}"
            )
        self._given = model
        self._model: torch.nn.Module = model.model
        self._fence = Fence((self._model,))
        self._checkpoint = checkpoint_of(model)
        self._trace: Trace | None = None
        self._live: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether it is a `VllmModel`."""
        return isinstance(model, VllmModel)

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here: no vLLM, or one of another version."""
        return _vllm_version.missing()

    @classmethod
    def about(cls) -> str:
        """What of the installed vLLM is understood."""
        return _vllm_version.about()

    def describe(self) -> Sequence[Fragment]:
        """Views of live parameters, and scratch for what lands. `LayoutError` for what can't be written in place."""
        wanting = _vllm_version.missing()
        if wanting:
            raise LayoutError(wanting)
        twins = twins_of(self._model)
        check(self._model, twins)
        with self._in_config(), in_place(self._model, twins) as into:
            everything = {**into, **dict(self._model.named_buffers())}
            found = trace(self._model.load_weights, checkpoint=self._checkpoint, into=everything)  # type: ignore[arg-type]
        self._live = {name: place.live for name, place in twins.first.items()} | dict(self._model.named_buffers())
        self._trace = found
        device = next(iter(self._live.values())).device
        self._scratch = {name: self._room(name, device) for group in found.groups for name in group.names}
        direct = fragments(found, self._live, aliases=_aliases(twins, found, self._checkpoint))
        return [*direct, *(Fragment(n, tuple(t.shape), Box.whole(t.shape), t) for n, t in self._scratch.items())]

    def _room(self, name: str, device: torch.device) -> torch.Tensor:
        shape, dtype = self._checkpoint[name]
        return self._scratch[name] if name in self._scratch else torch.empty(shape, dtype=dtype, device=device)

    def identity(self) -> Hashable:
        """Changes when a parameter is rebound or reshaped, or experts have moved."""
        modules = list(self._model.modules())
        tensors = [tensor for module in modules for tensor in module._parameters.values()]
        maps = [module._buffers.get("_expert_map") for module in modules]
        experts = [tuple(each.tolist()) for each in maps if each is not None and not each.is_meta]
        return hash((tuple(map(id, tensors)), states(tensors), tuple(experts)))

    @property
    def trace(self) -> Trace:
        """What vLLM's loader does. Known once it was described."""
        return self._described()

    @property
    def shares(self) -> Shares:
        """How much is written directly, and how much lands. Known once it was described."""
        found = self._described()
        direct = sum(landing.box.size * self._live[landing.into].element_size() for landing in found.landings)
        reasons = {name: group.reason for group in found.groups for name in group.names}
        return Shares(direct, sum(tensor.nbytes for tensor in self._scratch.values()), reasons)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of parameters and buffers that the checkpoint has nothing for: they stay as they are."""
        return self._trace.empty if self._trace is not None else ()

    @property
    def fenced(self) -> str | None:
        """Why the model may not serve, or None."""
        return self._fence.reason

    def install(self, *, version: int) -> None:
        """Load what landed, write what the loader writes by itself, and derive again what vLLM derives."""
        found = self._described()
        with torch.inference_mode(), self._in_config():
            for group in found.groups:
                self._model.load_weights((name, self._scratch[name]) for name in group.names)  # type: ignore[operator]
            for constant in found.constants:
                live = self._live[constant.into].detach()
                view = live.as_strided(constant.shape, constant.strides, live.storage_offset() + constant.offset)
                view.copy_(torch.as_tensor(constant.value))
            renew(self._model, self._given.config.model_config.dtype)

    def fence(self, reason: str) -> None:
        """Let the model's forward raise `FencedError` until `unfence`."""
        self._fence.close(reason)

    def unfence(self) -> None:
        """Let the model run again."""
        self._fence.open()

    def _described(self) -> Trace:
        if self._trace is None:
            raise LayoutError("the model hasn't been described yet")
        return self._trace

    @contextlib.contextmanager
    def _in_config(self) -> Iterator[None]:
        """Loaders and hooks ask for the config of the engine."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._given.config):
            yield


def checkpoint_of(given: VllmModel) -> Checkpoint:
    """Shape and dtype of each checkpoint tensor. `LayoutError` if they can't be known."""
    stated = given.checkpoint if given.checkpoint is not None else given.config.model_config.model
    if isinstance(stated, Mapping):
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in stated.items()}
    found = stored_tensors(Path(stated))
    unknown = sorted({each.dtype for each in found.values()} - TORCH_NAMES.keys())
    if unknown:
        raise LayoutError(f"{stated} has tensors of dtype {', '.join(unknown)}, which torch has no dtype for")
    return {name: (each.shape, getattr(torch, TORCH_NAMES[each.dtype])) for name, each in found.items()}


def _aliases(twins: Twins, found: Trace, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Second names of tied tensors: `lm_head.weight`, or a checkpoint tensor of which nothing was loaded, if it's
    called like another name of the parameter that got one of its shape. What is numbered is a layer's, never tied so.
    """
    free = {_tail(name): name for name in (*found.unused, "lm_head.weight") if not _is_numbered(name)}
    aliases: dict[str, tuple[str, ...]] = {}
    for place_name, names in twins.names.items():
        others = {_tail(name) for name in names[1:] if not _is_numbered(name)}
        tied = {free[tail] for tail in others & free.keys()}
        for landing in found.landings if tied else ():
            if landing.into == place_name:
                shape = checkpoint[landing.name][0]
                same = {name for name in tied if checkpoint.get(name, (shape,))[0] == shape}
                aliases[landing.name] = tuple(sorted(same - {landing.name}))
    return aliases


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


@hookimpl
def refit_register_target_adapters() -> list[type[TargetAdapter]]:
    """The adapter of this module."""
    return [VllmAdapter]
