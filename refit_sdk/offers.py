"""What plug-ins offer, and choosing among it: by kind and name, or by which adapter accepts a model.

An offer is a class under a kind and a name. Of two with the same kind and name neither is used. What failed is kept,
and raised when one of its names is asked for; the names of a module that didn't import can't be known, so an unknown
name lists it.

>>> Registry(()).get("transport", "teleport")
Traceback (most recent call last):
...
refit_sdk.errors.PluginError: there is no transport named 'teleport'; installed are: none
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

from refit_sdk.adapter import Architecture, EngineControl, Observer, PaperLayout, SourceAdapter, TargetAdapter
from refit_sdk.errors import PluginError
from refit_sdk.fabric import Fabric
from refit_sdk.transport import Transport

PROTOCOLS: Final[Mapping[str, type[Any]]] = {
    "transport": Transport,
    "fabric": Fabric,
    "source_adapter": SourceAdapter,
    "target_adapter": TargetAdapter,
    "engine_control": EngineControl,
    "paper_layout": PaperLayout,
    "architecture": Architecture,
    "observer": Observer,
}
"""The kinds of plug-in, and the interface of each. The hook of a kind is `refit_register_<kind>s`."""


@frozen(order=True)
class Origin:
    """Where a plug-in comes from: its entry point's name, its module, and the distribution that brought it.

    >>> str(Origin("acme", "refit_acme", "refit-acme", "1.2"))
    'acme (refit_acme, of refit-acme 1.2)'
    """

    plugin: str
    module: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.plugin} ({self.module}, of {self.distribution} {self.version})"


@frozen
class Offer:
    """A class that a plug-in offers under a kind and a name."""

    kind: str
    name: str
    offered: type[Any]
    origin: Origin

    def missing(self) -> str | None:
        """Why the class can't be used here and what to install, in its own words; None if it can be used."""
        ask = getattr(self.offered, "missing", None)
        try:
            answer: str | None = ask() if ask else None
        except Exception as error:  # noqa: BLE001  a check that fails is an answer, and the next plug-in's is still wanted
            return f"its own check failed: {type(error).__name__}: {error}"
        return answer

    def about(self) -> str:
        """What the class says of itself here, where it is usable: an optional classmethod `about`."""
        ask = getattr(self.offered, "about", None)
        try:
            return str(ask()) if ask else ""
        except Exception as error:  # noqa: BLE001  as for `missing`
            return f"what it says of itself failed: {type(error).__name__}: {error}"

    def accepts(self, model: object) -> bool:
        """Whether an adapter accepts the model. `PluginError` naming the adapter if its own check fails."""
        try:
            return bool(self.offered.accepts(model))
        except Exception as error:
            raise PluginError(
                f"{_words(self.kind)} {self.name!r} of {self.origin} failed when asked whether it accepts a "
                f"{_type_name(model)}: {type(error).__name__}: {error}; "
                f"turn it off with REFIT_PLUGINS=-{self.origin.plugin}",
                plugin=self.name,
            ) from error


@frozen
class Problem:
    """Something that a plug-in got wrong. `kind` and `name` are empty where they can't be known."""

    origin: Origin
    reason: str
    kind: str = ""
    name: str = ""
    cause: Exception | None = field(default=None, eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}"


@frozen(kw_only=True)
class Finding:
    """What `refit doctor` says of one offer, or of one plug-in that came to none. `about`: its own words, if usable."""

    kind: str
    name: str
    origin: Origin
    usable: bool
    broken: bool
    why: str
    about: str = ""


