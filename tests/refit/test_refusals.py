"""A rank that can't take part: at joining, in a push or in a reform. The others hear at once who and why, and go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from bad_cases import Said, Seat, join, said_of, seats

from refit_sdk import joining
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.errors import LayoutError, RefitError, RendezvousError
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Shard
from refit_sdk.session import RefitSession
from refit_sdk.testing.crew import Crew, Job, crew, meet
from refit_sdk.testing.models import Held, Model, Ranks, spread
from refit_sdk.testing.ranks import Rank, free_rendezvous

NAME, SHAPE = "model.layers.0.up.weight", (8, 4)
DEADLINE = 30.0
AT_ONCE = DEADLINE / 3
"""Seconds in which a rank has heard of what it would else have waited for until the deadline."""


def cut(dim: int, size: int = 2) -> Ranks:
    return spread(NAME, SHAPE, Layout(Mesh(range(size)), [Shard(dim)]), size=size)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(4) as made:
        yield made


class Failing(Model):
    """A model whose hooks fail when told to: each of `fails` once."""

    fails: tuple[str, ...] = ()

    def _may(self, hook: str) -> None:
        if hook in self.fails:
            self.fails = tuple(other for other in self.fails if other != hook)
            raise RuntimeError(f"{hook} is not what it was")

    def refit_prepare(self) -> None:
        self._may("prepare")

    def refit_fence(self, reason: str) -> None:
        self._may("fence")

    def bend(self) -> list[Fragment]:
        """Rebind a tensor to a shape that its box doesn't have; what there was."""
        kept = self.fragments
        self.fragments = [evolve(kept[0], view=torch.zeros(3, 3)), *kept[1:]]
        return kept


def goes_on(me: Rank, seat: Seat, where: str, failing: str, version: int) -> list[tuple[float, Said]]:
    """Push or take three versions; before `version` something breaks, and is mended. Seconds, and what was said."""
    model, found = Failing(seat.held), []
    with seat.join(model, where) as session:
        for number in (1, 2, 3):
            kept = model.fragments
            if seat.side == "source":
                model.fill(version=number)
            else:
                model.poison()
            if number == version and failing == "describe":
                kept = model.bend()
            elif number == version:
                model.fails = (failing,)
            me.meet("next")
            begun = time.monotonic()
            try:
                session.push(version=number) if seat.side == "source" else session.receive()
                said = Said("", faults=tuple(model.faults(version=number)) if seat.side == "target" else ())
            except (RefitError, RuntimeError) as error:
                model.fragments = kept
                said = evolve(said_of(error, model), details=getattr(error, "failures", None))  # type: ignore[arg-type]
            found.append((time.monotonic() - begun, said))
            model.fragments = kept
        me.meet("last")
    return found


BREAKING = [
    pytest.param("source", 1, "prepare", "RuntimeError: prepare is not what it was", id="a source that can't prepare"),
    pytest.param("source", 0, "prepare", "RuntimeError: prepare is not what it was", id="the host can't prepare"),
    pytest.param(
        "source", 1, "describe", f"LayoutError: {NAME}: the view has shape (3, 3)", id="a source re-described"
    ),
    pytest.param(
        "target", 1, "describe", f"LayoutError: {NAME}: the view has shape (3, 3)", id="a target re-described"
    ),
    pytest.param("target", 0, "fence", "RuntimeError: fence is not what it was", id="a target that can't be fenced"),
]


@pytest.mark.parametrize(("side", "rank", "hook", "cause"), BREAKING)
def test_a_rank_that_cannot_enter_a_push_is_named_to_all_at_once(
    ranks: Crew, side: str, rank: int, hook: str, cause: str
) -> None:
    where = free_rendezvous()
    everybody = [*seats("source", cut(0), deadline=DEADLINE), *seats("target", cut(1), deadline=DEADLINE)]
    jobs: list[Job] = []
    for seat in everybody:
        breaks = (seat.side, seat.rank) == (side, rank)
        jobs.append((goes_on, (seat, where, hook if breaks else "", 2)))
    with ranks.at_work(jobs) as working:
        for _ in range(3):
            meet(working, "next")
        meet(working, "last")
        found = [each.result() for each in working]
    culprit = rank + 2 * (side == "target")
    name = f"{'source' if side == 'source' else 'rollout-0'}[{rank}]"
    for number, told in enumerate(found):
        assert [(said.kind, said.faults) for _, said in (told[0], told[2])] == [("", ())] * 2, told
        seconds, said = told[1]
        assert seconds < AT_ONCE
        if number == culprit:
            assert f"{said.kind}: {said.text}".startswith(cause)
        else:
            assert said.kind == "PushError"
            assert f"{name}: {cause}" in said.text
            assert list(said.details) == [name]
            assert said.engines == ({"rollout-0": "untouched"} if hook != "fence" else said.engines)
            assert set(said.engines) == {"rollout-0"}
        if hook != "fence":
            assert number < 2 or said.faults == (), "nobody wrote"


