"""`fragments`: an object that describes itself, on either side. For models without a framework, and for cuts by hand.

1. `refit_fragments()` returns the rank's `Fragment`s: names, boxes and live views.
2. Optional methods take the adapter's other verbs: `refit_prepare()`, `refit_install(version=)`, `refit_fence(reason)`,
   `refit_unfence()`.
3. Fenced, a module's forward raises `FencedError`; of another object only the `fenced` reason is kept.

>>> class Half:
...     rows = torch.zeros(2, 3)
...     def refit_fragments(self):
...         return [Fragment("w", (4, 3), Box((2, 0), (4, 3)), self.rows)]
>>> FragmentsAdapter(Half(), rank=1, size=2).describe()[0].box
Box((2, 0), (4, 3))
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from refit_adapters._fence import Fence
from refit_adapters._watch import states
from refit_sdk.adapter import Fragment, SourceAdapter, TargetAdapter
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.hookspecs import hookimpl


class FragmentsAdapter:
    """Any object with a method `refit_fragments()`."""

    name: ClassVar[str] = "fragments"

    def __init__(self, model: Any, *, rank: int, size: int) -> None:
        self._model = model
        self._fence = Fence((model,) if isinstance(model, torch.nn.Module) else ())
        self._seen: list[Fragment] = []
        self._words = 0

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether the object has a method `refit_fragments`."""
        return callable(getattr(model, "refit_fragments", None))

    def prepare(self) -> None:
        """Calls the object's `refit_prepare`, if it has one."""
        self._ask("refit_prepare")

    def describe(self) -> Sequence[Fragment]:
        """The object's fragments, without empty ones. `LayoutError` if a view and its box don't agree."""
        described = tuple(self._model.refit_fragments())
        for fragment in described:
            _check(fragment)
        return tuple(fragment for fragment in described if not fragment.box.is_empty)

    def identity(self) -> Hashable:
        """Changes when `refit_fragments` gives other names, boxes or storage than before."""
        fragments = list(self._model.refit_fragments())
        if list(map(id, fragments)) != list(map(id, self._seen)):
            self._words = hash(tuple([(f.name, f.shape, f.box, f.granule, f.aliases) for f in fragments]))
        self._seen = fragments  # kept, so that an equal id is the same frozen object
        return hash((self._words, states([fragment.view for fragment in fragments])))

    @property
    def fenced(self) -> str | None:
        """Why the model may not serve, or None."""
        return self._fence.reason

    def install(self, *, version: int) -> None:
        """Calls the object's `refit_install`, if it has one."""
        self._ask("refit_install", version=version)

    def fence(self, reason: str) -> None:
        """Lets the module's forward raise, and calls the object's `refit_fence`. A later reason replaces the first."""
        self._fence.close(reason)
        self._ask("refit_fence", reason)

    def unfence(self) -> None:
        """Calls the object's `refit_unfence`, if it has one, and lets the module run again."""
        self._ask("refit_unfence")
        self._fence.open()

    def _ask(self, verb: str, *args: Any, **kwargs: Any) -> None:
        method = getattr(self._model, verb, None)
        if method is not None:
            method(*args, **kwargs)


def _check(fragment: Fragment) -> None:
    if not isinstance(fragment, Fragment):
        raise LayoutError(f"refit_fragments() must return Fragments, found {type(fragment).__name__}")
    if tuple(fragment.view.shape) != fragment.box.shape or not Box.whole(fragment.shape).contains(fragment.box):
        raise LayoutError(
            f"{fragment.name}: the view has shape {tuple(fragment.view.shape)} and the box is {fragment.box} of a "
            f"tensor of shape {fragment.shape}; a fragment needs view.shape == box.shape, and a box inside the tensor"
        )


@hookimpl
def refit_register_source_adapters() -> list[type[SourceAdapter]]:
    """The adapter of this module, for trainers."""
    return [FragmentsAdapter]


@hookimpl
def refit_register_target_adapters() -> list[type[TargetAdapter]]:
    """The adapter of this module, for generating ranks."""
    return [FragmentsAdapter]
