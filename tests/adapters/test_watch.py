"""What changes a model's identity between pushes: whatever is bound, added, removed or read in another way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refit_adapters._walk import walk
from refit_adapters._watch import Watch
from refit_adapters.fragments import FragmentsAdapter

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.errors import RefitError
from refit_sdk.session import RefitSession


def model() -> torch.nn.Sequential:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    made.register_buffer("cache", torch.zeros(2), persistent=False)
    return made


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter is added": lambda m: m[0].register_parameter("extra", torch.nn.Parameter(torch.ones(2))),
    "a buffer is added": lambda m: m.register_buffer("extra", torch.ones(2)),
    "a module is added": lambda m: m.add_module("more", torch.nn.Linear(2, 2)),
    "what was None is set": lambda m: m[1].register_parameter("bias", torch.nn.Parameter(torch.ones(2))),
    "a parameter is removed": lambda m: m[0].register_parameter("bias", None),
    "a module is replaced": lambda m: m.__setitem__(0, torch.nn.Linear(2, 2)),
    "a parameter is replaced": lambda m: setattr(m[0], "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "storage is replaced": lambda m: setattr(m[0].weight, "data", torch.ones(2, 2)),
    "storage is read in another way": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "bits are read in another way": lambda m: setattr(m[0].weight, "data", m[0].weight.data.view(torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_module_is_seen(change: str) -> None:
    held = model()
    if change == "bits are read in another way":
        held.requires_grad_(False)
    watch = Watch(walk(held))
    before = watch.look()
    assert watch.look() == before
    CHANGES[change](held)
    assert watch.look() != before


def test_values_and_buffers_that_are_not_described_may_change() -> None:
    held = model()
    watch = Watch(walk(held))
    before = watch.look()
    held[0].weight.data.add_(1)
    held.cache = torch.ones(2)
    assert watch.look() == before


def test_a_key_that_is_added_to_a_mapping_is_seen() -> None:
    held = {"w": torch.ones(2)}
    watch = Watch(walk(held))
    before = watch.look()
    held["extra"] = torch.ones(2)
    assert watch.look() != before


class Numbers:
    """A complex tensor that describes itself."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    def refit_fragments(self) -> list[Fragment]:
        return [Fragment("w", tuple(self.view.shape), Box.whole(self.view.shape), self.view)]


@pytest.mark.parametrize("lazily", [torch.conj, torch._neg_view], ids=["conjugated", "negated"])
def test_a_view_that_changes_what_its_bits_mean_is_seen(lazily: Callable[[torch.Tensor], torch.Tensor]) -> None:
    held = Numbers(torch.ones(2, dtype=torch.complex64))
    adapter = FragmentsAdapter(held, rank=0, size=1)
    before = adapter.identity()
    held.view = lazily(held.view)
    assert adapter.identity() != before


def pushed(source: Any, target: Any, between: Callable[[], object]) -> list[str]:
    """Two pushes in one session; what each side raised."""
    said: list[str] = []
    idle = threading.Barrier(2, timeout=30)

    def twice(push: Callable[[], object], change: Callable[[], object]) -> None:
        push()
        idle.wait()
        change()
        idle.wait()
        push()

    def told(work: Callable[[], object]) -> None:
        try:
            work()
        except RefitError as error:
            said.append(str(error))

    with RefitController(rendezvous="tcp://127.0.0.1:0") as controller:
        where: dict[str, Any] = {"rendezvous": controller.rendezvous, "rank": 0, "size": 1, "fabric": "inproc"}

        def receive() -> None:
            with RefitSession.target(target, engine="e", deadline=20, **where) as session:
                twice(session.receive, lambda: None)

        thread = threading.Thread(target=told, args=(receive,), daemon=True)
        thread.start()

        def push() -> None:
            with RefitSession.source(source, deadline=20, **where) as session:
                versions = iter((1, 2))
                twice(lambda: session.push(version=next(versions)), between)

        told(push)
        thread.join(30)
        assert not thread.is_alive()
    return said


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_parameter_that_only_one_side_got_is_an_error_at_the_next_push(side: str) -> None:
    sides = {"source": torch.nn.Linear(2, 2), "target": torch.nn.Linear(2, 2)}
    extra = torch.nn.Parameter(torch.ones(2))
    said = pushed(sides["source"], sides["target"], lambda: sides[side].register_parameter("extra", extra))
    assert len(said) == 2
    assert all("extra" in each for each in said)


def test_a_parameter_that_both_sides_got_travels_with_the_next_push() -> None:
    source, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def add() -> None:
        source.register_parameter("extra", torch.nn.Parameter(torch.full((2,), 7.0)))
        target.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))

    assert pushed(source, target, add) == []
    assert target.extra.tolist() == [7.0, 7.0]


def test_a_source_that_is_conjugated_between_pushes_gives_its_new_values() -> None:
    source = Numbers(torch.tensor([1 + 2j, 3 - 4j]))
    target = Numbers(torch.zeros(2, dtype=torch.complex64))
    assert pushed(source, target, lambda: setattr(source, "view", source.view.conj())) == []
    assert target.view.tolist() == [1 - 2j, 3 + 4j]


def test_a_target_whose_bits_do_not_mean_themselves_is_refused() -> None:
    held = torch.zeros(2, dtype=torch.complex64)
    source = Numbers(torch.ones(2, dtype=torch.complex64))
    said = pushed(source, Numbers(held.conj()), lambda: None)
    assert said
    assert all("'w'" in each and "conj" in each for each in said)
    assert held.tolist() == [0, 0]
