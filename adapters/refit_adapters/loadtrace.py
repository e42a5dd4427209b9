"""Where an engine's own loader puts each region of each checkpoint tensor, learnt by running it on nothing.

1. The loader is given tensors of the meta device, one a checkpoint tensor, and loads into tensors that it may not
   change: meta twins of parameters, or live ones. A dispatch mode sees every operation.
2. Views (narrow, chunk, split, view, transpose, permute, squeeze, index) need no following: torch keeps their storage,
   offset and strides on the meta device too, and those say which elements they are.
3. What copies elements (`copy_`, `clone`, `to`, `contiguous`, `reshape`, `cat`, `stack`, an index tensor) is written
   down as strided copies out of checkpoint tensors (`_strided`), at once, so buffers may be used again.
4. What a destination got of other operations can't be followed. The tensors that went in land whole, and together: they
   are a landing group.

Nothing is known of any model, and the work is linear in the loader's own.

>>> def load(weights):
...     for name, weight in weights:
...         into[:2].copy_(weight.chunk(2, dim=1)[1])
>>> into = torch.empty(4, 3, device="meta")
>>> found = trace(load, checkpoint={"w": ((2, 6), torch.float32)}, into={"fused": into})
>>> found.landings
(Landing(into='fused', name='w', box=Box((0, 3), (2, 6)), offset=0, strides=(3, 1)),)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen

from refit_adapters._recorder import Checkpoint, Piece, Recorder, Store, Written
from refit_adapters._strided import Unfollowed, boxes
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError

__all__ = ["Checkpoint", "Constant", "Landing", "LandingGroup", "Trace", "fragments", "trace"]

_EXACT: Final = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)}
"""Pairs of dtypes of which the second has every value of the first."""
_MOST_WORK: Final[Any] = 1_000_000
"""Candidates that comparing two regions may take; beyond, they are taken to meet."""


@frozen
class Landing:
    """A box of a checkpoint tensor, and the view of `into` that it was written to: its offset and strides, in elements,
    from where `into` begins."""

    into: str
    name: str
    box: Box
    offset: int
    strides: tuple[int, ...]


@frozen(eq=False)
class Constant:
    """A view of `into`, like a landing's, that the loader gives a value of its own: a number or a tensor."""

    into: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    value: Any


@frozen
class LandingGroup:
    """Checkpoint tensors that must be loaded whole and together, what they're loaded into, and why."""

    names: tuple[str, ...]
    into: tuple[str, ...]
    reason: str


@frozen
class Trace:
    """What a loader does. `landings` are regions that can be written directly, `groups` what can't; `constants` are
    what it writes by itself, such as padding; `unused` are checkpoint tensors of which nothing was loaded, and `empty`
    destinations that got nothing."""

    shapes: Mapping[str, tuple[int, ...]]
    landings: tuple[Landing, ...]
    groups: tuple[LandingGroup, ...]
    constants: tuple[Constant, ...]
    unused: tuple[str, ...]
    empty: tuple[str, ...]

    @property
    def elements(self) -> tuple[int, int]:
        """How many elements are written directly, and how many land."""
        direct = sum(landing.box.size for landing in self.landings)
        return direct, sum(prod(self.shapes[name]) for group in self.groups for name in group.names)


def trace(
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    *,
    checkpoint: Checkpoint,
    into: Mapping[str, torch.Tensor],
) -> Trace:
    """Run `load` over a checkpoint that isn't there, and say where it puts what. Nothing in `into` is changed.

    `LayoutError` if the loader fails, reads values, or gives a destination another storage.
    """
    recorder = Recorder()
    kept = {name: recorder.destination(name, tensor) for name, tensor in into.items()}
    given: list[str] = []
    try:
        with torch.no_grad(), recorder:
            load(recorder.weights(checkpoint, given))
    except LayoutError:
        raise
    except Exception as error:
        last = given[-1] if given else "the first tensor"
        raise LayoutError(
            f"the engine's loader failed on {last!r}, with tensors of which only shape and dtype are known: "
            f"{type(error).__name__}: {error}"
        ) from error
    rebound = [name for name, tensor in into.items() if recorder.store_of(tensor) is not kept[name]]
    if rebound:
        raise LayoutError(f"the engine's loader gives {', '.join(rebound[:4])} new storage, where nothing can land")
    found = _conclude(list(dict.fromkeys(kept.values())), checkpoint)
    stranded = sorted(recorder.stranded & set(found.unused))
    if stranded:
        raise LayoutError(f"the engine's loader copies {', '.join(stranded[:4])} to where no parameter or buffer is")
    return found


