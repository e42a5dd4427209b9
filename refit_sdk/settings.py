"""What shapes a plan and is stated on the sources, the same on all: routes, casts, ignores and window limits.

>>> Settings(routes=[("*.experts.*", "reshard"), ("*", "reshard")]).window_bytes
67108864
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, Literal

from attrs import Attribute, evolve, field, frozen

from refit_sdk import asked
from refit_sdk.cluster import Cluster, given
from refit_sdk.errors import RefitError

MIB: Final = 1 << 20
AUTO: Final = "auto"
"""Where a route leads that leaves the transport open, to be chosen by the cost model."""
MOST: Final = (1 << 48) - 1
"""The greatest limit of a window."""


def _routes(pairs: Any) -> tuple[tuple[str, str], ...]:
    return asked.pairs(pairs, "routes")


def _casts(pairs: Any) -> tuple[tuple[str, str], ...]:
    return asked.pairs(pairs, "casts")


def _ignore(patterns: Any) -> tuple[str, ...]:
    return asked.strings(patterns, "ignore")


def _one_of(*words: str) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in words:
            raise RefitError(f"{attribute.name}={value!r} can't be: pass one of {', '.join(map(repr, words))}")

    return check


def _from(least: int) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        asked.whole(value, attribute.name, least=least, most=MOST)

    return check


@frozen(kw_only=True)
class Settings:
    """Patterns match full checkpoint names as `fnmatch.fnmatchcase` does; the first rule that matches wins.

    `routes`: (pattern, transport, or `"auto"` to have one chosen for each family). `casts`: (pattern, dtype) lets those
    tensors change to that dtype on the way, values and all; `cast="never"` makes any cast an error. `ignore`: source
    tensors that nobody needs to want. `window_bytes`: bytes a rank sends, or receives, in one window. `window_ops`:
    messages a rank has in one window. `coalesce_bytes`: pieces smaller than this share a message with others of their
    pair and window. `topology`: what is stated of hosts, domains, NICs and speeds (`refit_sdk.cluster.given` reads it).
    Values that can't be are `RefitError`s.
    """

    routes: tuple[tuple[str, str], ...] = field(default=(("*", "reshard"),), converter=_routes)
    casts: tuple[tuple[str, str], ...] = field(default=(), converter=_casts)
    cast: Literal["allowed", "never"] = field(default="allowed", validator=_one_of("allowed", "never"))
    ignore: tuple[str, ...] = field(default=(), converter=_ignore)
    window_bytes: int = field(default=64 * MIB, validator=_from(1))
    window_ops: int = field(default=512, validator=_from(1))
    coalesce_bytes: int = field(default=MIB // 4, validator=_from(0))
    topology: Cluster | None = field(default=None, converter=given)


def checked(settings: Any) -> Settings:
    """A `settings=` argument. `RefitError` if it's none."""
    if not isinstance(settings, Settings):
        raise RefitError(f"settings={settings!r} is a {type(settings).__name__}: pass Settings(...)")
    return settings


def settings_of(settings: Any, **given: Any) -> Settings:
    """What a source states: whole settings or single ones, and the topology file that REFIT_TOPOLOGY names where none
    is given. `RefitError` if both are given.
    """
    single = {name: value for name, value in given.items() if value is not None}
    if settings is not None and single:
        raise RefitError(f"settings= and {', '.join(f'{name}=' for name in single)} were both given: give one of them")
    stated = checked(settings) if settings is not None else Settings(**single)
    file = os.environ.get("REFIT_TOPOLOGY")
    return evolve(stated, topology=file) if file and stated.topology is None else stated
