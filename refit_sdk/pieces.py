"""The overlap of the two sides: which box of which source row goes to which target row, under which rules.

1. Intersect the disjoint boxes of sources with those of targets, family by family.
2. Where sources have an element in several dtypes, one is used: the target's own, else the widest that the target can
   hold without loss, else the widest.
3. Cut by the rules: a piece has one route and one set of permitted casts. Rules are matched against the names that the
   targets want, under which tensors travel.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.dtypes import is_lossless, itemsize, wire_dtype
from refit_sdk.families import Sides, examples
from refit_sdk.overlap import Boxes, meet, pairs, spread, volume
from refit_sdk.routes import Rules, partition
from refit_sdk.settings import Settings
from refit_sdk.transport import Ints


@frozen(eq=False)
class Pieces:
    """Piece i is the box `start[i]:stop[i]` that source row `source[i]` and target row `target[i]` share.

    `route` is the number of the rule that it falls under (-1: none), `casts` that of its permitted dtypes in `permits`.
    """

    source: Ints
    target: Ints
    family: Ints
    start: Ints
    stop: Ints
    route: Ints
    casts: Ints
    permits: tuple[frozenset[str], ...]

    def __len__(self) -> int:
        return len(self.family)

    @property
    def volume(self) -> Ints:
        """Elements of each piece."""
        return volume(self.start, self.stop)


@frozen(eq=False)
class Ruled:
    """Members of families by rules: `boxes` in groups of families, whole in the tensors' own dims; and what rules
    hit."""

    boxes: Boxes
    route: Ints
    casts: Ints
    permits: tuple[frozenset[str], ...]
    useless: tuple[str, ...]


def rule(sides: Sides, settings: Settings) -> Ruled:
    """Match routes and casts against all wanted names."""
    routes = Rules("route", tuple(p for p, _ in settings.routes), tuple(t for _, t in settings.routes))
    casts = Rules("cast", tuple(p for p, _ in settings.casts), tuple(d for _, d in settings.casts))
    patterns, count = routes.patterns + casts.patterns, len(routes.texts)
    rows, taken, hits = [], [], []
    permits = {frozenset[str](): 0}
    for number, key in enumerate(sides.keys):
        for members, matching in partition(patterns, key[0], sides.wanted[key]) if key in sides.wanted else ():
            dtypes = frozenset(casts.values[rule - count] for rule in matching if rule >= count)
            place = permits.setdefault(dtypes, len(permits))
            first = matching[0] if matching and matching[0] < count else -1
            rows += [(number, members_box.concat(Box.whole(key[1]))) for members_box in members]
            taken += [(first, place)] * len(members)
            hits.append(matching)
    table = np.array(taken, np.int64).reshape(-1, 2)
    names = examples(sides.wanted)
    useless = routes.useless({tuple(rule for rule in hit if rule < count) for hit in hits}, names=names)
    useless += casts.useless({tuple(rule - count for rule in hit if rule >= count) for hit in hits}, names=names)
    boxes = Boxes.of(rows, dims=sides.sources.boxes.start.shape[1])
    return Ruled(boxes, table[:, 0], table[:, 1], tuple(permits), tuple(useless))


def overlap(sides: Sides, ruled: Ruled) -> Pieces:
    """All pieces, in order of (target row, source row, box)."""
    wanted = sides.targets.boxes.regroup(sides.targets.boxes.group // max(len(sides.engines), 1))
    found = pairs(wanted, sides.sources.boxes)
    start, stop = meet(wanted, sides.sources.boxes, found)
    target, source, of = _rows_of(sides, found)
    keep = _preferred(sides, target, source, of)
    target, source, of = target[keep], source[keep], of[keep]
    boxes = Boxes(wanted.group[found[0][of]], start[of], stop[of])
    cut = pairs(boxes, ruled.boxes)
    start, stop = meet(boxes, ruled.boxes, cut)
    piece, by = cut
    return Pieces(
        source[piece], target[piece], boxes.group[piece], start, stop, ruled.route[by], ruled.casts[by], ruled.permits
    )


def _rows_of(sides: Sides, found: tuple[Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    """Pairs of boxes as pairs of rows, every dtype of one with every dtype of the other: (target, source, pair)."""
    first, count = _first(sides.targets.box)
    of, nth = spread(count[found[0]])
    target = first[found[0][of]] + nth
    first, count = _first(sides.sources.box)
    row, nth = spread(count[found[1][of]])
    return target[row], first[found[1][of[row]]] + nth, of[row]


def _first(box: Ints) -> tuple[Ints, Ints]:
    """Of each box, its first row and its number of rows."""
    count = np.bincount(box)
    return np.cumsum(count) - count, count


def _preferred(sides: Sides, target: Ints, source: Ints, of: Ints) -> Ints:
    """Of rows that are the same element in several dtypes, the best for the target."""
    table = preference(sides.dtypes)
    rank = table[sides.sources.dtype[source], sides.targets.dtype[target]]
    order = np.lexsort((source, rank, target, of))
    first = np.ones(len(order), bool)
    first[1:] = (of[order][1:] != of[order][:-1]) | (target[order][1:] != target[order][:-1])
    return np.sort(order[first])


def preference(dtypes: tuple[str, ...]) -> Ints:
    """How good a source dtype (row) is for a target dtype (column): lower is better.

    >>> preference(("bfloat16", "float32")).tolist()
    [[0, 1], [1, 0]]
    """
    table = np.zeros((len(dtypes), len(dtypes)), np.int64)
    for column, wanted in enumerate(dtypes):
        order = sorted(dtypes, key=lambda d: (d != wanted, not is_lossless(d, wanted), -itemsize(d), d))
        for place, dtype in enumerate(order):
            table[dtypes.index(dtype), column] = place
    return table


_wire = cache(wire_dtype)


@frozen(order=True)
class Family:
    """Members of a family that travel alike: one route, one cast. `rule` is the number of the route.

    >>> Family("layers.{}.w", (8, 4), "float32", "bfloat16", "reshard", 0).wire
    'bfloat16'
    """

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    target_dtype: str
    transport: str
    rule: int

    @property
    def wire(self) -> str:
        """The dtype that travels."""
        return _wire(self.source_dtype, self.target_dtype)

    @property
    def num_stacked(self) -> int:
        """How many stacked dims come before the tensor's own."""
        return self.name.count("{}")

    @property
    def ndim(self) -> int:
        """Dims of the family's boxes."""
        return self.num_stacked + len(self.shape)


def families_of(sides: Sides, pieces: Pieces, settings: Settings) -> tuple[tuple[Family, ...], Ints]:
    """The families that travel, in order, and which each piece is of."""
    kinds = np.stack(
        (pieces.family, pieces.route, sides.sources.dtype[pieces.source], sides.targets.dtype[pieces.target]), axis=1
    )
    key = kinds[:, 0]
    for column, size in ((1, len(settings.routes)), (2, len(sides.dtypes)), (3, len(sides.dtypes))):
        key = key * max(size, 1) + kinds[:, column]
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    families = tuple(
        Family(name, shape, sides.dtypes[a], sides.dtypes[b], settings.routes[route][1], route)
        for family, route, a, b in kinds[first].tolist()
        for name, shape in (sides.keys[family],)
    )
    return families, number.reshape(-1)
