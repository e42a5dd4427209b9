"""The door for transports, which say *how* bytes travel and never touch them.

A transport is one pure function: moves and topology in, rounds of steps out, as arrays. It imports no torch and does no
I/O. The core, not the transport, merges the routes and cuts windows.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from attrs import frozen

from refit_sdk.topology import Topology

Ints = npt.NDArray[np.int64]


@frozen(eq=False)
class Moves:
    """Moves of one family, as arrays. Move i is the box `start[i]:stop[i]` (shape (n, ndim), absolute), held by process
    `server[i]` and needed by the processes `need[need_start[i]:need_start[i + 1]]`, in ascending order.

    Other holders of the move are `holder[holder_start[i]:holder_start[i + 1]]`, the server among them. `itemsize` is in
    bytes on the wire.
    """

    start: Ints
    stop: Ints
    server: Ints
    need_start: Ints
    need: Ints
    holder_start: Ints
    holder: Ints
    itemsize: int

    def __len__(self) -> int:
        return len(self.start)


@frozen(eq=False)
class Steps:
    """Steps, as arrays: in `round[k]`, the box `start[k]:stop[k]` of move `move[k]` goes from process `src[k]` to
    `dst[k]`.

    Steps of a round depend only on earlier rounds: `src` either serves the move or got the box in an earlier round.
    """

    move: Ints
    start: Ints
    stop: Ints
    src: Ints
    dst: Ints
    round: Ints

    def __len__(self) -> int:
        return len(self.move)


@frozen(kw_only=True)
class Capabilities:
    """What a transport can carry; a routed tensor outside of it is refused at planning. None: no limit."""

    max_ndim: int | None = None
    dtypes: frozenset[str] | None = None
    max_sources: int | None = None
    max_targets: int | None = None
    casts: bool = True
    copies: Literal["direct", "domain", "one"] = "direct"
    """How often a byte leaves its holder: once a target rank, once a domain, or once."""
    collective: str | None = None
    """What its steps of a family are all together, where they aren't sends and receives: only a fabric that offers it
    carries them."""


@runtime_checkable
class Transport(Protocol):
    """How bytes travel. Constructed without arguments."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        """The steps that bring every move to all that need it. Same inputs, same arrays, on every machine."""
        ...
