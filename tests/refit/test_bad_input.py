"""Bad input: each a clear error on every rank, before any byte moves, and targets that nobody wrote to."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from bad_cases import Push, Said, Seat, busy, gives, join, seats, takes, takes_late, takes_rebinding

from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.errors import PluginError, RefitError, RendezvousError
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Shard
from refit_sdk.session import RefitSession
from refit_sdk.settings import Settings
from refit_sdk.testing.crew import Crew, Job, crew, meet
from refit_sdk.testing.models import Held, Model, Ranks, beside, spread
from refit_sdk.testing.ranks import free_rendezvous

NAME = "model.layers.0.up.weight"
SHAPE = (8, 4)


def rows(name: str = NAME, shape: tuple[int, ...] = SHAPE, *, size: int = 2, **how: Any) -> Ranks:
    return spread(name, shape, Layout(Mesh(range(size)), [Shard(0)]), size=size, **how)


def columns(name: str = NAME, shape: tuple[int, ...] = SHAPE, *, size: int = 2, **how: Any) -> Ranks:
    return spread(name, shape, Layout(Mesh(range(size)), [Shard(1)]), size=size, **how)


def some(start: int, stop: int, *, shape: tuple[int, int] = SHAPE, **how: Any) -> tuple[Held, ...]:
    return (Held(NAME, shape, Box((start, 0), (stop, shape[1])), **how),)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(4) as made:
        yield made


@frozen(kw_only=True)
class Bad:
    """Two sides that don't fit, and what every rank has to say of that."""

    id: str
    says: tuple[str, ...]
    sources: Ranks = field(factory=rows)
    targets: Ranks = field(factory=columns)
    settings: Settings = field(factory=Settings)
    kind: str = "PlanError"
    violations: int | None = 1


EXTRA = rows("model.rotary.inv_freq", (4,))
OTHER = "lm_head.weight"
BAD = [
    Bad(
        id="shapes disagree",
        targets=columns(shape=(8, 6)),
        says=(NAME, "(8, 4) at the sources", "(8, 6) at the targets"),
    ),
    Bad(
        id="a target tensor that no source has",
        targets=beside(columns(), columns("model.layers.0.upp.weight")),
        says=("model.layers.0.upp.weight", "rollout-0 wants it", f"the nearest name is {NAME}"),
    ),
    Bad(
        id="a target's layer that no source has",
        targets=beside(columns(), columns("model.layers.7.up.weight")),
        says=("model.layers.7.up.weight", "no source has it"),
    ),
    Bad(
        id="rows that no source holds",
        sources=(some(0, 3), some(5, 8)),
        says=(NAME, "no source holds [3:5, 0:2], which rollout-0[0]", "[3:5, 2:4], which rollout-0[1]"),
        violations=2,
    ),
    Bad(
        id="a source tensor that nobody wants",
        sources=beside(rows(), EXTRA),
        says=("model.rotary.inv_freq", "no target wants it", "ignore="),
    ),
    Bad(
        id="an ignore that ignores nothing",
        settings=Settings(ignore=["model.rotary.*"]),
        says=("ignore 'model.rotary.*' matches no tensor",),
    ),
    Bad(
        id="no name matches",
        targets=columns("language_model.up.weight"),
        says=("no name matches", NAME, "language_model.up.weight", "check the prefixes"),
        violations=3,
    ),
    Bad(
        id="unknown sharding",
        targets=(some(0, 4), some(0, 4)),
        says=(NAME, "the ranks of rollout-0 hold 16 of its 32 elements", "incomplete"),
        violations=None,
    ),
    Bad(
        id="cast never",
        targets=columns(stored="bfloat16"),
        settings=Settings(cast="never"),
        says=(NAME, "float32 at the sources, bfloat16 at the targets", "cast='never'"),
    ),
    Bad(
        id="a cast that isn't declared",
        targets=columns(stored="float16"),
        says=(NAME, "float32 → float16", "casts=[('model.layers.*.up.weight', 'float16')]"),
    ),
    Bad(
        id="an integer cast that isn't declared",
        sources=rows(stored="int64"),
        targets=columns(stored="int32"),
        says=(NAME, "int64 → int32", "declare it"),
    ),
    Bad(
        id="a cast to a dtype that isn't one",
        settings=Settings(casts=[("*", "float7")]),
        says=("cast '*' → 'float7'", "no such dtype"),
        violations=None,
    ),
    Bad(
        id="a route that matches nothing",
        settings=Settings(routes=[("*.experts.*", "reshard"), ("*", "reshard")]),
        says=("route '*.experts.*' → 'reshard' matches no tensor",),
    ),
    Bad(
        id="a route that never gets anything",
        settings=Settings(routes=[("*", "reshard"), ("model.*", "reshard")]),
        says=("route 'model.*'", "can never match", "earlier rules"),
    ),
    Bad(
        id="a tensor without a route",
        settings=Settings(routes=[("lm_head.*", "reshard")]),
        says=(NAME, "no route matches it", "end the routes with"),
        violations=2,
    ),
    Bad(
        id="a transport that isn't there",
        settings=Settings(routes=[("*", "telepathy")]),
        kind="PluginError",
        says=("there is no transport named 'telepathy'", "reshard"),
        violations=None,
    ),
    Bad(
        id="a granule cut through",
        sources=rows(granule=(1, 4)),
        targets=columns(granule=(1, 2)),
        says=("model.layers.{}.up.weight", "isn't on the granule (1, 4)"),
        violations=None,
    ),
    Bad(
        id="a granule larger than a window",
        sources=rows(granule=(4, 4)),
        targets=rows(granule=(4, 4)),
        settings=Settings(window_bytes=16),
        says=("one granule (1, 4, 4)", "larger than a window of 16 bytes", "window_bytes="),
    ),
    Bad(
        id="one element in two dtypes on a rank",
        targets=(some(0, 8), (*some(0, 8), *some(0, 8, stored="bfloat16"))),
        says=(NAME.replace("0", "{}"), "rollout-0[1] has it in several dtypes", "float32", "bfloat16"),
    ),
    Bad(
        id="sources that disagree on a shape",
        sources=(some(0, 4), some(4, 6, shape=(6, 4))),
        says=(NAME, "(8, 4)"),
        violations=None,
    ),
    Bad(
        id="all that is wrong in one error",
        sources=beside(rows(), EXTRA, rows("a.weight")),
        targets=beside(columns(), columns("b.weight"), columns("a.weight", (8, 6))),
        settings=Settings(ignore=["nothing.*"]),
        says=("inv_freq", "b.weight", "a.weight: the shapes disagree", "nothing.*", "the plan has 4 violations"),
        violations=4,
    ),
]  # fmt: skip


