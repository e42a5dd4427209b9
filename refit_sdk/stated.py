"""What processes state that must fit what others state: settings, fabric, versions of plug-ins.

Two thousand processes state much the same, so who joins is compared with one of each kind that is here, not with all.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from refit_sdk.errors import RendezvousError
from refit_sdk.messages import Hello

Kind = tuple[str | None, str, tuple[tuple[str, str], ...]]
"""Settings, fabric, and plug-ins with their versions."""


def kind_of(hello: Hello) -> Kind:
    """What a process states."""
    return hello.settings, hello.fabric, tuple(sorted(hello.plugins.items()))


class Stated:
    """The processes that are here, by what they state."""

    def __init__(self) -> None:
        self._here: dict[Kind, dict[int, Hello]] = {}

    def add(self, link: int, hello: Hello) -> None:
        """A process is here."""
        self._here.setdefault(kind_of(hello), {})[link] = hello

    def remove(self, link: int, hello: Hello) -> None:
        """A process is here no more."""
        kind = kind_of(hello)
        del self._here[kind][link]
        if not self._here[kind]:
            del self._here[kind]

    def check(self, hello: Hello) -> None:
        """`RendezvousError`, naming both, if what a process states doesn't fit what another does."""
        for alike in self._here.values():
            _check_alike(next(iter(alike.values())), hello)


def _check_alike(other: Hello, hello: Hello) -> None:
    name = "+".join(map(str, other.claims))
    if other.settings and hello.settings and other.settings != hello.settings:
        raise RendezvousError(
            f"settings differ: {name} has {other.settings}, {hello.claims[0]} has {hello.settings}: give all the same"
        )
    if other.fabric and hello.fabric and other.fabric != hello.fabric:
        raise RendezvousError(
            f"fabrics differ: {name} has {other.fabric!r}, {hello.claims[0]} has {hello.fabric!r}: "
            "give all the same fabric="
        )
    there, here = other.plugins, hello.plugins
    differing = sorted(plugin for plugin in there.keys() & here.keys() if there[plugin] != here[plugin])
    if differing:
        raise RendezvousError(
            f"plug-ins differ: {name} has {[f'{n} of {there[n]}' for n in differing]}, "
            f"{hello.claims[0]} has {[f'{n} of {here[n]}' for n in differing]}: install the same"
        )
