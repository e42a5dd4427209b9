"""The doors by which everything that is not the core comes in: one hook a kind of plug-in.

A plug-in is a module. It marks functions with `hookimpl`; each returns the classes that it offers, and each class has a
`name` by which users ask for it. A transport in whole:

>>> import numpy as np
>>> from refit_sdk.transport import Capabilities, Steps
>>> class Nothing:
...     name = "nothing"
...     capabilities = Capabilities(max_ndim=0)
...
...     def steps(self, moves, topology):
...         none = np.empty(0, np.int64)
...         return Steps(none, none, none, none, none, none)
>>> @hookimpl
... def refit_register_transports():
...     return [Nothing]

What makes the module known is an entry point of its distribution, in the group `refit_sdk`, under the plug-in's name:

    [project.entry-points.refit_sdk]
    nothing = "my_package.nothing"

Hooks register; none is called per tensor, and all are called once a process, at the first question about a plug-in.
"""

from __future__ import annotations

from typing import Final

import pluggy

from refit_sdk.adapter import Architecture, EngineControl, Observer, PaperLayout, SourceAdapter, TargetAdapter
from refit_sdk.fabric import Fabric
from refit_sdk.transport import Transport

GROUP: Final = "refit_sdk"
"""The entry-point group, and the name by which pluggy knows our hooks."""

hookspec: Final = pluggy.HookspecMarker(GROUP)
hookimpl: Final = pluggy.HookimplMarker(GROUP)
"""Marks a function of a plug-in's module as the implementation of the hook of the same name."""


@hookspec
def refit_register_transports() -> list[type[Transport]]:
    """Called when a route first names a transport, so that the planner can be given the class.

    A transport says how bytes travel and never touches them: it imports no torch, does no I/O and gives the same steps
    for the same moves on every machine.
    """
    return []


@hookspec
def refit_register_fabrics() -> list[type[Fabric]]:
    """Called when a session looks for what carries bytes on its links.

    A fabric that needs a device or a library says so in `missing`, and is imported on machines that have neither.
    """
    return []


@hookspec
def refit_register_source_adapters() -> list[type[SourceAdapter]]:
    """Called when a session looks for the adapter that understands a trainer's model.

    `accepts` must be true only for objects that the adapter describes fully: exactly one adapter may accept a model.
    """
    return []


@hookspec
def refit_register_target_adapters() -> list[type[TargetAdapter]]:
    """Called when a session looks for the adapter that understands a generating rank's module.

    Everything said of source adapters holds; and what the adapter can't refresh after new weights it must refuse.
    """
    return []


@hookspec
def refit_register_engine_controls() -> list[type[EngineControl]]:
    """Called when a controller is given an engine to pause, update, finish, resume or fence."""
    return []


@hookspec
def refit_register_paper_layouts() -> list[type[PaperLayout]]:
    """Called when a plan is made from a layout string and checkpoint shapes, with no model at hand.

    A paper layout needs neither torch nor the framework whose layout it writes down.
    """
    return []


@hookspec
def refit_register_architectures() -> list[type[Architecture]]:
    """Called when an adapter needs the checkpoint names of a model whose own names are others.

    An architecture is data: attributes of a class that is never made an instance of.
    """
    return []


@hookspec
def refit_register_observers() -> list[type[Observer]]:
    """Called when a session opens, so that every observer hears of its pushes.

    An observer is told the outcome; it can't change it, may not raise, and nothing waits for it.
    """
    return []