def errors(said: list[Said]) -> list[tuple[str, str]]:
    """What went wrong, once all views are found as they were."""
    assert [each.faults for each in said] == [()] * len(said)
    return [(each.kind, each.text) for each in said]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_sides_that_do_not_fit_say_so_on_every_rank(ranks: Crew, bad: Bad) -> None:
    where = free_rendezvous()
    everybody = [*seats("source", bad.sources, settings=bad.settings), *seats("target", bad.targets)]
    said = ranks.results([(join, (seat, where)) for seat in everybody])
    assert len(set(errors(said))) == 1, "all say the same"
    kind, text = said[0].kind, said[0].text
    assert kind == bad.kind
    assert [part for part in bad.says if part not in text] == [], text
    if bad.violations is not None:
        assert len(said[0].details) == bad.violations, text
    if kind == "PlanError":
        assert "nothing was moved" in text


def test_what_is_ignored_is_fine(ranks: Crew) -> None:
    where, settings = free_rendezvous(), Settings(ignore=["*.inv_freq"])
    found = pushing(ranks, where, beside(rows(), EXTRA), columns(), [Push(version=1)], settings=settings)
    assert [said.kind for each in found for said in each] == [""] * 4


def pushing(
    ranks: Crew, where: str, sources: Ranks, targets: Ranks, *pushes: list[Push],
    dtypes: dict[str, str] | None = None, rebind: dict[int, Ranks] | None = None, settings: Settings | None = None,
) -> list[list[Said]]:  # fmt: skip
    """Sources push what `pushes` says (for all, or for each); what every rank said of each push."""
    given = pushes if len(pushes) > 1 else [pushes[0]] * len(sources)
    jobs: list[Job] = [
        (gives, (seat, where, given[rank]))
        for rank, seat in enumerate(seats("source", sources, settings=settings or Settings()))
    ]
    for rank, seat in enumerate(seats("target", targets)):
        changes = {number: held[rank] for number, held in (rebind or {}).items()}
        jobs.append((takes, (seat, where, dtypes or {}, changes, len(given[0]))))
    with ranks.at_work(jobs) as working:
        for _ in given[0]:
            meet(working, "next")
        meet(working, "last")
        return [rank.result() for rank in working]


