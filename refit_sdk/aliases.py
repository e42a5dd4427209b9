"""Names of tied tensors: under which one the two sides meet, and which tensors of the sources must hold the same
values.

An alias belongs to a side. At a source it offers the same bytes under a second name; a target that states one takes
either name, its own first.

1. For each name that a target gave an alias, take its own name if sources have it, as a tensor or as an alias; else the
   first of its aliases that sources have as a tensor; else the first that they have as an alias.
2. Names that any alias joins are a *tie*. Where sources have several of them as tensors of their own, those must be
   equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from refit_sdk.box import Box
from refit_sdk.overlap import subtract
from refit_sdk.tensor import fold_name
from refit_sdk.world import Manifest, Side, World


def member(name: str) -> tuple[str, Box]:
    """A checkpoint name as its family's name and the box of that one member.

    >>> member("layers.3.w")
    ('layers.{}.w', Box((3,), (4,)))
    """
    template, index = fold_name(name)
    return template, Box(index, (number + 1 for number in index))


@frozen
class Naming:
    """What aliases come to. `renamed`: by target manifest, which name each tied tensor travels under where it isn't its
    own. `offered`: by source manifest, (other name, name) pairs that targets want. `ties`: the sets of names that
    aliases join.
    """

    renamed: Mapping[int, Mapping[str, str]]
    offered: Mapping[int, tuple[tuple[str, str], ...]]
    ties: tuple[tuple[str, ...], ...]


def manifests_of(world: World, side: Side) -> list[int]:
    """The numbers of the manifests that seats of a side have, ascending."""
    return sorted({number for seat, number in zip(world.seats, world.manifest_of, strict=True) if seat.side == side})


class Owned:
    """Which names are tensors of their own in some manifests."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self._members: dict[str, set[Box]] = defaultdict(set)
        for manifest in manifests:
            for part in manifest.parts:
                self._members[part.spec.name].update(part.spec.members)

    def __contains__(self, name: str) -> bool:
        template, box = member(name)
        return any(members.contains(box) for members in self._members.get(template, ()))


def resolve(world: World) -> Naming:
    """Decide, from the aliases of both sides, under which name each tied tensor travels."""
    sources, targets = manifests_of(world, "source"), manifests_of(world, "target")
    pairs = {number: world.manifests[number].aliases for number in {*sources, *targets}}
    if not any(pairs.values()):
        return Naming({}, {}, ())
    owned = Owned(world.manifests[number] for number in sources)
    second = {other for number in sources for other, _ in pairs[number]}
    renamed = {number: dict(_renames(pairs[number], owned, second)) for number in targets}
    wanted = Owned(world.manifests[number] for number in targets)
    met = {name for names in renamed.values() for name in names.values()}
    offered = {n: tuple(p for p in pairs[n] if p[0] in met or p[0] in wanted) for n in sources}
    return Naming(renamed, offered, tuple(_ties({pair for both in pairs.values() for pair in both})))


def _renames(pairs: Iterable[tuple[str, str]], owned: Owned, second: set[str]) -> Iterator[tuple[str, str]]:
    """(name, the name that it travels under), where they differ."""
    others = defaultdict(list)
    for other, name in sorted(pairs):
        others[name].append(other)
    for name, choices in others.items():
        if name not in owned and name not in second:
            found = [choice for choice in choices if choice in owned] + [c for c in choices if c in second]
            if found:
                yield name, found[0]


def _ties(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The sets of names that the pairs connect, in order."""
    tie_of: dict[str, set[str]] = {}
    for a, b in sorted(pairs):
        joined = tie_of.get(a, {a}) | tie_of.get(b, {b})
        for name in joined:
            tie_of[name] = joined
    return sorted({tuple(sorted(tie)) for tie in tie_of.values()})


@frozen(order=True)
class TiedShare:
    """A region of a tensor that one process is to digest: `box` in the tensor's own coordinates."""

    process: int
    name: str
    box: Box


@frozen(order=True)
class TiedCheck:
    """Two source tensors that must hold the same values. `shares` have each element of both exactly once."""

    names: tuple[str, str]
    shares: tuple[TiedShare, ...]


def checks(world: World, naming: Naming) -> tuple[TiedCheck, ...]:
    """What has to be compared before a push, for ties of which sources hold several tensors and targets want any."""
    if not naming.ties:
        return ()
    owned = Owned(world.manifests[number] for number in manifests_of(world, "source"))
    wanted = Owned(world.manifests[number] for number in manifests_of(world, "target"))
    found = []
    for tie in naming.ties:
        several = [name for name in tie if name in owned]
        if any(name in wanted for name in tie):
            found += [TiedCheck((several[0], name), _shares(world, (several[0], name))) for name in several[1:]]
    return tuple(found)


def _shares(world: World, names: tuple[str, str]) -> tuple[TiedShare, ...]:
    shares = []
    for name in names:
        taken: list[Box] = []
        for process, box in sorted(set(_held(world, name))):
            if box not in taken:
                shares += [TiedShare(process, name, rest) for rest in subtract(box, taken)]
                taken.append(box)
    return tuple(shares)


def _held(world: World, name: str) -> Iterator[tuple[int, Box]]:
    """Every (process, box in the tensor's own coordinates) of a source tensor under its own name."""
    template, index = member(name)
    for seat, number in zip(world.seats, world.manifest_of, strict=True):
        for part in world.manifests[number].parts if seat.side == "source" else ():
            for region in part.regions if part.spec.name == template else ():
                members, inner = region.box.split_dims(part.spec.num_stacked)
                if members.contains(index) and not region.box.is_empty:
                    yield seat.process, inner
