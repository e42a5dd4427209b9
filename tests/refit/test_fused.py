"""Fused and odd storage, declared by the helpers, between real processes: bit-exact twice, padding kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attrs import define, field
from fused_cases import CASES, Case, Side

from refit_sdk.adapter import Fragment
from refit_sdk.errors import LayoutError
from refit_sdk.fused import (
    Padding,
    Part,
    fused_qkv,
    gate_up,
    in_slots,
    owners_by_map,
    packed,
    run,
    stacked_experts,
    vocab_rows,
)
from refit_sdk.session import RefitSession
from refit_sdk.testing import judge, torch_fill
from refit_sdk.testing.crew import Crew, Job, crew
from refit_sdk.testing.ranks import Rank, free_rendezvous

SEED, SIZE, VERSIONS = 11, 9, (1, 2)


@define(eq=False)
class Fused:
    """A rank's storages, each a guarded block, described by its side. Padding is NaN at sources, noise at targets."""

    case: Case
    side: Side
    rank: int
    blank: dict[str, Any] = field(factory=dict)
    blocks: dict[str, judge.Storage] = field(factory=dict)
    tensors: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        import torch

        for key, shape in self.side.shapes(self.rank).items():
            dtype = getattr(torch, self.case.dtype)
            self.blocks[key] = judge.Storage(int(np.prod(shape)) * dtype.itemsize)
            self.tensors[key] = torch_fill.guarded(self.blocks[key], dtype, shape)
            noise = judge.expected(key, shape, [0] * len(shape), shape, self.case.dtype, SEED, self.rank)
            padding = judge.poison(shape, self.case.dtype) if self.side is self.case.source else noise
            self.blank[key] = padding

    def refit_fragments(self) -> list[Fragment]:
        """What the side's helpers say."""
        return self.side.describe(self.rank, self.tensors)

    def content(self, version: int | None) -> dict[str, Any]:
        """What must be in the storages, padding and all."""
        made = {key: bits.copy() for key, bits in self.blank.items()}
        if version is not None:
            self.side.write(self.rank, _whole(self.case, version), made)
        return made

    def fill(self, version: int | None) -> None:
        """Put a version into the storages; None: nothing but padding."""
        for key, bits in self.content(version).items():
            torch_fill.fill(self.tensors[key], bits)

    def faults(self, version: int) -> list[str]:
        """Where the storages aren't what they must be."""
        found = [
            f"{key} {mismatch}"
            for key, bits in self.content(version).items()
            for mismatch in judge.compare(torch_fill.read(self.tensors[key]), bits)
        ]
        return found + [f"guard byte {at} of {key}" for key, block in self.blocks.items() for at in block.damage()]


def _whole(case: Case, version: int) -> dict[str, Any]:
    named = {name: case.tied.get(name, name) for name in case.tensors}
    return {
        name: judge.expected(of, shape, [0] * len(shape), shape, case.dtype, SEED, version)
        for (name, of), shape in zip(named.items(), case.tensors.values(), strict=True)
    }


def take_part(_: Rank, name: str, engine: int | None, rank: int, where: str) -> None:
    """One rank: two pushes, each of them judged."""
    case = CASES[name]
    model = Fused(case, case.source if engine is None else case.engines[engine], rank)
    common: dict[str, Any] = {"rendezvous": where, "deadline": 20, "rank": rank, "size": model.side.size}
    if engine is None:
        common |= {"engines": len(case.engines), "settings": case.settings}
        with RefitSession.source(model, **common) as session:
            for version in VERSIONS:
                model.fill(version)
                session.push(version=version)
                assert model.faults(version) == []
        return
    with RefitSession.target(model, engine="abc"[engine], **common) as session:
        for version in VERSIONS:
            model.fill(None)
            assert session.receive().version == version
            assert model.faults(version) == []


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SIZE) as made:
        yield made


def play(ranks: Crew, name: str) -> None:
    """All ranks of a case, each a process."""
    case, where = CASES[name], free_rendezvous()
    seats = [(None, rank) for rank in range(case.source.size)]
    seats += [(number, rank) for number, side in enumerate(case.engines) for rank in range(side.size)]  # type: ignore[misc]
    jobs: list[Job] = [(take_part, (name, engine, rank, where)) for engine, rank in seats]
    ranks.results(jobs)


