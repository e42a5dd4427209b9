"""What shapes a plan and is stated on the sources, the same on all: routes, casts, ignores and window limits.

>>> Settings(routes=[("*.experts.*", "reshard"), ("*", "reshard")]).window_bytes
67108864
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from attrs import field, frozen, validators

MIB: Final = 1 << 20


def _pairs(pairs: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(a), str(b)) for a, b in pairs)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(str(name) for name in names)


@frozen(kw_only=True)
class Settings:
    """Patterns match full checkpoint names as `fnmatch.fnmatchcase` does; the first rule that matches wins.

    `routes`: (pattern, transport). `casts`: (pattern, dtype) lets those tensors change to that dtype on the way, values
    and all; `cast="never"` makes any cast an error. `ignore`: source tensors that nobody needs to want. `window_bytes`:
    bytes a rank sends, or receives, in one window. `window_ops`: messages a rank has in one window. `coalesce_bytes`:
    pieces smaller than this share a message with others of their pair and window.
    """

    routes: tuple[tuple[str, str], ...] = field(default=(("*", "reshard"),), converter=_pairs)
    casts: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs)
    cast: Literal["allowed", "never"] = field(default="allowed", validator=validators.in_(("allowed", "never")))
    ignore: tuple[str, ...] = field(default=(), converter=_names)
    window_bytes: int = field(default=64 * MIB, validator=validators.ge(1))
    window_ops: int = field(default=512, validator=validators.ge(1))
    coalesce_bytes: int = field(default=MIB // 4, validator=validators.ge(0))
