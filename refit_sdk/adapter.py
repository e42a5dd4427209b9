"""The doors for frameworks: what a rank's model holds, and how an engine is paused, fenced and resumed.

An adapter turns a framework's model into `Fragment`s once, at its edge; nothing behind it knows the framework. Of the
doors here, `SourceAdapter` and `TargetAdapter` are given a live model by a session; `EngineControl` speaks to an engine
that runs elsewhere; `PaperLayout` makes manifests from a layout string, without torch; an `Architecture` is a
checkpoint's names as data; an `Observer` watches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from attrs import field, frozen

from refit_sdk.box import Box, coordinates

if TYPE_CHECKING:
    import torch

    from refit_sdk.report import PushReport
    from refit_sdk.world import Manifest


@frozen(eq=False)
class Fragment:
    """One place where a weight lives: a region of a checkpoint tensor and the live view that stores it.

    `name` is the full checkpoint name of one member, `shape` the whole tensor's, `box` the region this rank holds,
    `view` a view of live storage with `view.shape == box.shape` (any strides). `granule` is the smallest cut in each
    dim (None: 1). `aliases` are other checkpoint names of the same bytes (a tied head).
    """

    name: str
    shape: tuple[int, ...] = field(converter=coordinates)
    box: Box
    view: torch.Tensor
    granule: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()


@runtime_checkable
class SourceAdapter(Protocol):
    """What a training framework's model holds. Constructed as `adapter(model, rank=r, size=n)`.

    `accepts` says whether this adapter is the right one for an object; exactly one must say so.
    """

    name: ClassVar[str]

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether this adapter understands the object. Imports nothing; looks at classes that are already loaded."""
        ...

    def prepare(self) -> None:
        """Called on every source rank before values are read. It alone may use the trainer's own groups."""
        ...

    def describe(self) -> Sequence[Fragment]:
        """This rank's fragments: live views, no copies."""
        ...

    def identity(self) -> Hashable:
        """A cheap value that changes when any storage that was described is rebound or reshaped."""
        ...


@runtime_checkable
class TargetAdapter(Protocol):
    """What a generating rank's model holds, and how it takes new weights. Made as `adapter(model, rank=r, size=n)`.

    An adapter that knows of tensors it doesn't describe may list their names as `uncovered`, for the session's.
    """

    name: ClassVar[str]

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether this adapter understands the object. Imports nothing; looks at classes that are already loaded."""
        ...

    def describe(self) -> Sequence[Fragment]:
        """This rank's fragments: live views that the push writes."""
        ...

    def identity(self) -> Hashable:
        """A cheap value that changes when any storage that was described is rebound or reshaped."""
        ...

    def install(self, *, version: int) -> None:
        """Called when all bytes have arrived, before this rank confirms: refresh what is derived from weights."""
        ...

    def fence(self, reason: str) -> None:
        """Keep the model from serving until `unfence`. Called again, the new reason replaces the old."""
        ...

    def unfence(self) -> None:
        """Let the model serve again. Called after a version was committed."""
        ...


@runtime_checkable
class EngineControl(Protocol):
    """The verbs of an engine that serves requests, as the pushing side calls them."""

    name: ClassVar[str]

    def pause(self, *, mode: str) -> None:
        """Stop or hold running requests; `mode` is one of the engine's own."""
        ...

    def update(self, *, version: int, info: Mapping[str, Any]) -> None:
        """Start receiving on every rank of the engine."""
        ...

    def finish(self, *, version: int) -> None:
        """Called when the version is committed: label it, apply the cache policy."""
        ...

    def resume(self) -> None:
        """Serve again."""
        ...

    def fence(self, reason: str) -> None:
        """Keep the engine paused until a full push succeeds."""
        ...


@runtime_checkable
class PaperLayout(Protocol):
    """A layout string and checkpoint shapes → manifests, without torch or a framework."""

    name: ClassVar[str]

    def manifests(self, layout: str, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Iterable[Manifest]:
        """One manifest a rank, in rank order."""
        ...


@runtime_checkable
class Architecture(Protocol):
    """The names of an architecture's Hugging Face checkpoint, as data.

    `model_types` are the `model_type`s of configs that it is for. `names` has a checkpoint name for each *role*, with
    `{layer}` and `{expert}` where numbers go; the roles are those of `refit_adapters.architectures.roles`. `sizes` says
    under which key, or product of keys (`a*b`), a config has the number of heads, of experts and so on.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    names: ClassVar[Mapping[str, str]]
    sizes: ClassVar[Mapping[str, str]]


@runtime_checkable
class Observer(Protocol):
    """Told of every push after its outcome is known. It may not raise, and nothing waits for it."""

    name: ClassVar[str]

    def pushed(self, report: PushReport) -> None:
        """Called once a push, on every rank, with what this rank knows."""
        ...