def test_a_finite_value_that_overflows_fails_the_push(ranks: Crew) -> None:
    where = free_rendezvous()
    plain, huge = Push(version=1), Push(version=1, number=(0, 3.4028e38))
    again = Push(version=2)
    found = pushing(
        ranks, where, rows(), columns(stored="bfloat16"), [plain, huge_of(2, huge), Push(version=3)],
        [plain, again, Push(version=3)], dtypes={NAME: "float32"},
    )  # fmt: skip
    for each in found:
        assert [said.kind for said in each] == ["", "PushError", ""], each
        assert f"{NAME}: a finite value of float32 became infinite as bfloat16" in each[1].text
        assert "source[0]" in each[1].text
        assert "keep it wider" in each[1].text
    written = any(each[1].faults for each in found[2:])  # by the other source, before it heard of this
    for each in found[2:]:
        assert each[0].faults == each[2].faults == ()
        assert each[1].engines["rollout-0"] == ("torn" if written else "untouched")


def huge_of(version: int, push: Push) -> Push:
    return Push(version=version, number=push.number)


def test_infinities_and_nans_are_passed_on(ranks: Crew) -> None:
    odd = [Push(version=1, number=(0, float("inf"))), Push(version=2, number=(0, float("nan")))]
    found = pushing(ranks, free_rendezvous(), rows(), columns(stored="bfloat16"), odd, dtypes={NAME: "float32"})
    assert [said.kind for each in found for said in each] == [""] * 8
    assert any("at (0, 0)" in fault for said in found[2] for fault in said.faults), "the judge sees the odd value"


def test_a_source_rebound_to_another_shape_and_back(ranks: Crew) -> None:
    where = free_rendezvous()
    wide = rows(shape=(8, 5))
    pushes = [
        [
            Push(version=1),
            Push(version=2, held=wide[r]),
            Push(version=3, held=rows()[r]),
            Push(version=4, held=rows()[r]),
        ]
        for r in range(2)
    ]
    found = pushing(ranks, where, rows(), columns(), *pushes)
    for each in found:
        assert [said.kind for said in each] == ["", "PlanError", "", ""], each
        assert "(8, 5) at the sources and (8, 4) at the targets" in each[1].text
        assert [said.faults for said in each] == [()] * 4


def test_a_source_rebound_to_other_rows(ranks: Crew) -> None:
    pushes = [[Push(version=1), Push(version=2, held=held), Push(version=3)] for held in (some(0, 3), some(3, 8))]
    found = pushing(ranks, free_rendezvous(), rows(), columns(), *pushes)
    assert [(said.kind, said.faults) for each in found for said in each] == [("", ())] * 12


def test_a_target_rebound_to_other_storage_other_rows_and_another_shape(ranks: Crew) -> None:
    changes = {1: columns(), 2: rows(), 3: columns(shape=(8, 6)), 4: columns()}
    pushes = [Push(version=version) for version in range(1, 6)]
    found = pushing(ranks, free_rendezvous(), rows(), columns(), pushes, rebind=changes)
    for each in found:
        assert [said.kind for said in each] == ["", "", "", "PlanError", ""], each
        assert [said.faults for said in each] == [()] * 5
        assert "(8, 4) at the sources and (8, 6) at the targets" in each[3].text


def test_a_target_rebound_during_a_push_is_torn(ranks: Crew) -> None:
    where = free_rendezvous()
    source, target = (seats(side, columns(size=1))[0] for side in ("source", "target"))  # type: ignore[arg-type]
    jobs: list[Job] = [(gives, (source, where, [Push(version=1), Push(version=2)])), (takes_rebinding, (target, where))]
    with ranks.at_work(jobs) as working:
        for _ in range(2):
            meet(working[:1], "next")
        meet(working[:1], "last")
        pushed, (first, second) = [rank.result() for rank in working]
    assert [said.kind for said in pushed] == ["PushError", ""]
    assert pushed[0].engines == first[1] == {"rollout-0": "torn"}
    assert "rollout-0[0]" in first[0]
    assert "rebound or reshaped during the push" in first[0]
    assert second == ("", ())


