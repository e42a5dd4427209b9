"""Whether the shards that all ranks own make the checkpoint: each tensor whole, each element once. Pure, on manifests.

1. Boxes of a family from all ranks must not meet, and must add up to every member that any rank has.
2. Every layer of the model must be there, and every expert of each layer that has experts.
3. Copies are compared by digest, if that's asked for: of ranks that hold the same box, those that differ from the
   owner have drifted.

>>> list(twice_or_missing([(0, "w", (4,), Box((0,), (3,))), (1, "w", (4,), Box((2,), (3,)))]))
['w: rank 0 owns [0:3], rank 1 owns [2:3]: both own [2:3]', 'w: nobody owns [3:4]']
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.overlap import Boxes, pairs, subtract
from refit_sdk.tensor import fold_name, merge_indices
from refit_sdk.world import Manifest

Place = tuple[int, str, tuple[int, ...], Box]
"""A rank, a family's name, the shape of one of its tensors, and a box that the rank owns, numbers first."""

SHOWN: Final = 20
"""How many violations an error lists."""


def violations(
    owners: Mapping[int, Manifest], *, layers: int, experts: int | None, expert_names: Iterable[str]
) -> list[str]:
    """All that is wrong with what ranks own: by rank, a manifest of its own shards. `layers` counts MTP's too."""
    places = [
        (rank, part.spec.name, part.spec.shape, region.box)
        for rank, manifest in sorted(owners.items())
        for part in manifest.parts
        for region in part.regions
        for _ in range(region.copies)
    ]
    families = {name for _, name, _, _ in places}
    templates = {fold_name(name.format(layer=0, expert=0))[0] for name in expert_names} & families
    found = [*twice_or_missing(places), *_missing_layers(places, layers)]
    return found + (list(_missing_experts(places, templates, experts)) if experts else [])


def twice_or_missing(places: Sequence[Place]) -> Iterator[str]:
    """Elements that two shards own, and elements of known tensors that none does."""
    families: dict[tuple[str, tuple[int, ...]], list[tuple[int, Box]]] = defaultdict(list)
    for rank, name, shape, box in places:
        families[name, shape].append((rank, box))
    for (name, shape), held in families.items():
        yield from _twice(name, held)
        boxes = [box for _, box in held]
        stacked = name.count("{}")
        members = merge_indices(point for box in boxes for point in box.split_dims(stacked)[0].points())
        for whole in (member.concat(Box.whole(shape)) for member in members):
            for hole in subtract(whole, boxes):
                yield f"{name}: nobody owns {hole}"


def _twice(name: str, held: Sequence[tuple[int, Box]]) -> Iterator[str]:
    boxes = Boxes.of(((0, box) for _, box in held), dims=max((box.ndim for _, box in held), default=0))
    first, second = pairs(boxes, boxes)
    for a, b in zip(first[first < second].tolist(), second[first < second].tolist(), strict=True):
        (rank, box), (other, another) = held[a], held[b]
        yield f"{name}: rank {rank} owns {box}, rank {other} owns {another}: both own {box.intersect(another)}"


def _missing_layers(places: Sequence[Place], layers: int) -> Iterator[str]:
    known = {number for _, name, _, box in places if "{}" in name for number in range(box.start[0], box.stop[0])}
    lost = sorted(set(range(layers)) - known)
    if lost:
        yield f"nobody has layers {_ranges(lost)} of {layers}: a chunk is missing on some rank"
    if extra := sorted(known - set(range(layers))):
        told = f"Megatron's config says {layers} layers"
        yield f"layers {_ranges(extra)} are there, and {told}: a chunk is another model's"


def _missing_experts(places: Sequence[Place], templates: set[str], experts: int) -> Iterator[str]:
    known: dict[tuple[str, int], set[int]] = defaultdict(set)
    for _, name, _, box in places:
        if name in templates:
            for layer in range(box.start[0], box.stop[0]):
                known[name, layer].update(range(box.start[1], box.stop[1]))
    for (name, layer), found in sorted(known.items()):
        lost = sorted(set(range(experts)) - found)
        if lost:
            yield f"{name}: nobody has experts {_ranges(lost)} of layer {layer}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as runs.

    >>> _ranges([0, 1, 2, 5])
    '0:3, 5'
    """
    runs = merge_indices((number,) for number in numbers)
    return ", ".join(f"{b.start[0]}:{b.stop[0]}" if b.size > 1 else str(b.start[0]) for b in runs)


@frozen
class Sum:
    """The digest of a box of a tensor on a rank, and whether the rank owns it."""

    name: str
    box: Box
    digest: int
    is_owner: bool


def drifted(sums: Mapping[int, Sequence[Sum]]) -> list[str]:
    """Which ranks hold other values than the owner, tensor by tensor.

    >>> w = Box((0,), (2,))
    >>> drifted({0: [Sum("w", w, 7, True)], 1: [Sum("w", w, 7, False)], 2: [Sum("w", w, 9, False)]})
    ['w [0:2]: rank 2 holds other values than its owner, rank 0']
    """
    held: dict[tuple[str, Box], list[tuple[int, Sum]]] = defaultdict(list)
    for rank, each in sums.items():
        for one in each:
            held[one.name, one.box].append((rank, one))
    return [line for (name, box), copies in sorted(held.items()) for line in _differing(name, box, copies)]


def _differing(name: str, box: Box, copies: Sequence[tuple[int, Sum]]) -> Iterator[str]:
    owner, whole = next(((rank, one) for rank, one in copies if one.is_owner), copies[0])
    ranks = [rank for rank, one in copies if one.digest != whole.digest]
    if ranks:
        who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
        yield f"{name} {box}: {who} other values than its owner, rank {owner}"
