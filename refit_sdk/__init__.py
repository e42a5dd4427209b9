"""refit_sdk: move a policy's new weights from the ranks that train it to the ranks that generate with it.

What users need is here by name, and imported when it is asked for: importing a room of the core imports no other.

>>> import refit_sdk
>>> refit_sdk.RefitSession.__module__
'refit_sdk.session'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from refit_sdk.adapter import Fragment
    from refit_sdk.box import Box
    from refit_sdk.controller import RefitController
    from refit_sdk.errors import (
        FencedError,
        LayoutError,
        PlanError,
        PluginError,
        PushError,
        RefitError,
        RendezvousError,
        SessionClosed,
        UnsupportedMoveError,
    )
    from refit_sdk.plan import Plan
    from refit_sdk.report import PushReport
    from refit_sdk.session import PushHandle, RefitSession
    from refit_sdk.settings import Settings

__all__ = [
    "Box",
    "FencedError",
    "Fragment",
    "LayoutError",
    "Plan",
    "PlanError",
    "PluginError",
    "PushError",
    "PushHandle",
    "PushReport",
    "RefitController",
    "RefitError",
    "RefitSession",
    "RendezvousError",
    "SessionClosed",
    "Settings",
    "UnsupportedMoveError",
]

_ROOMS: Final = {
    "adapter": ("Fragment",),
    "box": ("Box",),
    "controller": ("RefitController",),
    "errors": tuple(name for name in __all__ if name.endswith(("Error", "Closed"))),
    "plan": ("Plan",),
    "report": ("PushReport",),
    "session": ("PushHandle", "RefitSession"),
    "settings": ("Settings",),
}
_ROOM_OF: Final = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'refit_sdk' has no attribute {name!r}")
    return getattr(importlib.import_module(f"refit_sdk.{_ROOM_OF[name]}"), name)