def test_untied_tensors_that_a_target_ties_must_be_equal(ranks: Crew) -> None:
    equal = beside(rows(), rows(OTHER, values=NAME))
    unequal = beside(rows(), rows(OTHER))
    targets = columns(aliases=(OTHER,))
    pushes = [[Push(version=1), Push(version=2, held=unequal[r]), Push(version=2, held=equal[r])] for r in range(2)]
    found = pushing(ranks, free_rendezvous(), equal, targets, *pushes)
    for each in found:
        assert [said.kind for said in each] == ["", "PlanError", ""], each
        assert [said.faults for said in each] == [()] * 3
        assert NAME in each[1].text
        assert OTHER in each[1].text
        assert "different values" in each[1].text
        assert "tie them in training" in each[1].text


def test_untied_tensors_unequal_by_one_element(ranks: Crew) -> None:
    equal = beside(rows(), rows(OTHER, values=NAME))
    one = [[Push(version=1), Push(version=2, number=(1, 0.5))], [Push(version=1), Push(version=2)]]
    found = pushing(ranks, free_rendezvous(), equal, columns(aliases=(OTHER,)), *one)
    assert [[said.kind for said in each] for each in found] == [["", "PlanError"]] * 4
    assert [said.faults for each in found for said in each] == [()] * 8


def test_untied_tensors_on_two_source_ranks_must_be_equal(ranks: Crew) -> None:
    def apart(values: str) -> Ranks:
        whole = Box.whole(SHAPE)
        return (Held(NAME, SHAPE, whole),), (Held(OTHER, SHAPE, whole, values=values),)

    equal, unequal = apart(NAME), apart(OTHER)
    pushes = [[Push(version=1), Push(version=2, held=unequal[r]), Push(version=2, held=equal[r])] for r in range(2)]
    found = pushing(ranks, free_rendezvous(), equal, columns(aliases=(OTHER,)), *pushes)
    for each in found:
        assert [said.kind for said in each] == ["", "PlanError", ""], each
        assert [said.faults for said in each] == [()] * 3
        assert f"{OTHER} and {NAME} are one tensor" in each[1].text or f"{NAME} and {OTHER} are one" in each[1].text
        assert "nothing was moved" in each[1].text


@pytest.mark.parametrize("version", [5, 4])
def test_versions_only_go_up(ranks: Crew, version: int) -> None:
    where = free_rendezvous()
    pushes = [Push(version=5), Push(version=version), Push(version=6)]
    found = pushing_freely(ranks, where, pushes, pushes)
    for each in found:
        assert [said.kind for said in each] == ["", "PushError", ""]
        assert f"version {version} isn't above 5, which is published" in each[1].text
        assert each[1].engines == {"rollout-0": "untouched"}


def test_sources_that_push_different_versions(ranks: Crew) -> None:
    where = free_rendezvous()
    found = pushing_freely(ranks, where, [Push(version=7), Push(version=9)], [Push(version=8), Push(version=9)])
    for each in found:
        assert [said.kind for said in each] == ["PushError", ""]
        assert "source[0] pushes 7, source[1] pushes 8" in each[0].text


def pushing_freely(ranks: Crew, where: str, *pushes: list[Push]) -> list[list[Said]]:
    """Pushes that fail before a target has come, perhaps: it takes what succeeds. What the sources said."""
    jobs: list[Job] = [(gives, (seat, where, pushes[rank])) for rank, seat in enumerate(seats("source", rows()))]
    jobs += [(takes_all, (seat, where)) for seat in seats("target", columns())]
    with ranks.at_work(jobs) as working:
        for _ in pushes[0]:
            meet(working[:2], "next")
        meet(working[:2], "last")
        found = [rank.result() for rank in working]
    good = [push.version for push, said in zip(pushes[0], found[0], strict=True) if not said.kind]
    assert found[2] == found[3] == [(version, ()) for version in good]
    return found[:2]


