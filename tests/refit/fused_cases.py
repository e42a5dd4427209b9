"""Fused storage on both sides: how the helpers are called, and, by another road, what must be in the storage then.

A side says for each rank which storages it has, how they are described, and what they contain: plain NumPy over whole
tensors, written as the frameworks' own loaders cut and concatenate. What no content is written to stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from refit_sdk import fused
from refit_sdk.adapter import Fragment
from refit_sdk.fused import Padding, Part
from refit_sdk.settings import Settings

Arrays = dict[str, Any]
"""By name: whole tensors, or a rank's storages."""


@frozen(kw_only=True)
class Side:
    """`shapes(rank)`: the rank's storages. `describe(rank, storages)`: its fragments. `write(rank, whole, storages)`
    writes into the storages what must be there.
    """

    size: int
    shapes: Callable[[int], Mapping[str, tuple[int, ...]]]
    describe: Callable[[int, Arrays], list[Fragment]]
    write: Callable[[int, Arrays, Arrays], None]


@frozen(kw_only=True)
class Case:
    """Whole tensors by name, a side of sources, and engines."""

    id: str
    tensors: Mapping[str, tuple[int, ...]]
    source: Side
    engines: tuple[Side, ...]
    dtype: str = "float32"
    tied: Mapping[str, str] = field(factory=dict)
    settings: Settings = field(factory=Settings)


