"""What shapes a plan and is stated on the sources, the same on all: routes, casts, ignores and window limits.

>>> Settings(routes=[("*.experts.*", "reshard"), ("*", "reshard")]).window_bytes
67108864
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from attrs import Attribute, field, frozen

from refit_sdk import asked
from refit_sdk.errors import RefitError

MIB: Final = 1 << 20
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

    `routes`: (pattern, transport). `casts`: (pattern, dtype) lets those tensors change to that dtype on the way, values
    and all; `cast="never"` makes any cast an error. `ignore`: source tensors that nobody needs to want. `window_bytes`:
    bytes a rank sends, or receives, in one window. `window_ops`: messages a rank has in one window. `coalesce_bytes`:
    pieces smaller than this share a message with others of their pair and window. Values that can't be
    are `RefitError`s.
    """

    routes: tuple[tuple[str, str], ...] = field(default=(("*", "reshard"),), converter=_routes)
    casts: tuple[tuple[str, str], ...] = field(default=(), converter=_casts)
    cast: Literal["allowed", "never"] = field(default="allowed", validator=_one_of("allowed", "never"))
    ignore: tuple[str, ...] = field(default=(), converter=_ignore)
    window_bytes: int = field(default=64 * MIB, validator=_from(1))
    window_ops: int = field(default=512, validator=_from(1))
    coalesce_bytes: int = field(default=MIB // 4, validator=_from(0))
