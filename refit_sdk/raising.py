"""Errors that travel: what one process raises, the rendezvous passes on, and all others raise.

>>> error_of("PushError", ("source[1]: it is gone",), failures={}, engines={"a": Verdict("torn", 3)})
PushError('source[1]: it is gone; engine a is torn')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from refit_sdk import errors
from refit_sdk.errors import PlanError, PluginError, PushError, RefitError, UnsupportedMoveError
from refit_sdk.messages import Verdict


def error_of(
    error: str, causes: Iterable[str], *, failures: Mapping[str, str], engines: Mapping[str, Verdict]
) -> RefitError:
    """The error to raise for what the rendezvous says went wrong."""
    told = tuple(causes)
    if error == "PlanError":
        return PlanError(told)
    if error == "UnsupportedMoveError":
        return UnsupportedMoveError(told[0], transport=told[1], need=told[2])
    if error == "PluginError":
        return PluginError(told[0], plugin=told[1])
    if error in ("RendezvousError", "LayoutError"):
        return getattr(errors, error)("; ".join(told))  # type: ignore[no-any-return]
    states = {name: verdict.state for name, verdict in sorted(engines.items())}
    message = "; ".join((*told, telling(states))) if states else "; ".join(told)
    return PushError(message, failures=failures, engines=states)


def causes_of(error: RefitError) -> tuple[str, ...]:
    """What `error_of` needs to make the same error elsewhere."""
    match error:
        case PlanError(violations=violations):
            return violations
        case UnsupportedMoveError(transport=transport, need=need):
            return str(error), transport, need
        case PluginError(plugin=plugin):
            return str(error), plugin
        case _:
            return (str(error),)


def telling(engines: Mapping[str, str]) -> str:
    """What each engine is, in words."""
    return ", ".join(f"engine {name} is {state}" for name, state in sorted(engines.items())) or "no engine was touched"


def to_do(gone: Iterable[str]) -> str:
    """What to do after these ranks were lost.

    >>> to_do(["a[1]", "source[0]"])
    'start a[1], source[0] again, or call reform() on every survivor'
    """
    return f"start {', '.join(gone)} again, or call reform() on every survivor"
