"""Entries → fragments: each shard of Megatron's as boxes of checkpoint tensors. Plain arithmetic, on any storage.

1. Each entry's key gives its roles and form (`_megatron_keys`); the architecture's table gives names to the roles.
   Roles without a name are collected, and are one error.
2. A plain entry is one box. Of a padded vocabulary only real rows are. A part of a parameter begins where the parts
   before it end.
3. Fused query, key and value lie head group by head group: a group's queries, its key, its value. A tensor-parallel cut
   goes evenly through the rows, also through a group. Each run of rows that one tensor owns is a box.
4. Every shape is held against the one that the Hugging Face config gives.

Copies of other pipeline stages (a tied head, the embedding of MTP) are left out: the stage that owns the tensor offers
it. Copies of tensor- and data-parallel ranks are holders like the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from attrs import field, frozen

from refit_adapters._megatron_entries import Entry
from refit_adapters._megatron_keys import Place, place_of
from refit_adapters.architectures.roles import shape_of
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.packing import fragment_of


@frozen
class Heads:
    """How many query heads, key-value groups and dims a head the fused rows are made of."""

    queries: int
    groups: int
    dim: int

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(which of q, k, v; first row in the fused tensor; number of rows; first row in the checkpoint's tensor).

        >>> list(Heads(2, 1, 4).runs())
        [(0, 0, 8, 0), (1, 8, 4, 0), (2, 12, 4, 0)]
        """
        each = self.queries // self.groups * self.dim
        for group in range(self.groups):
            first = group * (each + 2 * self.dim)
            yield 0, first, each, group * each
            yield 1, first + each, self.dim, group * self.dim
            yield 2, first + each + self.dim, self.dim, group * self.dim

    @property
    def totals(self) -> tuple[int, int, int]:
        """Rows of the three checkpoint tensors."""
        return self.queries * self.dim, self.groups * self.dim, self.groups * self.dim


@frozen
class Model:
    """What is known of a model beside its entries: names by role, sizes of its config, heads, and what is tied."""

    architecture: str
    names: Mapping[str, str]
    sizes: Mapping[str, int]
    heads: Heads | None
    layers: int
    latent: bool = False
    tied: bool = False
    shapes: dict[str, tuple[int | None, ...]] = field(factory=dict, eq=False, kw_only=True)

    def shape(self, role: str) -> tuple[int | None, ...]:
        """The shape that the config gives a role's tensor, worked out once."""
        if role not in self.shapes:
            self.shapes[role] = shape_of(role, self.sizes)
        return self.shapes[role]


@frozen(eq=False)
class Owned:
    """A fragment, and whether this rank owns it or has a copy. `offered`: it's among what the rank describes."""

    fragment: Fragment
    is_owner: bool
    offered: bool


def owned(entries: Iterable[Entry], model: Model) -> tuple[Owned, ...]:
    """All that a rank holds, in the entries' order. `LayoutError` for roles without a name, and for shapes that the
    config contradicts."""
    found: list[Owned] = []
    unknown: list[str] = []
    for _, group in groupby(entries, key=lambda entry: entry.parameter):
        for entry, place, before, total in _placed(list(group), model):
            if all(role in model.names for role in place.roles):
                made = _fragments(entry, place, model, before, total)
                found += [Owned(each, entry.is_owner, entry.replica[0] == 0) for each in made]
            else:
                unknown.append(entry.key)
    if unknown:
        raise _unmapped(unknown, model)
    return tuple(found)


def _placed(entries: Sequence[Entry], model: Model) -> Iterator[tuple[Entry, Place, int, int]]:
    """A parameter's entries with their places, the rows of the parts before each, and those of all its parts."""
    places = [place_of(entry.key, layers=model.layers, latent=model.latent) for entry in entries]
    rows = [entry.shape[0] if place.form == "parts" else 0 for entry, place in zip(entries, places, strict=True)]
    for number, (entry, place) in enumerate(zip(entries, places, strict=True)):
        yield entry, place, sum(rows[:number]), sum(rows)