def takes_all(_: Any, seat: Seat, where: str) -> list[tuple[int, tuple[str, ...]]]:
    """Every version that came, and what was wrong with it. A failed push must have left everything as it was."""
    from refit_sdk.errors import PushError, SessionClosed

    model, found = Model(seat.held), []
    with seat.join(model, where) as session:
        while True:
            model.poison()
            try:
                version = session.receive().version
                found.append((version, tuple(model.faults(version=version))))
            except PushError:
                assert model.untouched() == []
            except SessionClosed:
                return found


def test_a_session_that_pushes_is_busy(ranks: Crew) -> None:
    where = free_rendezvous()
    source, target = (seats(side, columns(size=1))[0] for side in ("source", "target"))  # type: ignore[arg-type]
    with ranks.at_work([(busy, (source, where)), (takes_late, (target, where))]) as working:
        working[1].expect("joined")
        meet(working[:1], "refused")
        working[1].go("joined")
        texts, version = working[0].result()
        assert working[1].result() == (5, [])
    assert version == 5
    assert len(texts) == 4
    assert all("RefitError: this session is busy" in text for text in texts), texts


@frozen(kw_only=True)
class Joining:
    """Ranks that can't all join; what the one that is refused has to say, and what the others miss.

    They are told of the refusal, too, if the rendezvous could speak with the one that it refused.
    """

    id: str
    seats: list[Seat]
    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    told: bool = True


def lone(side: Any, *, rank: int = 0, size: int = 1, **more: Any) -> Seat:
    """A rank of two sides that would fit."""
    options = {"deadline": 1.5, **more.pop("options", {})}
    held = (rows if side == "source" else columns)(size=size)[min(rank, size - 1)]
    return Seat(side=side, held=held, rank=rank, size=size, options=options, **more)


JOINING = [
    Joining(
        id="a source is missing",
        seats=[lone("source", size=3), lone("source", rank=1, size=3), lone("target")],
        missing=("source[2] didn't join in 1.5 s",),
    ),
    Joining(
        id="a rank of an engine is missing",
        seats=[lone("source"), lone("target", rank=1, size=2)],
        missing=("rollout-0[0] didn't join in 1.5 s",),
    ),
    Joining(
        id="an engine is missing",
        seats=[lone("source", options={"engines": ["rollout-0", "rollout-1"]}), lone("target")],
        missing=("any rank of rollout-1 didn't join in 1.5 s",),
    ),
    Joining(
        id="one of two engines is missing",
        seats=[lone("source", options={"engines": 2}), lone("target")],
        missing=("any rank of one more engine didn't join in 1.5 s",),
    ),
    Joining(
        id="a source twice",
        seats=[lone("source", size=2), lone("source", rank=1, size=2), lone("source", rank=1, size=2)],
        refused=("source[1] is taken, by process", "a rank of its own"),
        missing=("any rank of one more engine didn't join",),
    ),
    Joining(
        id="a rank of an engine twice",
        seats=[lone("source"), lone("target", size=2), lone("target", size=2)],
        refused=("rollout-0[0] is taken, by process",),
        missing=("rollout-0[1] didn't join",),
    ),
    Joining(
        id="sources that disagree on their number",
        seats=[lone("source", size=2), lone("source", rank=1, size=3)],
        refused=("source ranks, the others", "give all one size"),
        missing=("source[", "didn't join"),
    ),
    Joining(
        id="ranks that disagree on the engine's size",
        seats=[lone("source"), lone("target", size=2), lone("target", rank=1, size=3)],
        refused=("says its engine has", "ranks, the others say"),
        missing=("rollout-0[", "didn't join"),
    ),
    Joining(
        id="a rank beyond the size",
        seats=[lone("source", size=2), lone("source", rank=2, size=2)],
        refused=("source[2] can't be: its size is 2, ranks are 0 to 1",),
        missing=("source[1]", "didn't join"),
    ),
    Joining(
        id="an engine that isn't waited for",
        seats=[lone("source", options={"engines": ["rollout-1"]}), lone("target")],
        refused=("rollout-0[0] is not of an engine that is waited for (rollout-1)", "see the name, or admit it"),
        missing=("any rank of rollout-1 didn't join",),
    ),
    Joining(
        id="sources that disagree on the engines",
        seats=[lone("source", size=2), lone("source", rank=1, size=2, options={"engines": 2})],
        refused=("source[1] waits for engines=2, the rendezvous for 1", "give all the same"),
        missing=("source[1]", "didn't join"),
    ),
    Joining(
        id="sources that disagree on settings",
        seats=[lone("source", size=2), lone("source", rank=1, size=2, options={"window_bytes": 1024})],
        refused=("settings differ", "source[0] has", '"window_bytes":1024', '"window_bytes":67108864'),
        missing=("source[", "didn't join"),
    ),
    Joining(
        id="a target that states other settings",
        seats=[lone("source"), lone("target", options={"settings": Settings(cast="never")})],
        refused=("settings differ", '"cast":"never"', '"cast":"allowed"'),
        missing=("didn't join",),
    ),
    Joining(
        id="fabrics that differ",
        seats=[lone("source"), lone("target", options={"fabric": "gloo"})],
        refused=("fabrics differ", "source[0] has 'mixed'", "rollout-0[0] has 'gloo'", "give all the same fabric="),
        missing=("didn't join",),
    ),
    Joining(
        id="another release",
        seats=[lone("source"), lone("target", sdk="9.9.9")],
        refused=("refit_sdk is 9.9.9 here and", "at the rendezvous: install the same"),
        missing=("didn't join",),
    ),
    Joining(
        id="another release of a transport",
        seats=[lone("source"), lone("target", plugins={"reshard": "somebody's 7.0"})],
        refused=("plug-ins differ", "reshard of somebody's 7.0", "install the same"),
        missing=("didn't join",),
    ),
    Joining(
        id="another token",
        seats=[lone("source", options={"token": "one"}), lone("target", options={"token": "two"})],
        refused=("the token here is not the token there", "set the same one on every rank"),
        missing=("any rank of one more engine didn't join",),
        told=False,
    ),
    Joining(
        id="no token where there is one",
        seats=[lone("source", options={"token": "one"}), lone("target")],
        refused=("the token here is not the token there",),
        missing=("any rank of one more engine didn't join",),
        told=False,
    ),
]  # fmt: skip