def even(extent: int, rank: int, size: int) -> slice:
    """A rank's equal share, of extents that can be shared."""
    assert extent % size == 0
    return slice(rank * extent // size, (rank + 1) * extent // size)


def rows(tensors: Mapping[str, tuple[int, ...]], size: int) -> Side:
    """Every tensor by itself, its rows shared out as evenly as can be."""

    def cut(extent: int, rank: int) -> slice:
        return slice(extent * rank // size, extent * (rank + 1) // size)

    def shapes(rank: int) -> Mapping[str, tuple[int, ...]]:
        made = {name: (len(range(n)[cut(n, rank)]), *rest) for name, (n, *rest) in tensors.items()}
        return {name: shape for name, shape in made.items() if shape[0]}

    def describe(rank: int, storages: Arrays) -> list[Fragment]:
        starts = {name: cut(tensors[name][0], rank).start for name in storages}
        return [
            part
            for name, storage in storages.items()
            for part in fused.run(storage, name, start=starts[name], extent=tensors[name][0])
        ]

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        for name, storage in storages.items():
            storage[...] = whole[name][cut(tensors[name][0], rank)]

    return Side(size=size, shapes=shapes, describe=describe, write=write)


Q, K, V = "attn.q_proj", "attn.k_proj", "attn.v_proj"
HEADS, DIM, HIDDEN = 8, 2, 3


def _qkv_tensors(kv_heads: int) -> dict[str, tuple[int, ...]]:
    counts = {Q: HEADS, K: kv_heads, V: kv_heads}
    weights: dict[str, tuple[int, ...]] = {f"{name}.weight": (n * DIM, HIDDEN) for name, n in counts.items()}
    return weights | {f"{name}.bias": (n * DIM,) for name, n in counts.items()}


def _qkv(kv_heads: int, size: int, arrangement: fused.Arrangement) -> Side:
    of_rank = HEADS // size + 2 * max(1, kv_heads // size)

    def describe(rank: int, storages: Arrays) -> list[Fragment]:
        return [
            part
            for kind, storage in storages.items()
            for part in fused.fused_qkv(
                storage, (f"{Q}.{kind}", f"{K}.{kind}", f"{V}.{kind}"), heads=HEADS, kv_heads=kv_heads, head_dim=DIM,
                rank=rank, size=size, arrangement=arrangement,
            )
        ]  # fmt: skip

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        for kind, storage in storages.items():
            q, k, v = (whole[f"{name}.{kind}"] for name in (Q, K, V))
            make = _stacked if arrangement == "stacked" else _grouped
            storage[...] = make(q, k, v, kv_heads, rank, size)

    return Side(
        size=size,
        shapes=lambda rank: {"weight": (of_rank * DIM, HIDDEN), "bias": (of_rank * DIM,)},
        describe=describe,
        write=write,
    )


def _stacked(q: Any, k: Any, v: Any, kv_heads: int, rank: int, size: int) -> Any:
    """As vLLM's QKVParallelLinear loads: its shard of q, and of k and v the shard of `rank // replicas`."""
    mine, replicas = (kv_heads // size, 1) if kv_heads >= size else (1, size // kv_heads)
    first = rank // replicas * mine * DIM
    kv = slice(first, first + mine * DIM)
    return np.concatenate([q[even(len(q), rank, size)], k[kv], v[kv]])


def _grouped(q: Any, k: Any, v: Any, kv_heads: int, rank: int, size: int) -> Any:
    """As Megatron's linear_qkv: one group after another, each with its queries, its key and its value."""
    if kv_heads < size:
        group = rank * kv_heads // size
        own = slice(group * DIM, (group + 1) * DIM)
        return np.concatenate([q[even(len(q), rank, size)], k[own], v[own]])
    per = len(q) // kv_heads
    groups = [
        np.concatenate([q[g * per : (g + 1) * per], k[g * DIM : (g + 1) * DIM], v[g * DIM : (g + 1) * DIM]])
        for g in range(kv_heads)
    ]
    return np.concatenate(groups[even(kv_heads, rank, size)])


def attention() -> Iterator[Case]:
    for kv_heads, word in ((1, "one KV head"), (2, "fewer KV heads than ranks"), (4, "as many"), (8, "more")):
        tensors = _qkv_tensors(kv_heads)
        grouped, stacked = _qkv(kv_heads, 2, "grouped"), _qkv(kv_heads, 4, "stacked")
        yield Case(id=f"qkv, {word}: grouped to stacked", tensors=tensors, source=grouped, engines=(stacked,))
        yield Case(id=f"qkv, {word}: stacked to grouped", tensors=tensors, source=stacked, engines=(grouped,))
    tensors = _qkv_tensors(2)
    yield Case(
        id="qkv: rows to grouped and stacked over four", tensors=tensors, source=rows(tensors, 2),
        engines=(_qkv(2, 4, "grouped"), _qkv(2, 2, "stacked")), dtype="bfloat16",
    )  # fmt: skip


GATE, UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"
MLP = {GATE: (8, 3), UP: (8, 3)}


def _mlp(
    size: int,
    content: Callable[[Any, Any], Any],
    shape: tuple[int, ...],
    *,
    turned: bool = False,
    kept: slice = slice(None),
    **how: Any,
) -> Side:
    """`content(gate, up)` of a rank's rows is what is in the rows `kept`, or, `turned`, in these columns."""

    def describe(rank: int, storages: Arrays) -> list[Fragment]:
        storage = storages["w"].T if turned else storages["w"]
        return fused.gate_up(storage, (GATE, UP), rank=rank, size=size, **how)

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        mine = even(8, rank, size)
        made = content(whole[GATE][mine], whole[UP][mine])
        if turned:
            storages["w"][...] = made.T
        else:
            storages["w"][kept] = made

    return Side(size=size, shapes=lambda rank: {"w": shape}, describe=describe, write=write)


def _beside(gate: Any, up: Any) -> Any:
    return np.concatenate([gate, up])


def _in_turns(block: int) -> Callable[[Any, Any], Any]:
    def make(gate: Any, up: Any) -> Any:
        halves = [half.reshape(-1, block, half.shape[-1]) for half in (gate, up)]
        return np.stack(halves, axis=1).reshape(-1, gate.shape[-1])

    return make


def _padded_halves(size: int) -> Side:
    """Each half is followed by a row that belongs to nobody."""
    side = _mlp(size, _beside, (2 * (8 // size + 1), 3), pad=1)

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        mine, each = even(8, rank, size), 8 // size
        storages["w"][:each] = whole[GATE][mine]
        storages["w"][each + 1 : 2 * each + 1] = whole[UP][mine]

    return Side(size=size, shapes=side.shapes, describe=side.describe, write=write)


def gates() -> Iterator[Case]:
    two, four = _mlp(2, _beside, (8, 3)), _mlp(4, _beside, (4, 3))
    yield Case(
        id="gate and up: two to four and to one", tensors=MLP, source=two, engines=(four, _mlp(1, _beside, (16, 3)))
    )
    yield Case(id="gate and up: to two tensors", tensors=MLP, source=four, engines=(rows(MLP, 3),))
    ones, pairs = _mlp(2, _in_turns(1), (8, 3), block=1), _mlp(2, _in_turns(2), (8, 3), block=2)
    yield Case(id="gate and up: row by row, and in blocks of two", tensors=MLP, source=two, engines=(ones, pairs))
    yield Case(id="gate and up: out of blocks", tensors=MLP, source=pairs, engines=(two,), dtype="bfloat16")
    turned = _mlp(2, _beside, (3, 8), turned=True)
    both = _mlp(2, _in_turns(1), (3, 8), turned=True, block=1)
    yield Case(id="gate and up: transposed, and in turns too", tensors=MLP, source=rows(MLP, 2), engines=(turned, both))
    yield Case(id="gate and up: each half padded", tensors=MLP, source=_padded_halves(4), engines=(_padded_halves(2),))


LAYER = "model.layers.3.mlp"
WIDE, IN = 4, 3


def _moe(numbers: range, *others: str) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {}
    for owner in (*(f"{LAYER}.experts.{number}" for number in numbers), *others):
        made |= {f"{owner}.gate_proj.weight": (WIDE, IN), f"{owner}.up_proj.weight": (WIDE, IN)}
        made |= {f"{owner}.down_proj.weight": (IN, WIDE)}
    return made


def _experts(slots: list[list[str | None]], *, inside: int = 1, kernel: bool = False) -> Side:
    """Slots by group of ranks, each cut inside over `inside` ranks. `kernel`: (in, rows) with gate and up in turns."""
    wide = WIDE // inside

    def shapes(rank: int) -> Mapping[str, tuple[int, ...]]:
        count = len(slots[rank // inside])
        w13 = (count, IN, 2 * wide) if kernel else (count, 2 * wide, IN)
        return {"w13": w13, "w2": (count, wide, IN) if kernel else (count, IN, wide)}

    def describe(rank: int, storages: Arrays) -> list[Fragment]:
        w13, w2 = storages["w13"], storages["w2"]
        if kernel:
            w13, w2 = w13.swapaxes(1, 2), w2.swapaxes(1, 2)
        block = 1 if kernel else None
        owners = slots[rank // inside]
        return fused.stacked_experts(w13, w2, experts=owners, rank=rank % inside, size=inside, block=block)

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        mine = even(WIDE, rank % inside, inside)
        for slot, owner in enumerate(slots[rank // inside]):
            if owner is None:
                continue
            gate, up, down = (whole[f"{owner}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            if kernel:
                storages["w13"][slot, :, 0::2], storages["w13"][slot, :, 1::2] = gate[mine].T, up[mine].T
                storages["w2"][slot] = down[:, mine].T
            else:
                storages["w13"][slot, :wide], storages["w13"][slot, wide:] = gate[mine], up[mine]
                storages["w2"][slot] = down[:, mine]

    return Side(size=len(slots) * inside, shapes=shapes, describe=describe, write=write)


def _routed(*numbers: int) -> list[str | None]:
    return [f"{LAYER}.experts.{number}" for number in numbers]


def experts() -> Iterator[Case]:
    eight = _moe(range(8))
    four = _experts([_routed(2 * rank, 2 * rank + 1) for rank in range(4)])
    maps = [[0, 1, 2, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 3, 2, 1, 0]]
    pattern = f"{LAYER}.experts.{{}}"
    mapped = _experts([list(fused.owners_by_map(found, slots=4, pattern=pattern)) for found in maps])
    all_of_them = _experts([_routed(*range(8))])
    yield Case(id="experts: four to two by map, and to one", tensors=eight, source=four, engines=(mapped, all_of_them))
    yield Case(
        id="experts: in windows smaller than an expert", tensors=eight, source=four, engines=(all_of_them,),
        settings=Settings(window_bytes=40, window_ops=2),
    )  # fmt: skip
    yield Case(
        id="experts: one by one to halves, as a kernel has them", tensors=eight, source=rows(eight, 2),
        engines=(_experts([_routed(*range(4)), _routed(*range(4, 8))], inside=2, kernel=True),), dtype="bfloat16",
    )  # fmt: skip
    yield Case(
        id="experts: halves to slots, some twice and one empty", tensors=_moe(range(4)),
        source=_experts([_routed(0, 1), _routed(2, 3)], inside=2),
        engines=(_experts([_routed(0, 1, 2, 0), [*_routed(3, 3), None, *_routed(1)]]),),
    )  # fmt: skip
    shared = f"{LAYER}.shared_experts"
    yield Case(
        id="experts: the shared one in a slot of every rank", tensors=_moe(range(4), shared),
        source=_experts([_routed(0, 1, 2, 3), [shared]]),
        engines=(_experts([[*_routed(0, 1), shared], [*_routed(2, 3), shared]]),),
    )  # fmt: skip


def _vocab(name: str, vocab: int, width: int, each: int, size: int, *, aliases: tuple[str, ...] = ()) -> Side:
    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        mine = whole[name][rank * each : (rank + 1) * each]
        storages["w"][: len(mine)] = mine

    return Side(
        size=size,
        shapes=lambda rank: {"w": (each, width)},
        describe=lambda rank, s: fused.vocab_rows(s["w"], name, vocab=vocab, rank=rank, size=size, aliases=aliases),
        write=write,
    )


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def vocabularies() -> Iterator[Case]:
    tensors = {EMBED: (1000, 3)}
    yield Case(
        id="vocabulary: 1000 rows padded to 1024 on four, to 1008 on four", tensors=tensors,
        source=_vocab(EMBED, 1000, 3, 256, 4), engines=(_vocab(EMBED, 1000, 3, 252, 4),),
    )  # fmt: skip
    yield Case(
        id="vocabulary: a rank of padding alone", tensors={EMBED: (10, 5)}, source=_vocab(EMBED, 10, 5, 4, 4),
        engines=(_vocab(EMBED, 10, 5, 7, 2), rows({EMBED: (10, 5)}, 2)),
    )  # fmt: skip
    both = {EMBED: (10, 5), HEAD: (10, 5)}
    tied = _vocab(EMBED, 10, 5, 4, 3, aliases=(HEAD,))
    yield Case(
        id="vocabulary: tied, to both by themselves",
        tensors=both,
        source=tied,
        engines=(rows(both, 2),),
        tied={HEAD: EMBED},
    )
    yield Case(
        id="vocabulary: both equal, to tied", tensors=both, source=rows(both, 2), engines=(tied,), tied={HEAD: EMBED}
    )
    other = _vocab(HEAD, 10, 5, 6, 2, aliases=(EMBED,))
    yield Case(
        id="vocabulary: tied on both sides, named otherwise",
        tensors=both,
        source=tied,
        engines=(other,),
        tied={HEAD: EMBED},
    )


MIXER = "model.layers.0.mixer"
IN_PROJ, CONV, A_LOG = f"{MIXER}.in_proj.weight", f"{MIXER}.conv1d.weight", f"{MIXER}.A_log"
UNITS = [(4, 2), (4, 2), (2, 3), (2, 3), (4, 1)]
"""z and x by head, B and C by group, dt by head: (units, rows of a unit)."""


def _mamba(size: int) -> Side:
    conv = [(4, 1), (2, 1), (2, 1)]

    def pick(whole: Any, units: list[tuple[int, int]], rank: int) -> Any:
        found, first = [], 0
        for count, each in units:
            part = whole[first : first + count * each].reshape(count, each, *whole.shape[1:])
            mine = part[even(count, rank, size)] if count >= size else part[[rank * count // size]]
            found.append(mine.reshape(-1, *whole.shape[1:]))
            first += count * each
        return np.concatenate(found)

    def shapes(rank: int) -> Mapping[str, tuple[int, ...]]:
        counts = [sum(max(1, n // size) * each for n, each in units) for units in (UNITS, conv)]
        return {"in": (counts[0], 3), "conv": (counts[1], 1, 3), "a": (4 // size,)}

    def describe(rank: int, storages: Arrays) -> list[Fragment]:
        seat = {"rank": rank, "size": size}
        return [
            *fused.packed(storages["in"], fused.segments(IN_PROJ, UNITS, shared=True), **seat),
            *fused.packed(storages["conv"], fused.segments(CONV, conv, shared=True), **seat),
            *fused.packed(storages["a"], [Part(A_LOG, 4)], **seat),
        ]

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        storages["in"][...] = pick(whole[IN_PROJ], UNITS, rank)
        storages["conv"][...] = pick(whole[CONV], conv, rank)
        storages["a"][...] = whole[A_LOG][even(4, rank, size)]

    return Side(size=size, shapes=shapes, describe=describe, write=write)


def _unequal(size: int) -> Side:
    """Three tensors of 4, 8 and 4 columns, of which each rank has its share, packed beside two columns of padding."""
    names = {"a": 4, "b": 8, "c": 4}

    def describe(rank: int, storages: Arrays) -> list[Fragment]:
        parts = [*(Part(name, columns) for name, columns in names.items()), Padding(2)]
        return fused.packed(storages["w"], parts, rank=rank, size=size, dim=1)

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        made = np.concatenate([whole[name][:, even(columns, rank, size)] for name, columns in names.items()], axis=1)
        storages["w"][:, : made.shape[1]] = made

    return Side(size=size, shapes=lambda rank: {"w": (3, 16 // size + 2)}, describe=describe, write=write)


def _by_hand(dim: int, cuts: list[tuple[int, int]], shape: tuple[int, ...], *, wider: int = 0) -> Side:
    """Runs of a dim, each in a storage that is `wider` at its end."""

    def stored(rank: int) -> tuple[int, ...]:
        start, stop = cuts[rank]
        return (*shape[:dim], stop - start + wider, *shape[dim + 1 :])

    def inside(rank: int) -> tuple[slice, ...]:
        start, stop = cuts[rank]
        return (*[slice(None)] * dim, slice(0, stop - start))

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        storages["w"][inside(rank)] = whole["w"][(*[slice(None)] * dim, slice(*cuts[rank]))]

    def describe(rank: int, s: Arrays) -> list[Fragment]:
        return fused.run(s["w"][inside(rank)], "w", start=cuts[rank][0], extent=shape[dim], dim=dim)

    return Side(size=len(cuts), shapes=lambda rank: {"w": stored(rank)}, describe=describe, write=write)


def _channels_last(size: int) -> Side:
    """A 4-D convolution, (out, in, height, width), cut by its output channels, stored with channels last."""

    def write(rank: int, whole: Arrays, storages: Arrays) -> None:
        storages["w"][...] = whole["conv.w"][even(6, rank, size)].transpose(0, 2, 3, 1)

    return Side(
        size=size,
        shapes=lambda rank: {"w": (6 // size, 2, 2, 4)},
        describe=lambda rank, s: fused.packed(
            s["w"].swapaxes(2, 3).swapaxes(1, 2), [Part("conv.w", 6)], rank=rank, size=size
        ),
        write=write,
    )


def odd_ones() -> Iterator[Case]:
    mamba = {IN_PROJ: (32, 3), CONV: (8, 1, 3), A_LOG: (4,)}
    yield Case(id="mixer: two to one and to four", tensors=mamba, source=_mamba(2), engines=(_mamba(1), _mamba(4)))
    yield Case(id="mixer: rows to two", tensors=mamba, source=rows(mamba, 3), engines=(_mamba(2),), dtype="bfloat16")
    abc = {"a": (3, 4), "b": (3, 8), "c": (3, 4)}
    yield Case(id="parts of unequal columns: two to four", tensors=abc, source=_unequal(2), engines=(_unequal(4),))
    shape = (3, 14)
    uneven = _by_hand(1, [(0, 2), (2, 5), (5, 9), (9, 14)], shape)
    yield Case(
        id="by hand: columns 2, 3, 4, 5 to replicas",
        tensors={"w": shape},
        source=uneven,
        engines=(_by_hand(0, [(0, 3)] * 2, shape),),
    )
    deep = (4, 31, 10)
    gathered = _by_hand(1, [(0, 31)], deep, wider=1)
    cut = _by_hand(1, [(0, 8), (8, 16), (16, 24), (24, 31)], deep)
    yield Case(
        id="by hand: out of storage with the strides of its padding, and into it",
        tensors={"w": deep},
        source=gathered,
        engines=(cut, gathered),
    )
    conv = {"conv.w": (6, 4, 2, 2)}
    yield Case(
        id="convolution: channels last, three to two",
        tensors=conv,
        source=_channels_last(3),
        engines=(_channels_last(2), rows(conv, 1)),
    )


CASES = {case.id: case for group in (attention, gates, experts, vocabularies, odd_ones) for case in group()}