def _fragments(entry: Entry, place: Place, model: Model, before: int, total: int) -> list[Fragment]:
    numbers = {"layer": place.layer, "expert": place.expert}
    names = [model.names[role].format(**numbers) for role in place.roles]
    if place.form == "qkv":
        made = _qkv(entry, names, model)
    elif place.form == "vocab":
        made = _vocab(entry, names[0], model, place.roles[0])
    elif place.form == "parts":
        rows = before + entry.start[0]
        run = (rows, rows + entry.view.shape[0])
        made = [fragment_of(entry.view, names[0], total, run, slice(None), 0)]
    else:
        made = [Fragment(names[0], entry.shape, Box(entry.start, entry.stop), entry.view)]
    if entry.padded and place.form != "vocab":
        raise LayoutError(
            f"{entry.key}: Megatron says that its shape {entry.shape} may be padded, and it isn't known which rows of "
            f"{names[0]} are real; they would travel"
        )
    roles = dict(zip(names, place.roles, strict=True))
    for fragment in made:
        _check_shape(fragment, roles[fragment.name], model, entry)
    return [fragment for fragment in made if not fragment.box.is_empty]


def _qkv(entry: Entry, names: Sequence[str], model: Model) -> list[Fragment]:
    heads = model.heads
    if heads is None or sum(heads.totals) != entry.shape[0]:
        raise LayoutError(
            f"{entry.key} has {entry.shape[0]} rows, and {heads} need {sum(heads.totals) if heads else 'to be known'}; "
            f"Megatron's config contradicts its weights"
        )
    low, high = entry.start[0], entry.stop[0]
    made = []
    for which, first, count, there in heads.runs():
        start, stop = max(low, first), min(high, first + count)
        if start < stop:
            run = (there + start - first, there + stop - first)
            rows = slice(start - low, stop - low)
            made.append(fragment_of(entry.view, names[which], heads.totals[which], run, rows, 0))
    return made


def _vocab(entry: Entry, name: str, model: Model, role: str) -> list[Fragment]:
    vocab = model.sizes.get("vocab")
    if vocab is None:
        raise LayoutError(
            f"{name}: the Hugging Face config states no vocabulary, so it isn't known which of the {entry.shape[0]} "
            f"rows are padding; they would travel"
        )
    if vocab > entry.shape[0]:
        raise LayoutError(
            f"{name}: the Hugging Face config has a vocabulary of {vocab}, Megatron's {entry.key} has {entry.shape[0]} "
            f"rows; it is another model's config"
        )
    run = tuple(min(vocab, at) for at in (entry.start[0], entry.stop[0]))
    head = model.names.get("head")
    aliases = (head,) if model.tied and role == "embed" and head is not None else ()
    made = fragment_of(entry.view, name, vocab, (run[0], run[1]), slice(0, run[1] - run[0]), 0)
    return [Fragment(name, made.shape, made.box, made.view, aliases=aliases)]


def _check_shape(fragment: Fragment, role: str, model: Model, entry: Entry) -> None:
    wanted = model.shape(role)
    if not wanted or wanted == fragment.shape:
        return
    differs = any(size is not None and size != found for size, found in zip(wanted, fragment.shape, strict=False))
    if len(wanted) != len(fragment.shape) or differs:
        shown = ", ".join("?" if size is None else str(size) for size in wanted)
        raise LayoutError(
            f"{fragment.name}: Megatron's {entry.key} makes it {fragment.shape}, the Hugging Face config says ({shown})"
            f"; it is another model's config"
        )


def _unmapped(keys: Sequence[str], model: Model) -> LayoutError:
    seen: dict[str, Any] = {}
    for key in keys:
        seen.setdefault(place_of(key, layers=0, latent=model.latent).roles[0], []).append(key)
    lines = [f"{found[0]}{f' and {len(found) - 1} more like it' if len(found) > 1 else ''}" for found in seen.values()]
    return LayoutError(
        f"{len(keys)} of this rank's tensors have no name in a checkpoint of {model.architecture}:\n  "
        + "\n  ".join(lines)
        + "\nadd them to an architecture of your own (refit_register_architectures)"
    )