@pytest.mark.parametrize("wrong", JOINING, ids=lambda wrong: wrong.id)
def test_joining_that_fails_names_who_and_why(ranks: Crew, wrong: Joining) -> None:
    where = free_rendezvous()
    said = ranks.results([(join, (seat, where)) for seat in wrong.seats])
    assert {kind for kind, _ in errors(said)} == {"RendezvousError"}, said
    texts = [each.text for each in said]
    refused = [text for text in texts if wrong.refused and all(part in text for part in wrong.refused)]
    others = [text for text in texts if text not in refused]
    assert [text for text in others if not all(part in text for part in wrong.missing)] == []
    if wrong.refused:
        assert len(refused) == (len(texts) if wrong.told else 1), texts
    else:
        assert len(set(texts)) == 1, "all say the same"


def test_a_target_may_state_the_sources_settings(ranks: Crew) -> None:
    where, stated = free_rendezvous(), {"options": {"settings": Settings(window_bytes=512)}}
    said = ranks.results([(join, (lone("source", **stated), where)), (join, (lone("target", **stated), where))])
    assert errors(said) == [("", "")] * 2


def raised(kind: type[RefitError], side: str, where: str | None, **options: Any) -> str:
    """The text of the error that joining with a good model raises, here."""
    model = options.pop("model", None) or Model(columns(size=1)[0])
    given: dict[str, Any] = {"rank": 0, "size": 1, "deadline": 1.0, **options, "rendezvous": where}
    verb = RefitSession.source if side == "source" else RefitSession.target
    given |= {} if side == "source" else {"engine": options.get("engine", "rollout-0")}
    with pytest.raises(kind) as caught:
        verb(model, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    "where", ["here", "tcp://127.0.0.1", "http://127.0.0.1:80", "tcp://:29600", "tcp://127.0.0.1:x", "tcp://a:1/path"]
)
def test_a_rendezvous_that_is_no_address(where: str) -> None:
    text = raised(RendezvousError, "target", where)
    assert f"rendezvous={where!r} is not an address" in text
    assert "tcp://10.0.0.1:29600" in text


