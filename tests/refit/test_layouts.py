"""Every kind of odd layout between sessions of real processes: two pushes each, bit-exact, nothing else written.

Over the other fabrics, and for other transports, the conformance kit has the same cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from refit_sdk.dtypes import ITEMSIZE
from refit_sdk.report import PushReport
from refit_sdk.session import RefitSession
from refit_sdk.testing.cases import Case, needed
from refit_sdk.testing.crew import Crew, Job, crew
from refit_sdk.testing.judge import VALUES
from refit_sdk.testing.layouts import odd_ones
from refit_sdk.testing.models import Model
from refit_sdk.testing.ranks import Rank, free_rendezvous

VERSIONS = (3, 4)
SIZE = 7
"""Processes of the largest case."""


def take_part(_: Rank, case: Case, process: int, where: str) -> list[PushReport]:
    """One process of a case: every push judged, sources and targets."""
    source_rank, seat = case.processes[process]
    source = Model(case.sources[source_rank]) if source_rank is not None else None
    target = Model(case.engines[seat[0]][seat[1]]) if seat is not None else None
    models = [model for model in (source, target) if model is not None]
    before = [model.addresses() for model in models]
    reports = []
    with _session(case, process, where, source, target) as session:
        assert target is None or target.untouched() == []
        for version in VERSIONS:
            if source is not None:
                source.fill(version=version)
            if target is not None:
                target.poison()
            reports.append(_push(session, case.processes[process], version))
            assert source is None or source.faults(version=version) == []
            assert target is None or target.faults(version=version, source=case.dtypes) == []
    assert [model.addresses() for model in models] == before
    return reports


def _push(session: RefitSession, seats: tuple[int | None, tuple[str, int] | None], version: int) -> PushReport:
    if seats[0] is None:
        return session.receive()
    report = session.push(version=version) if seats[1] is None else session.sync(version=version)
    assert isinstance(report, PushReport)
    return report


def _session(case: Case, process: int, where: str, source: Model | None, target: Model | None) -> RefitSession:
    rank, seat = case.processes[process]
    common: dict[str, Any] = {"rendezvous": where, "deadline": 20}
    engines = sorted(case.engines)
    if source is None:
        assert seat is not None
        size = len(case.engines[seat[0]])
        return RefitSession.target(target, engine=seat[0], rank=seat[1], size=size, **common)
    common |= {"rank": rank, "size": len(case.sources), "engines": engines, "settings": case.settings}
    if seat is None:
        return RefitSession.source(source, **common)
    of_engine: dict[str, Any] = {"engine": seat[0], "engine_rank": seat[1], "engine_size": len(case.engines[seat[0]])}
    return RefitSession.colocated(source=source, target=target, **of_engine, **common)


CASES = odd_ones()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SIZE) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bit_exact_twice(ranks: Crew, case: Case) -> None:
    where = free_rendezvous()
    jobs: list[Job] = [(take_part, (case, process, where)) for process in range(len(case.processes))]
    reports = ranks.results(jobs)
    source = case.processes.index(next(seats for seats in case.processes if seats[0] is not None))
    for version, report in zip(VERSIONS, reports[source], strict=True):
        assert report.version == version
        assert report.bytes_sent == report.bytes_arrived == needed(case)
        assert {engine: told.state for engine, told in report.engines.items()} == dict.fromkeys(
            case.engines, "complete"
        )
        assert report.windows >= case.windows
    assert all(report.version in VERSIONS for each in reports for report in each)


def test_the_cases_have_every_kind() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert {name for case in CASES for name in case.dtypes.values()} == ITEMSIZE.keys() & VALUES.keys()
    assert max(len(case.processes) for case in CASES) == SIZE
