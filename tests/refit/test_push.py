"""Pushes between real processes over gloo, judged bit by bit."""

from __future__ import annotations

import warnings

from refit_sdk import joining
from refit_sdk.box import Box
from refit_sdk.errors import SessionClosed
from refit_sdk.report import PushReport
from refit_sdk.session import RefitSession
from refit_sdk.testing.models import Held, Model
from refit_sdk.testing.ranks import Rank, free_rendezvous, running


def source(
    rank: Rank, rendezvous: str, held: list[Held], number: int, size: int, versions: list[int]
) -> list[PushReport]:
    model = Model(held, within="bfloat16")
    reports = []
    with RefitSession.source(model, rendezvous=rendezvous, rank=number, size=size, deadline=30) as session:
        for version in versions:
            model.fill(version=version)
            report = session.push(version=version)
            assert isinstance(report, PushReport)
            reports.append(report)
    return reports


def target(rank: Rank, rendezvous: str, held: list[Held], number: int, size: int, dtype: str) -> list[int]:
    model = Model(held)
    before = model.addresses()
    versions = []
    with RefitSession.target(model, rendezvous=rendezvous, engine="rollout-0", rank=number, size=size) as session:
        try:
            while True:
                report = session.receive()
                assert model.faults(version=report.version, source=dtype) == []
                assert model.addresses() == before
                versions.append(report.version)
        except SessionClosed:
            return versions


def test_rows_to_columns_with_a_cast() -> None:
    where = free_rendezvous()
    name, shape = "model.layers.0.w", (12, 8)
    rows = [Held(name, shape, Box((4 * r, 0), (4 * r + 4, 8))) for r in range(3)]
    columns = [Held(name, shape, Box((0, 4 * c), (12, 4 * c + 4)), "bfloat16") for c in range(2)]
    bodies = [(source, (where, [row], r, 3, [37, 38, 40])) for r, row in enumerate(rows)]
    bodies += [(target, (where, [column], c, 2, "float32")) for c, column in enumerate(columns)]
    with running(bodies) as ranks:
        reports = [rank.result() for rank in ranks[:3]]
        assert [rank.result() for rank in ranks[3:]] == [[37, 38, 40]] * 2
    last = reports[0][-1]
    assert last.bytes_sent == last.bytes_arrived == 12 * 8 * 2
    assert last.engines["rollout-0"].state == "complete"


def planless(rank: Rank, rendezvous: str, held: list[Held]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    joining.make_plan = fail  # type: ignore[assignment]
    with RefitSession.source(Model(held), rendezvous=rendezvous, rank=0, size=1, deadline=30):
        pass


def test_a_fault_of_ours_on_one_rank_is_told_to_all_at_once() -> None:
    where = free_rendezvous()
    held = [Held("w", (4,), Box((0,), (4,)))]
    with running([(planless, (where, held)), (target, (where, held, 0, 1, "float32"))]) as (first, second):
        assert first.failure(timeout=20).kind == "ZeroDivisionError"
        told = second.failure(timeout=20)
    assert "source[0]: " in told.text
    assert "ZeroDivisionError: a fault of ours" in told.text


def watched(rank: Rank, rendezvous: str, held: list[Held]) -> list[int]:
    class Watcher:
        name = "watcher"

        def pushed(self, report: PushReport) -> None:
            seen.append(report.version)
            if report.version == 2:
                raise ValueError("an observer's own fault")

    seen: list[int] = []
    model = Model(held)
    with RefitSession.source(model, rendezvous=rendezvous, rank=0, size=1, deadline=30) as session:
        session._participant._observers = [Watcher()]
        for version in (1, 2, 3):
            model.fill(version=version)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                session.push(version=version)
            assert bool(told) == (version == 2)
    return seen


def test_an_observer_hears_of_every_push_and_cannot_fail_one() -> None:
    where = free_rendezvous()
    held = [Held("w", (4,), Box((0,), (4,)))]
    with running([(watched, (where, held)), (target, (where, held, 0, 1, "float32"))]) as (first, second):
        assert first.result() == [1, 2, 3]
        assert second.result() == [1, 2, 3]
