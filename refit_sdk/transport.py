"""The door for transports, which say *how* bytes travel and never touch them.

A transport is one pure function: moves and topology in, rounds of steps out, as arrays. It imports no torch and does no
I/O. The core, not the transport, merges the routes and cuts windows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from refit_sdk.topology import Topology

Ints = npt.NDArray[np.int64]


@frozen(eq=False)
class Moves:
    """Moves of families that have as many dims and as wide elements, as arrays. Move i is the box `start[i]:stop[i]`
    (shape (n, ndim), absolute), held by process `server[i]` and needed by the processes
    `need[need_start[i]:need_start[i + 1]]`, in ascending order.

    Other holders of the move are `holder[holder_start[i]:holder_start[i + 1]]`, the server among them. `itemsize` is in
    bytes on the wire. Its family is number `family[i]`, of which the first `stacked[i]` dims count members; it is cut
    only at multiples of `granule[i]` (n, ndim). It is for engine number `engine[i]`, whose ranks are the processes
    `ranks[engine[i]]`: sources and these are the only ones that may send and receive it.
    """

    start: Ints
    stop: Ints
    server: Ints
    need_start: Ints
    need: Ints
    holder_start: Ints
    holder: Ints
    itemsize: int
    granule: Ints = field(kw_only=True)
    family: Ints = field(kw_only=True)
    stacked: Ints = field(kw_only=True)
    engine: Ints = field(kw_only=True)
    ranks: tuple[tuple[int, ...], ...] = field(kw_only=True)

    @granule.default
    def _anywhere(self) -> Ints:
        return np.ones_like(self.start)

    @family.default
    @stacked.default
    @engine.default
    def _of_one(self) -> Ints:
        return np.zeros(len(self), np.int64)

    @ranks.default
    def _who_need_any(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(np.unique(self.need).tolist()),)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def nbytes(self) -> Ints:
        """Bytes of each move on the wire."""
        found: Ints = np.prod(self.stop - self.start, axis=1, dtype=np.int64) * self.itemsize
        return found

    @property
    def needs(self) -> list[tuple[int, ...]]:
        """Who needs each move."""
        return _runs(self.need_start, self.need)

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """Who holds each move."""
        return _runs(self.holder_start, self.holder)


def _runs(begin: Ints, values: Ints) -> list[tuple[int, ...]]:
    listed, bounds = values.tolist(), begin.tolist()
    return [tuple(listed[a:b]) for a, b in pairwise(bounds)]


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
