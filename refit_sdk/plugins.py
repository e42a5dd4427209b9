"""Finding plug-ins: the entry points of group `refit_sdk`, one module a plug-in.

1. Walk the entry points of every distribution. We do it ourselves: pluggy's own loader stops at the first that fails,
   and skips a second of the same name.
2. Leave out what REFIT_PLUGINS turns off.
3. Import each module, register it with pluggy, call its hooks. What fails is kept as a `Problem`.
4. Check each class against the protocol of its kind. What doesn't fit is a `Problem` too.

>>> registry().get("transport", "teleport")  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
refit_sdk.errors.PluginError: there is no transport named 'teleport'; ...
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import pluggy
from attrs import frozen

from refit_sdk import hookspecs
from refit_sdk.errors import PluginError
from refit_sdk.interface import faults
from refit_sdk.offers import PROTOCOLS, Finding, Offer, Origin, Problem, Registry, choose_adapter, plugin_versions

__all__ = [
    "PROTOCOLS",
    "Candidate",
    "Finding",
    "Offer",
    "Origin",
    "Problem",
    "Registry",
    "Selection",
    "choose_adapter",
    "discover",
    "load",
    "plugin_versions",
    "registry",
]


@frozen
class Candidate:
    """A plug-in that is installed; `load` imports it."""

    origin: Origin
    load: Callable[[], object]


@frozen
class Selection:
    """Which plug-ins a REFIT_PLUGINS setting admits: names are those of plug-ins or of distributions.

    >>> Selection.parse("reshard, gloo").admits(Origin("fsdp", "refit_adapters.fsdp", "refit-sdk", "0.1.0"))
    False
    >>> Selection.parse("-refit-acme").admits(Origin("acme", "refit_acme", "refit-acme", "1.2"))
    False
    """

    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """The setting as written: names divided by commas, those to leave out with a `-` before them."""
        names = [name for name in re.split(r"[,\s]+", text) if name]
        return cls(
            frozenset(_normal(name) for name in names if not name.startswith("-")),
            frozenset(_normal(name[1:]) for name in names if name.startswith("-")),
        )

    def admits(self, origin: Origin) -> bool:
        """Whether a plug-in is to be loaded."""
        names = {_normal(origin.plugin), _normal(origin.distribution)}
        return not names & self.without and (not self.only or bool(names & self.only))

    def unmatched(self, origins: Iterable[Origin]) -> tuple[str, ...]:
        """The names that are no plug-in's and no distribution's: a slip, or something that isn't installed here."""
        known = {_normal(name) for origin in origins for name in (origin.plugin, origin.distribution)}
        return tuple(sorted((self.only | self.without) - known))


@cache
def registry() -> Registry:
    """The plug-ins of this process, found at the first call."""
    return load(discover(), environ=os.environ)


def discover(path: list[str] | None = None) -> tuple[Candidate, ...]:
    """The entry points of our group, of every distribution on `path` (None: where Python looks), in order of origin."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=sys.path if path is None else path):
        found.setdefault(_normal(distribution.metadata["Name"] or ""), distribution)
    candidates = [
        Candidate(Origin(entry.name, entry.value, name, distribution.version), entry.load)
        for name, distribution in found.items()
        for entry in distribution.entry_points
        if entry.group == hookspecs.GROUP
    ]
    return tuple(sorted(candidates, key=lambda candidate: candidate.origin))


def load(candidates: Iterable[Candidate], *, environ: Mapping[str, str]) -> Registry:
    """Import plug-ins and collect what they offer. Reads REFIT_PLUGINS and REFIT_TRACE from `environ`; never raises."""
    installed = tuple(candidates)
    selection = Selection.parse(environ.get("REFIT_PLUGINS", ""))
    trace = environ.get("REFIT_TRACE", "0") not in ("", "0")
    offers: list[Offer] = []
    problems: list[Problem] = []
    turned_off: list[Origin] = []
    for candidate in installed:
        if not selection.admits(candidate.origin):
            turned_off.append(candidate.origin)
            continue
        try:
            classes = list(_classes(candidate, trace=trace))
        except Exception as error:  # noqa: BLE001  kept whole in the problem, and raised when a name is asked for
            problems.append(Problem(candidate.origin, f"{type(error).__name__}: {error}", cause=error))
            continue
        for kind, offered in classes:
            _sort_in(kind, offered, candidate.origin, offers, problems)
    unmatched = selection.unmatched(candidate.origin for candidate in installed)
    return Registry(tuple(offers), tuple(problems), tuple(turned_off), unmatched)


def _sort_in(kind: str, offered: Any, origin: Origin, offers: list[Offer], problems: list[Problem]) -> None:
    name = getattr(offered, "name", None)
    if wrong := faults(offered, PROTOCOLS[kind]):
        label = getattr(offered, "__qualname__", repr(offered))
        problems.append(
            Problem(origin, f"{label} is no {kind.replace('_', ' ')}: {'; '.join(wrong)}", kind, str(name or ""))
        )
    else:
        offers.append(Offer(kind, offered.name, offered, origin))


def _classes(candidate: Candidate, *, trace: bool) -> Iterator[tuple[str, Any]]:
    """Import one plug-in and ask each of its hooks. Each has a manager of its own, so that a fault has one culprit."""
    manager = pluggy.PluginManager(hookspecs.GROUP)
    manager.add_hookspecs(hookspecs)
    if trace:
        manager.trace.root.setwriter(lambda text: print(text, end="", file=sys.stderr))
        manager.enable_tracing()
    manager.register(candidate.load(), name=candidate.origin.plugin)
    manager.check_pending()
    hooks = [(kind, getattr(manager.hook, f"refit_register_{kind}s")) for kind in PROTOCOLS]
    implemented = [(kind, hook) for kind, hook in hooks if hook.get_hookimpls()]
    if not implemented:
        raise PluginError("it implements no hook; mark its functions with hookimpl", plugin=candidate.origin.plugin)
    for kind, hook in implemented:
        answers = hook()
        if not answers or not isinstance(answers[0], (list, tuple)):
            found = answers[0] if answers else None
            raise PluginError(f"{hook.name} returned {found!r}, not a list of classes", plugin=candidate.origin.plugin)
        yield from ((kind, offered) for offered in answers[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