def test_a_source_that_was_rebound_while_the_target_beside_it_failed_gives_its_new_values() -> None:
    held = [Held(NAME, SHAPE, Box.whole(SHAPE))]
    gives, takes = Model(held), Failing(held)
    with RefitSession.colocated(
        source=gives, target=takes, rendezvous=free_rendezvous(), rank=0, size=1, deadline=20
    ) as session:
        gives.fill(version=1)
        session.sync(version=1)
        assert takes.faults(version=1) == []
        gives.rebind(held)
        gives.fill(version=2)
        kept = takes.bend()
        with pytest.raises(LayoutError, match=r"the view has shape \(3, 3\)"):
            session.sync(version=2)
        takes.fragments = kept
        session.sync(version=2)
        assert takes.faults(version=2) == []


class Unloved:
    """An object that no adapter accepts."""


@frozen(kw_only=True)
class Unfit:
    """A rank that can't join, and how: an object that no adapter knows, a view that doesn't fit, a fabric's name."""

    id: str
    side: str
    rank: int
    how: str
    says: str
    kind: str
    others: float = field(default=AT_ONCE)


UNFIT = [
    Unfit(
        id="no adapter", side="target", rank=1, how="object", kind="PluginError", says="one target adapter must accept"
    ),
    Unfit(
        id="no adapter for a source", side="source", rank=1, how="object", kind="PluginError", says="one source adapter"
    ),
    Unfit(id="the host", side="source", rank=0, how="bend", kind="LayoutError", says="the view has shape (3, 3)"),
    Unfit(id="a bad fragment", side="target", rank=0, how="bend", kind="LayoutError", says="the view has shape (3, 3)"),
    Unfit(id="no fabric", side="target", rank=1, how="fabric", kind="PluginError", says="no fabric named 'smoke'"),
]


def tries(_: Rank, seat: Seat, where: str, how: str) -> tuple[float, Said]:
    """Try to join, with what can't be; seconds, and what was said."""
    model: Any = Failing(seat.held)
    if how == "bend":
        model.bend()
    options = {**seat.options, "fabric": "smoke"} if how == "fabric" else seat.options
    begun = time.monotonic()
    try:
        evolve(seat, options=options).join(Unloved() if how == "object" else model, where).close()
    except RefitError as error:
        return time.monotonic() - begun, Said(type(error).__name__, str(error))
    return time.monotonic() - begun, Said("")


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda unfit: unfit.id)
@pytest.mark.parametrize("controlled", [False, True], ids=["hosted by a source", "by a controller"])
def test_a_rank_that_cannot_join_is_named_to_all_at_once(ranks: Crew, unfit: Unfit, controlled: bool) -> None:
    where = free_rendezvous()
    hosting = RefitController(rendezvous=where, deadline=DEADLINE) if controlled else None
    everybody = [*seats("source", cut(0), deadline=DEADLINE), *seats("target", cut(1), deadline=DEADLINE)]
    jobs: list[Job] = [
        (tries, (seat, where, unfit.how if (seat.side, seat.rank) == (unfit.side, unfit.rank) else ""))
        for seat in everybody
    ]
    try:
        found = ranks.results(jobs)
    finally:
        if hosting is not None:
            hosting.close()
    culprit = unfit.rank + 2 * (unfit.side == "target")
    name = f"{'source' if unfit.side == 'source' else 'rollout-0'}[{unfit.rank}]"
    for number, (seconds, said) in enumerate(found):
        assert seconds < AT_ONCE
        assert unfit.says in said.text
        if number == culprit:
            assert said.kind == unfit.kind
        else:
            assert said.kind == "RendezvousError"
            assert f"{name} can't join: {unfit.kind}: " in said.text
            assert "mend that, and start every rank again" in said.text


def test_the_host_stays_a_moment_for_those_who_have_not_come_yet() -> None:
    where = free_rendezvous()
    held = cut(0)
    with ThreadPoolExecutor() as pool:
        hosting = pool.submit(tries, None, Seat(side="source", held=held[0], size=2), where, "object")  # type: ignore[arg-type]
        while not hosting.done() and not _listens(where):
            pass
        assert not hosting.done()
        said = tries(None, Seat(side="source", held=held[1], rank=1, size=2), where, "")[1]  # type: ignore[arg-type]
        assert "source[0] can't join: PluginError" in said.text
        said = tries(None, Seat(side="target", held=cut(1, 1)[0]), where, "")[1]  # type: ignore[arg-type]
        assert "source[0] can't join: PluginError" in said.text
        seconds, said = hosting.result()
    assert said.kind == "PluginError"
    assert seconds < joining.TELL_SECONDS, "all have heard it"