def test_no_rendezvous_rank_or_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("REFIT_RENDEZVOUS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert "set REFIT_RENDEZVOUS" in raised(RendezvousError, "source", None)
    assert "RANK=None" in raised(RendezvousError, "source", free_rendezvous(), rank=None)
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE='two'" in raised(RendezvousError, "source", free_rendezvous(), size=None)


def test_nobody_listens() -> None:
    where = free_rendezvous()
    text = raised(RendezvousError, "target", where)
    assert f"nobody answers at {where} after 1 s" in text
    assert "start source rank 0 or the controller there" in text


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network beyond this host."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.usefixtures("cut_off")
def test_an_address_that_is_not_of_this_host() -> None:
    text = raised(RendezvousError, "source", "tcp://240.0.0.1:29600", token="secret")
    assert "nobody answers at tcp://240.0.0.1:29600 after 1 s" in text


def test_a_host_that_has_no_address() -> None:
    for side in ("source", "target"):
        text = raised(RendezvousError, side, "tcp://no-such-host.invalid:29600", token="secret")
        assert "tcp://no-such-host.invalid:29600" in text


@contextlib.contextmanager
def service(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    kept.append(sock)
                    answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in kept:
                sock.close()


def silent(_: socket.socket) -> None:
    """Says nothing, and keeps the connection."""


def web_server(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    sock.close()


def hangs_up(sock: socket.socket) -> None:
    sock.close()


@pytest.mark.parametrize("answer", [silent, web_server, hangs_up])
@pytest.mark.parametrize("side", ["source", "target"])
def test_another_service_listens(side: str, answer: Callable[[socket.socket], None]) -> None:
    with service(answer) as where:
        text = raised(RendezvousError, side, where)
    assert where in text
    assert "doesn't speak refit's protocol" in text or "the other end said nothing for" in text


def test_another_session_listens(ranks: Crew) -> None:
    where = free_rendezvous()
    source, target = (seats(side, columns(size=1))[0] for side in ("source", "target"))  # type: ignore[arg-type]
    with ranks.at_work([(gives, (source, where, [])), (takes, (target, where, {}, {}, 0))]) as working:
        for rank in working:
            rank.expect("last")
        assert "source[0] is taken, by process" in raised(RendezvousError, "source", where)
        assert "rollout-0[0] is taken, by process" in raised(RendezvousError, "target", where)
        assert "is not of an engine that is waited for" in raised(RendezvousError, "target", where, engine="other")
        for rank in working:
            rank.go("last")
        assert [rank.result() for rank in working] == [[], []]


def test_a_controller_cannot_have_a_taken_address() -> None:
    with RefitController(rendezvous="tcp://127.0.0.1:0") as first, pytest.raises(RendezvousError) as caught:
        RefitController(rendezvous=first.rendezvous)
    assert f"can't listen at {first.rendezvous}" in str(caught.value)
    assert "is another there?" in str(caught.value)


def test_elsewhere_a_token_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("REFIT_TOKEN", "REFIT_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    for side in ("source", "target"):
        text = raised(RendezvousError, side, "tcp://240.0.0.1:29600")
        assert "tcp://240.0.0.1:29600 can be reached from other hosts and no token was given" in text
        assert "pass token=, set REFIT_TOKEN" in text
        assert "insecure=True" in text
    monkeypatch.setenv("REFIT_TOKEN_FILE", str(tmp_path / "none"))
    assert "REFIT_TOKEN_FILE" in raised(RendezvousError, "target", "tcp://240.0.0.1:29600")


@pytest.mark.usefixtures("cut_off")
def test_insecure_warns() -> None:
    with pytest.warns(UserWarning, match=r"tcp://240\.0\.0\.1:29600 is open: insecure=True lets anybody"):
        raised(RendezvousError, "target", "tcp://240.0.0.1:29600", insecure=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapter": "megatronn"}, ("there is no target adapter named 'megatronn'", "fragments")),
        ({"fabric": "smoke"}, ("there is no fabric named 'smoke'", "gloo")),
        ({"model": object()}, ("object", "pass adapter=", "fragments")),
    ],
    ids=["adapter", "fabric", "an object that no adapter knows"],
)
def test_names_of_no_plugin(options: dict[str, Any], says: tuple[str, ...]) -> None:
    text = raised(PluginError, "target", free_rendezvous(), **options)
    assert [part for part in says if part not in text] == [], text


def test_settings_given_twice() -> None:
    text = raised(RefitError, "source", free_rendezvous(), settings=Settings(), cast="never")
    assert "settings= and cast= were both given" in text