@frozen
class Registry:
    """The plug-ins of a process.

    `offers` holds every class that has its kind's interface, those that share a name too; `turned_off` what
    REFIT_PLUGINS keeps out, `unmatched` the names in it that are nobody's.
    """

    offers: tuple[Offer, ...]
    problems: tuple[Problem, ...] = ()
    turned_off: tuple[Origin, ...] = ()
    unmatched: tuple[str, ...] = ()

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of a kind that one plug-in alone offers, in order."""
        return tuple(sorted(offer.name for offer in self.offers_of(kind)))

    def offers_of(self, kind: str) -> tuple[Offer, ...]:
        """The offers of a kind, without those that share a name."""
        _known(kind)
        return tuple(o for o in self.offers if o.kind == kind and len(self._rivals(kind, o.name)) == 1)

    def not_asked(self, kind: str) -> tuple[str, ...]:
        """What stands in the way of more offers of a kind: plug-ins that failed, and names that several share."""
        names = sorted({offer.name for offer in self.offers if offer.kind == kind} - set(self.names(kind)))
        failed = (str(problem) for problem in self.problems if problem.kind in ("", kind))
        return (*failed, *(_clash(self._rivals(kind, name)) for name in names))

    def get(self, kind: str, name: str) -> type[Any]:
        """The class of that kind and name. `PluginError` if there is none, if two share the name, or if it can't be
        used here."""
        offer = self.offer(kind, name)
        if reason := offer.missing():
            raise PluginError(f"{_words(kind)} {name!r} can't be used here: {reason}", plugin=name)
        return offer.offered

    def offer(self, kind: str, name: str) -> Offer:
        """The one offer of that kind and name, usable here or not."""
        rivals = self._rivals(_known(kind), name)
        if len(rivals) > 1:
            raise PluginError(_clash(rivals), plugin=name)
        return rivals[0] if rivals else self._refuse(kind, name)

    def findings(self) -> tuple[Finding, ...]:
        """Everything there is to say about every plug-in, by kind and name; what has neither comes last."""
        found = [*map(self._finding, self.offers), *map(_problem_finding, self.problems)]
        found += [
            Finding(kind="", name="", origin=origin, usable=False, broken=False, why="turned off by REFIT_PLUGINS")
            for origin in self.turned_off
        ]
        return tuple(sorted(found, key=lambda f: (not f.kind, f.kind, f.name, f.origin)))

    def _rivals(self, kind: str, name: str) -> list[Offer]:
        return [offer for offer in self.offers if (offer.kind, offer.name) == (kind, name)]

    def _finding(self, offer: Offer) -> Finding:
        rivals = self._rivals(offer.kind, offer.name)
        why = _clash(rivals) if len(rivals) > 1 else offer.missing()
        return Finding(
            kind=offer.kind,
            name=offer.name,
            origin=offer.origin,
            usable=not why,
            broken=len(rivals) > 1,
            why=why or "",
            about="" if why else offer.about(),
        )

    def _refuse(self, kind: str, name: str) -> Offer:
        """Raise what kept the name from being known, or say which names there are."""
        ours = [p for p in self.problems if (p.kind, p.name) == (kind, name)]
        if ours:
            raise PluginError(f"{_words(kind)} {name!r} can't be used: {ours[0]}", plugin=name) from ours[0].cause
        unnamed = [problem for problem in self.problems if not problem.name and problem.kind in ("", kind)]
        lines = [f"there is no {_words(kind)} named {name!r}; installed are: {', '.join(self.names(kind)) or 'none'}"]
        lines += [f"it may be one of a plug-in that failed: {problem}" for problem in unnamed]
        lines += [f"it may be one of a plug-in that REFIT_PLUGINS turns off: {origin}" for origin in self.turned_off]
        lines += [f"REFIT_PLUGINS names {unknown!r}, which is no plug-in here" for unknown in self.unmatched]
        raise PluginError("\n  ".join(lines), plugin=name) from (unnamed[0].cause if unnamed else None)


def choose_adapter(registry: Registry, kind: str, model: object, name: str | None = None) -> type[Any]:
    """The adapter called `name`, or the one that accepts the model.

    `PluginError` unless exactly one does; its `plugin` is then the kind.
    """
    if name is not None:
        return registry.get(kind, name)
    offers = registry.offers_of(kind)
    accepting = [offer for offer in offers if offer.accepts(model)]
    if len(accepting) == 1:
        return registry.get(kind, accepting[0].name)
    found = " and ".join(f"{o.name!r} of {o.origin.distribution}" for o in accepting) or "none"
    lines = [
        f"exactly one {_words(kind)} must accept a {_type_name(model)}, but {found} did",
        f"pass adapter= with one of: {', '.join(offer.name for offer in offers) or '(none is installed)'}",
        *(f"not asked: {reason}" for reason in registry.not_asked(kind)),
    ]
    raise PluginError("\n  ".join(lines), plugin=kind)


def plugin_versions(registry: Registry) -> dict[str, str]:
    """What goes into a plan's input digest: each transport's name, and the distribution and version it comes from.

    Only transports shape a plan; two machines with other adapters installed still make the same one.
    """
    return {o.name: f"{o.origin.distribution} {o.origin.version}" for o in registry.offers_of("transport")}


def _problem_finding(problem: Problem) -> Finding:
    return Finding(
        kind=problem.kind, name=problem.name, origin=problem.origin, usable=False, broken=True, why=problem.reason
    )


def _clash(rivals: list[Offer]) -> str:
    by = " and ".join(str(offer.origin) for offer in rivals)
    turn_off = " or ".join(f"REFIT_PLUGINS=-{name}" for name in sorted({o.origin.distribution for o in rivals}))
    return f"{_words(rivals[0].kind)} {rivals[0].name!r} is offered by {by}, so neither is used; set {turn_off}"


def _known(kind: str) -> str:
    if kind not in PROTOCOLS:
        raise PluginError(f"there is no kind of plug-in named {kind!r}; kinds are {', '.join(PROTOCOLS)}", plugin=kind)
    return kind


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _type_name(model: object) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
