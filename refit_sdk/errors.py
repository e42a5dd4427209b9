"""What users get when something is wrong: every error says what was asked, what was found, and what to do.

>>> issubclass(LayoutError, ValueError)
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class RefitError(Exception):
    """The base of every error that refit_sdk raises on purpose."""


class LayoutError(RefitError, ValueError):
    """A box, mesh, placement, layout or fragment that cannot be."""


class PlanError(RefitError):
    """The two sides don't fit together. `violations` holds every one found, not only the first.

    >>> PlanError(["a.weight: no source holds rows 0:4"]).violations
    ('a.weight: no source holds rows 0:4',)
    """

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "the plan has 1 violation" if count == 1 else f"the plan has {count} violations"
        super().__init__("\n  ".join((f"{head}; nothing was moved:", *self.violations)))


class PluginError(RefitError):
    """A plug-in that can't be used: it doesn't import, isn't there, shares its name with another, or fails."""

    def __init__(self, message: str, *, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


class UnsupportedMoveError(RefitError):
    """A transport was routed something outside its capabilities. Raised at planning, before any byte moves."""

    def __init__(self, message: str, *, transport: str, need: str) -> None:
        super().__init__(message)
        self.transport = transport
        self.need = need


class PushError(RefitError):
    """A push that didn't deliver. `failures` maps a rank's name to its cause, `engines` an engine's name to its state.

    The states are those of `refit_sdk.states.PushState`: untouched, complete, in doubt, torn.
    """

    def __init__(self, message: str, *, failures: Mapping[str, str], engines: Mapping[str, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.engines = dict(engines)


class RendezvousError(RefitError):
    """Joining or re-forming failed: an address, a token, a number or a rank that isn't right."""


class SessionClosed(RefitError):
    """The other side closed the session normally: there is nothing more to push or to receive.

    It ends a loop over `receive()`, as StopIteration ends one over `next()`.
    """


class FencedError(RefitError):
    """A module whose weights are torn or in doubt was asked to run."""
