"""Describing and planning do work in proportion to the model: twice the experts, twice the calls and the memory."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch
from planning_support import plan_of, world

from refit_sdk import manifest as wire
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.fold import fold
from refit_sdk.views import Views

FEW, MANY = 9000, 18000
SHAPE = (4, 2)
VIEW = torch.zeros(SHAPE)


def share(count: int, rank: int, size: int) -> list[Fragment]:
    """A rank's experts, of layers with a hundred each."""
    held = [i for i in range(count) if i % 100 * size // 100 == rank]
    return [Fragment(f"model.layers.{i // 100}.experts.{i % 100}.w", SHAPE, Box.whole(SHAPE), VIEW) for i in held]


def described(fragments: list[Fragment]) -> Any:
    """A manifest, through its wire form, with the views that go with it."""
    Views(fragments)
    return wire.decode(wire.encode(fold(fragments)))


def planned(sources: list[list[Fragment]], targets: list[list[Fragment]]) -> int:
    """Describe, plan and lower everything; the pieces that are sent."""
    plan = plan_of(world(list(map(described, sources)), e=list(map(described, targets))), window_ops=64)
    programs = [plan.program(process) for process in range(plan.world.num_processes)]
    return sum(len(message.pieces) for each in programs for window in each.windows for message in window.sends)


def calls(count: int) -> Counter[str]:
    """Calls made to describe and plan this many experts, four sources to two targets: by us, and of C by us."""
    sides = [[share(count, rank, size) for rank in range(size)] for size in (4, 2)]
    counted: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _arg: counted.update([event]))
    try:
        pieces = planned(*sides)
    finally:
        sys.setprofile(None)
    assert pieces == count
    return counted


def peak(count: int) -> int:
    """The most bytes that doing so takes, besides the fragments."""
    sides = [[share(count, rank, size) for rank in range(size)] for size in (4, 2)]
    tracemalloc.start()
    try:
        planned(*sides)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_twice_the_experts_take_twice_the_calls() -> None:
    few, many = calls(FEW), calls(MANY)
    for event in ("call", "c_call"):
        assert many[event] == pytest.approx(2 * few[event], rel=0.1)


def test_twice_the_experts_take_twice_the_memory() -> None:
    """So nothing is as large as the experts squared, in arrays whose inner loops no call shows."""
    few, many = peak(FEW), peak(MANY)
    assert many < 2.5 * few
