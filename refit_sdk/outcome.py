"""What an outcome comes to on a rank: the report of the push, and the observers that hear of it.

>>> outcome = Outcome(push=1, version=7, committed=True, engines={}, failures={}, ranks={"source[0]": (8, 0)})
>>> report_of(outcome, seconds={"move": 1.0}, windows=2).bytes_sent
8
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from refit_sdk.adapter import Observer
from refit_sdk.messages import Outcome
from refit_sdk.report import EngineReport, PushReport, Traffic


def report_of(outcome: Outcome, *, seconds: Mapping[str, float], windows: int) -> PushReport:
    """The report of a push: what the rendezvous says of all, and this rank's seconds and windows."""
    return PushReport(
        version=outcome.version,
        seconds=dict(seconds),
        ranks={name: Traffic(*traffic) for name, traffic in sorted(outcome.ranks.items())},
        engines={name: EngineReport(v.state, v.version, v.cause) for name, v in sorted(outcome.engines.items())},
        windows=windows,
    )


def tell(observers: Iterable[Observer], report: PushReport) -> None:
    """Tell every observer. What one raises is a warning: it can't change the outcome."""
    for observer in observers:
        try:
            observer.pushed(report)
        except Exception as error:  # noqa: BLE001 - see above
            warnings.warn(f"observer {observer.name!r} raised {type(error).__name__}: {error}", stacklevel=2)