def _listens(where: str) -> bool:
    import socket

    host, port = where.removeprefix("tcp://").split(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


def test_where_nobody_can_be_told_the_error_is_that_of_the_rank() -> None:
    seat = Seat(side="target", held=cut(1)[0], options={"deadline": 0.5})
    seconds, said = tries(None, seat, free_rendezvous(), "object")  # type: ignore[arg-type]
    assert said.kind == "PluginError"
    assert seconds < AT_ONCE


@pytest.mark.parametrize("late", [False, True])
def test_who_cannot_join_a_session_that_goes_on_does_it_no_harm(late: bool) -> None:
    where, held = free_rendezvous(), [Held(NAME, SHAPE, Box.whole(SHAPE))]
    given: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "deadline": 20.0}
    with RefitSession.colocated(source=Model(held), target=Model(held), **given) as session:
        other = "colocated" if late else "other"
        with pytest.raises(RefitError, match="exactly one target adapter must accept"):
            RefitSession.target(Unloved(), **given, engine=other)
        assert session.sync(version=1).version == 1


def frozen_seats(patterns: list[tuple[str, ...]], targets: Ranks) -> list[Seat]:
    made = seats("source", cut(0), deadline=20)
    for rank, held in enumerate(targets):
        options = {"deadline": 20, "frozen": patterns[rank]}
        made.append(Seat(side="target", held=held, rank=rank, size=len(targets), options=options))
    return made


def with_vision() -> Ranks:
    """Only the first rank of the engine has the tower."""
    tower = Held("visual.patch.weight", (4,), Box.whole((4,)))
    return ((*cut(1)[0], tower), cut(1)[1])


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ([("visual.*",), ("visual.*",)], ""),
        (
            [("visaul.*", "visual.*"), ("visaul.*",)],
            "frozen 'visaul.*' matches no tensor of engine rollout-0; the nearest ",
        ),
        (
            [("visual.*",), ("qqqqqqqqqqq",)],
            "frozen 'qqqqqqqqqqq' matches no tensor of engine rollout-0: see the pattern",
        ),
    ],
    ids=["on one rank of the engine", "misspelt", "nothing like it"],
)
def test_a_frozen_pattern_that_matches_nothing(ranks: Crew, patterns: list[tuple[str, ...]], says: str) -> None:
    where = free_rendezvous()
    said = ranks.results([(join, (seat, where)) for seat in frozen_seats(patterns, with_vision())])
    assert {each.kind for each in said} == {"PlanError" if says else ""}, said
    assert [each.text for each in said if says not in each.text] == []
    if "visaul.*" in says:
        assert "the nearest name is visual.patch.weight: see the pattern, or leave it out" in said[0].text


def test_a_frozen_alias_is_named_by_the_tensor_that_it_is(ranks: Crew) -> None:
    where, whole = free_rendezvous(), Box.whole(SHAPE)
    tied = Held("embed.weight", SHAPE, whole, aliases=("lm_head.weight",))
    made = [Seat(side="source", held=(tied,)), Seat(side="target", held=(tied,), options={"frozen": ["lm_head.*"]})]
    said = ranks.results([(join, (seat, where)) for seat in made])
    assert [each.kind for each in said] == ["PlanError"] * 2
    assert "frozen 'lm_head.*' matches no tensor of engine rollout-0; the nearest name is embed.weight" in said[0].text


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_model_without_parameters(ranks: Crew, side: str) -> None:
    where = free_rendezvous()
    sources, targets = (((), ()), cut(1)) if side == "source" else (cut(0), ((), ()))
    everybody = [*seats("source", sources, deadline=20), *seats("target", targets, deadline=20)]
    said = ranks.results([(join, (seat, where)) for seat in everybody])
    assert {(each.kind, len(each.details)) for each in said} == {("PlanError", 1)}
    who = "the sources hold no tensor: " if side == "source" else "engine rollout-0 holds no tensor that isn't frozen: "
    assert who + "no rank's model has a parameter or a persistent buffer" in said[0].text
    assert "see that the right object was given" in said[0].text
    assert "route" not in said[0].text


def test_a_rank_without_parameters_beside_one_that_has_them(ranks: Crew) -> None:
    where = free_rendezvous()
    everybody = [*seats("source", (cut(0, 1)[0], ()), deadline=20), *seats("target", cut(1), deadline=20)]
    said = ranks.results([(join, (seat, where)) for seat in everybody])
    assert [each.kind for each in said] == [""] * 4, said


def test_joining_goes_on_without_an_engine_that_never_came(ranks: Crew) -> None:
    with RefitController(rendezvous="tcp://127.0.0.1:0", engines=["rollout-0", "rollout-1"], deadline=20) as hosting:
        everybody = [*seats("source", cut(0), deadline=20), *seats("target", cut(1), deadline=20)]
        with ranks.at_work([(join, (seat, hosting.rendezvous)) for seat in everybody]) as working:
            hosting.drop("rollout-1")
            assert [each.result().kind for each in working] == [""] * 4
        with pytest.raises(RendezvousError, match="'rollout-1' is not known here; known are: "):
            hosting.drop("rollout-1")