@pytest.mark.parametrize("name", CASES)
def test_bit_exact_twice(ranks: Crew, name: str) -> None:
    play(ranks, name)


def test_there_are_cases_of_every_kind() -> None:
    kinds = {name.partition(":")[0].partition(",")[0] for name in CASES}
    assert kinds == {
        "qkv", "gate and up", "experts", "vocabulary", "mixer", "parts of unequal columns", "by hand", "convolution",
    }  # fmt: skip


NO = np.zeros
SEAT: dict[str, Any] = {"rank": 0, "size": 2}
QKV: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 2}
REFUSED: dict[str, tuple[Any, str]] = {
    "a rank outside": (lambda: gate_up(NO((4, 1)), ("g", "u"), rank=2, size=2), "rank 2 of 2"),
    "a dim that isn't there": (lambda: gate_up(NO(4), ("g", "u"), dim=1, **SEAT), r"g, u: .*\(4,\).* no dim 1"),
    "odd halves": (lambda: gate_up(NO((5, 1)), ("g", "u"), **SEAT), r"g and u: .*\(5, 1\).*two equal halves"),
    "blocks that don't fit": (lambda: gate_up(NO((8, 1)), ("g", "u"), block=3, **SEAT), "pairs of blocks of 3"),
    "qkv of another size": (
        lambda: fused_qkv(NO(10), ("q", "k", "v"), **QKV, **SEAT), r"4 \(q\) \+ 2 \(k\) \+ 2 \(v\) = 8",
    ),
    "heads that aren't groups": (
        lambda: fused_qkv(NO(8), ("q", "k", "v"), heads=4, kv_heads=3, head_dim=2, **SEAT), "4 query heads.* 3 groups",
    ),
    "heads that can't be shared out": (
        lambda: fused_qkv(NO(8), ("q", "k", "v"), heads=6, kv_heads=6, head_dim=1, rank=0, size=4),
        "q: 6 rows can't be shared out to 4 ranks; 4 must divide 6",
    ),
    "kv heads beside the ranks": (
        lambda: fused_qkv(NO(8), ("q", "k", "v"), heads=12, kv_heads=3, head_dim=2, rank=0, size=4),
        "k: 3 units of 2 rows can't be shared out to 4 ranks",
    ),
    "a replica that nobody asked for": (lambda: packed(NO(1), [Part("a", 2)], rank=0, size=4), "say shared=True"),
    "too much padding": (lambda: packed(NO(4), [Part("a", 4), Padding(1)], **SEAT), r"2 \(a\) \+ 1 \(padding\) = 3"),
    "groups that aren't equal": (lambda: packed(NO(3), [Part("a", 6)], groups=2, **SEAT), "3 rows.* 2 equal groups"),
    "a vocabulary that doesn't fit": (lambda: vocab_rows(NO((4, 1)), "e", vocab=9, **SEAT), "8 rows, fewer than .* 9"),
    "a run outside": (lambda: run(NO(4), "w", start=8, extent=10), "w: .* would end at 12, outside .* 0:10"),
    "a slot without an owner": (
        lambda: stacked_experts(NO((3, 2, 1)), None, experts=["e.0", "e.1"], rank=0, size=1),
        "has 3 slots, and 2 owners",
    ),
    "a stack of no slots": (lambda: in_slots(NO(()), ["e.0"], lambda slot, owner: []), "has 0 slots, and 1 owners"),
    "a map with an empty slot": (lambda: owners_by_map([0, -1], slots=2, pattern="e.{}"), r"\{1: \[\]\}"),
    "a map with two in a slot": (lambda: owners_by_map([0, 0], slots=1, pattern="e.{}"), r"\{0: \[0, 1\]\}"),
    "a map to a slot that isn't there": (lambda: owners_by_map([3], slots=2, pattern="e.{}"), "expert 0 into slot 3"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what: str) -> None:
    call, told = REFUSED[what]
    with pytest.raises(LayoutError, match=told):
        call()


def test_the_helpers_need_no_torch() -> None:
    script = "import sys, refit_sdk.fused; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
