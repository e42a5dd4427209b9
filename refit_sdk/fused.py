"""The usual fused tensors of engines and trainers, declared by views, so that nobody computes offsets by hand.

Each function takes the live storage and the model's own counts, and returns `Fragment`s: views of that storage, each
with its box in a checkpoint tensor. They go into a `refit_fragments()`, or into a target adapter's `describe()`. What
is less usual is said in parts, with `packed`. `rank` and `size` are those of the group that cuts the tensor. No torch.

>>> import numpy as np
>>> storage = np.zeros((4, 3))
>>> for fragment in gate_up(storage, ("gate", "up"), rank=1, size=2):
...     print(fragment.name, fragment.shape, fragment.box, fragment.view.shape)
gate (4, 3) [2:4, 0:3] (2, 3)
up (4, 3) [2:4, 0:3] (2, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from refit_sdk.adapter import Fragment
from refit_sdk.errors import LayoutError
from refit_sdk.packing import Padding, Part, check_dim, check_rank, packed, run, segments, whole

__all__ = [
    "Arrangement", "Padding", "Part", "fused_qkv", "gate_up", "in_slots", "owners_by_map", "packed", "run", "segments",
    "stacked_experts", "vocab_rows", "whole",
]  # fmt: skip

Arrangement = Literal["stacked", "grouped"]
"""`stacked`: all query rows, then all key rows, then all value rows. `grouped`: head group by head group."""


def fused_qkv(
    storage: Any,
    names: tuple[str, str, str],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rank: int,
    size: int,
    arrangement: Arrangement = "stacked",
    v_head_dim: int | None = None,
    dim: int = 0,
) -> list[Fragment]:
    """A fused query-key-value weight or bias. `heads` and `kv_heads` are the model's, not the rank's.

    With fewer KV heads than ranks each is held by several; with more, each rank has an equal share of them.

    >>> import numpy as np
    >>> q, k, v = fused_qkv(np.zeros(8), ("q", "k", "v"), heads=8, kv_heads=2, head_dim=2, rank=3, size=4)
    >>> q.box, k.box, v.box
    (Box((12,), (16,)), Box((2,), (4,)), Box((2,), (4,)))
    """
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise LayoutError(
            f"{names[0]}: {heads} query heads can't be {kv_heads} groups; heads= and kv_heads= are the whole model's, "
            f"and each KV head serves as many query heads as the others"
        )
    parts = [
        Part(names[0], heads, head_dim),
        Part(names[1], kv_heads, head_dim, shared=True),
        Part(names[2], kv_heads, head_dim if v_head_dim is None else v_head_dim, shared=True),
    ]
    groups = max(1, kv_heads // size) if arrangement == "grouped" else 1
    return packed(storage, parts, rank=rank, size=size, dim=dim, groups=groups)


def gate_up(
    storage: Any, names: tuple[str, str], *, rank: int, size: int, dim: int = 0, block: int | None = None, pad: int = 0
) -> list[Fragment]:
    """A fused gate and up projection: the rank's gate rows, then its up rows; in blocks that take turns if `block`.

    `pad` rows follow each of the two (each of the blocks) and are never written.

    >>> import numpy as np
    >>> for fragment in gate_up(np.zeros((8, 1)), ("gate", "up"), rank=0, size=1, block=2):
    ...     print(fragment.name, fragment.box.start[0], fragment.box.stop[0])
    gate 0 2
    gate 2 4
    up 0 2
    up 2 4
    """
    check_rank(rank, size)
    check_dim(storage, dim, names)
    rows = storage.shape[dim]
    groups, rest = (1, rows % 2) if block is None else divmod(rows, 2 * (block + pad))
    each = rows // 2 - pad if block is None else block
    if rest or each < 1 or groups < 1:
        found = "two equal halves" if block is None else f"pairs of blocks of {block} rows, each with {pad} of padding"
        raise LayoutError(
            f"{names[0]} and {names[1]}: dim {dim} of the storage of shape {tuple(storage.shape)} isn't {found}; give "
            f"the dim that is fused and the block as the kernel interleaves it, or use `packed` for unequal parts"
        )
    parts = [part for name in names for part in (Part(name, each * groups * size), Padding(pad))]
    return packed(storage, parts, rank=rank, size=size, dim=dim, groups=groups)


def vocab_rows(
    storage: Any, name: str, *, vocab: int, rank: int, size: int, dim: int = 0, aliases: Sequence[str] = ()
) -> list[Fragment]:
    """An embedding or head cut by rows after padding: each rank's storage has equally many rows, `vocab` are real.

    Padding rows are in no fragment, so they're neither read nor written; a rank of padding alone has none.

    >>> import numpy as np
    >>> [[str(f.box) for f in vocab_rows(np.zeros(4), "embed", vocab=10, rank=r, size=4)] for r in (0, 2, 3)]
    [['[0:4]'], ['[8:10]'], []]
    """
    check_rank(rank, size)
    check_dim(storage, dim, [name])
    rows = storage.shape[dim]
    if vocab < 1 or rows * size < vocab:
        raise LayoutError(
            f"{name}: {size} ranks of {rows} rows (the storage has shape {tuple(storage.shape)}) hold {rows * size} "
            f"rows, fewer than the vocabulary's {vocab}; check vocab= and size="
        )
    start, stop = (min(vocab, at * rows) for at in (rank, rank + 1))
    inside = storage[(*[slice(None)] * dim, slice(0, stop - start))]
    return run(inside, name, start=start, extent=vocab, dim=dim, aliases=aliases)


EXPERT: Final = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
"""The members of an expert, as most checkpoints name them."""


def stacked_experts(
    w13: Any | None,
    w2: Any | None,
    *,
    experts: Sequence[str | None],
    rank: int,
    size: int,
    members: tuple[str, str, str] = EXPERT,
    block: int | None = None,
) -> list[Fragment]:
    """Experts in slots: `w13` (slots, gate and up rows, in) and `w2` (slots, out, down columns); either, or both.

    `experts` names the owner of each slot of this rank, as the prefix of its tensors' names; the same owner may have
    several slots, a shared expert is an owner like any other, and None says that a slot is nobody's. `rank` and `size`
    are those of the cut *inside* each expert (1 if experts are whole).

    >>> import numpy as np
    >>> owners = ["experts.2", "experts.3", "shared_expert"]
    >>> found = stacked_experts(np.zeros((3, 4, 8)), np.zeros((3, 8, 2)), experts=owners, rank=0, size=2)
    >>> [f"{fragment.name} {fragment.box}" for fragment in found][-3:]
    ['experts.2.down_proj.weight [0:8, 0:2]', 'experts.3.down_proj.weight [0:8, 0:2]', ...]
    """
    gate, up, down = members

    def fused(slot: Any, owner: str) -> list[Fragment]:
        return gate_up(slot, (f"{owner}.{gate}", f"{owner}.{up}"), rank=rank, size=size, block=block)

    def columns(slot: Any, owner: str) -> list[Fragment]:
        check_dim(slot, 1, [f"{owner}.{down}"])
        return packed(slot, [Part(f"{owner}.{down}", slot.shape[1] * size)], rank=rank, size=size, dim=1)

    stacks = ((w13, fused), (w2, columns))
    return [part for stack, each in stacks if stack is not None for part in in_slots(stack, experts, each)]


def in_slots(storage: Any, owners: Sequence[str | None], each: Callable[[Any, str], list[Fragment]]) -> list[Fragment]:
    """The fragments of every slot of dim 0, each described by `each(slot, owner)`. Every slot needs an owner, or None.

    >>> import numpy as np
    >>> [fragment.name for fragment in in_slots(np.zeros((3, 2)), ["e.0", None, "e.1"], whole)]
    ['e.0', 'e.1']
    """
    slots = (*storage.shape, 0)[0]
    if len(owners) != slots:
        raise LayoutError(
            f"the storage of shape {tuple(storage.shape)} has {slots} slots, and {len(owners)} owners were given: "
            f"{', '.join(map(str, owners)) or 'none'}; name the owner of every slot, or None for one that is nobody's"
        )
    owned = [(storage[slot], owner) for slot, owner in enumerate(owners) if owner is not None]
    return [fragment for part, owner in owned for fragment in each(part, owner)]


def owners_by_map(expert_map: Sequence[int], *, slots: int, pattern: str) -> list[str]:
    """The owners of a rank's slots, given an expert map: for each expert of the model its slot here, or -1.

    `pattern` has `{}` where the expert's number goes. `LayoutError` for a slot that no expert, or more than one, has.

    >>> owners_by_map([-1, 1, -1, 0], slots=2, pattern="model.layers.0.mlp.experts.{}")
    ['model.layers.0.mlp.experts.3', 'model.layers.0.mlp.experts.1']
    """
    of_slot: dict[int, list[int]] = {slot: [] for slot in range(slots)}
    for expert, slot in enumerate(map(int, expert_map)):
        if slot not in of_slot and slot != -1:
            raise LayoutError(
                f"the expert map puts expert {expert} into slot {slot}, the storage has 0:{slots}; -1 is none"
            )
        of_slot.get(slot, []).append(expert)
    if wrong := {slot: experts for slot, experts in of_slot.items() if len(experts) != 1}:
        raise LayoutError(
            f"every slot needs one owner, but the expert map {list(map(int, expert_map))} gives slots their experts as "
            f"{wrong}; a slot for a shared or a repeated expert has to be named: pass the owners themselves"
        )
    return [pattern.format(experts[0]) for experts in of_slot.values()]
