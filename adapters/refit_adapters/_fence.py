"""The fence of a module: its forward raises until a full push has succeeded.

>>> layer = torch.nn.Linear(2, 2)
>>> fence = Fence((layer,))
>>> fence.close("the push of version 3 broke off")
>>> layer(torch.ones(2))
Traceback (most recent call last):
    ...
refit_sdk.errors.FencedError: Linear is fenced: the push of version 3 broke off. ...
>>> fence.open()
>>> layer(torch.ones(2)).shape
torch.Size([2])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from refit_sdk.errors import FencedError


class Fence:
    """Closed, every given module refuses to run, and says why."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = tuple(modules)
        self._handles: list[RemovableHandle] = []
        self.reason: str | None = None

    def close(self, reason: str) -> None:
        """Refuse to run from now on. A later reason replaces an earlier one: "arriving" becomes "torn"."""
        self.reason = reason
        if not self._handles:
            self._handles = [module.register_forward_pre_hook(self._refuse, prepend=True) for module in self._modules]

    def open(self) -> None:
        """Run again."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.reason = [], None

    def _refuse(self, module: torch.nn.Module, _args: Any) -> None:
        raise FencedError(
            f"{type(module).__name__} is fenced: {self.reason}. Its weights may mix versions, so it doesn't run; "
            f"receive a full push, which opens it again, or load its weights anew and create a new session"
        )