def fragments(
    found: Trace, live: Mapping[str, torch.Tensor], *, aliases: Mapping[str, tuple[str, ...]] | None = None
) -> list[Fragment]:
    """The landings as views of live tensors, laid out like those that were traced. `aliases` are by checkpoint name."""
    named = aliases or {}
    bases = {name: (tensor.detach(), tensor.storage_offset()) for name, tensor in live.items()}
    made = []
    for landing in found.landings:
        base, start = bases[landing.into]
        view = base.as_strided(landing.box.shape, landing.strides, start + landing.offset)
        made.append(
            Fragment(landing.name, found.shapes[landing.name], landing.box, view, aliases=named.get(landing.name, ()))
        )
    return made


def _conclude(stores: Sequence[Store], checkpoint: Checkpoint) -> Trace:
    """Landings and groups, of what all destinations got."""
    landings: list[Landing] = []
    blocked: list[tuple[str, frozenset[str], str]] = []
    for store in stores:
        blocked += _blocked(store)
        for piece in (piece for each in store.written.values() for piece in each.pieces):
            try:
                landings += _landings(piece, store, checkpoint[piece.name][0])
            except Unfollowed as reason:
                blocked.append((store.into, frozenset((piece.name,)), str(reason)))
    groups = _groups(blocked)
    whole = {name for group in groups for name in group.names}
    direct = tuple(landing for landing in landings if landing.name not in whole)
    used = whole | {landing.name for landing in direct}
    return Trace(
        shapes={name: shape for name, (shape, _) in checkpoint.items()},
        landings=direct,
        groups=groups,
        constants=tuple(
            _constant(store, each)
            for store in stores
            for each in store.written.values()
            if each.value is not None and not whole & store.names
        ),
        unused=tuple(name for name in checkpoint if name not in used),
        empty=tuple(store.into for store in stores if not store.written),
    )


def _constant(store: Store, written: Written) -> Constant:
    view, value = written.view, written.value
    assert view is not None
    return Constant(store.into, tuple(view.shape), int(view.storage_offset()) - store.begin, view.stride(), value)


def _blocked(store: Store) -> Iterator[tuple[str, frozenset[str], str]]:
    """What of a destination can't be followed: names, and why. A constant that is partly written over is among it."""
    written = list(store.written.values())
    for at, each in enumerate(written):
        if each.names:
            yield store.into, each.names, each.reason
        elif each.value is not None and any(_meet(each, later) for later in written[at + 1 :]):
            yield store.into, store.names, "it is filled with a constant first, and written over in part"


def _meet(one: Written, two: Written) -> bool:
    """Whether two regions have an element in common."""
    first, second = (np.asarray(_Places(each)) for each in (one, two))
    return bool(np.may_share_memory(first, second, max_work=_MOST_WORK))


class _Places:
    """A region's places as NumPy sees addresses; nothing is there to be read."""

    def __init__(self, written: Written) -> None:
        dims = written.region.dims
        self.__array_interface__ = {
            "version": 3, "data": (1 + written.region.into, True), "typestr": "|u1",
            "shape": tuple(size for size, _, _ in dims), "strides": tuple(step for _, _, step in dims),
        }  # fmt: skip


def _landings(piece: Piece, store: Store, shape: Sequence[int]) -> Iterator[Landing]:
    first, last = piece.dtypes[0], store.dtype
    for between in piece.dtypes[1:]:
        if between not in (first, last) and (first, between) not in _EXACT:
            raise Unfollowed(f"its values go through {between} on their way from {first} to {last}")
    for box, into, strides in boxes(piece.copy, shape):
        yield Landing(store.into, piece.name, box, into - store.begin, strides)


def _groups(blocked: Iterable[tuple[str, frozenset[str], str]]) -> tuple[LandingGroup, ...]:
    """Names that any destination joins, with the first reason."""
    joined: dict[tuple[str, str], tuple[str, str]] = {}

    def top(node: tuple[str, str]) -> tuple[str, str]:
        while joined.setdefault(node, node) != node:
            joined[node] = joined[joined[node]]
            node = joined[node]
        return node

    reasons: dict[tuple[str, str], str] = {}
    for into, names, reason in blocked:
        reasons.setdefault(("into", into), reason)
        for name in names:
            joined[top(("name", name))] = top(("into", into))
    members: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for node in list(joined):
        members[top(node)].append(node)
    return tuple(
        LandingGroup(
            tuple(sorted(text for kind, text in nodes if kind == "name")),
            tuple(sorted(text for kind, text in nodes if kind == "into")),
            next(reasons[node] for node in nodes if node in reasons),
        )
        for nodes in members.values()
    )
