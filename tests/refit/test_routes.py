"""Three routes in one push, between real processes: over every fabric, bit for bit what each gives alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from refit_backends.gloo import GlooFabric
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric

from refit_sdk.box import Box
from refit_sdk.errors import SessionClosed
from refit_sdk.session import RefitSession
from refit_sdk.testing.crew import Crew, crew
from refit_sdk.testing.models import Held, Model
from refit_sdk.testing.ranks import Rank, free_rendezvous

FABRICS: dict[str, Callable[[int], Any]] = {
    "gloo": lambda process: "gloo",
    "tcp": lambda process: "tcp",
    "shm": lambda process: "shm",
    "two copies": lambda process: ShmFabric(one_copy=False),
    "two hosts": lambda process: MixedFabric(shm=ShmFabric(host=f"h{process % 2}")),
    "two hosts by gloo": lambda process: MixedFabric(far=GlooFabric(), shm=ShmFabric(host=f"h{process % 2}")),
}
"""Made by process, as hosts are stated by it. `two hosts` has shared memory and TCP in one group."""

SOURCES, TARGETS = 2, 3
EXPERTS, DENSE, NORM = (96, 40), (60, 16), (24,)
HYBRID = (("*.experts.*", "fanout"), ("*norm", "broadcast"), ("*", "reshard"))
ALONE = tuple((("*", name),) for name in ("fanout", "broadcast", "reshard", "auto"))
Routes = tuple[tuple[str, str], ...]


def sources(rank: int) -> list[Held]:
    """Rows of everything but the norm, which both hold."""
    held = [Held("layers.0.norm", NORM, Box.whole(NORM))]
    for name, shape in (("layers.0.experts.0.w", EXPERTS), ("layers.0.experts.1.w", EXPERTS), ("layers.0.q", DENSE)):
        half = shape[0] // SOURCES
        held.append(Held(name, shape, Box.whole(shape).narrow(0, rank * half, (rank + 1) * half)))
    return held


def targets(rank: int) -> list[Held]:
    """All of the experts and of the norm, once in bfloat16, and columns of what is dense."""
    columns = Box.whole(DENSE).narrow(1, 4 * rank, 4 * rank + 8)
    experts = [
        Held(f"layers.0.experts.{i}.w", EXPERTS, Box.whole(EXPERTS), ("float32", "bfloat16")[i]) for i in range(2)
    ]
    return [*experts, Held("layers.0.norm", NORM, Box.whole(NORM)), Held("layers.0.q", DENSE, columns)]


def pushes(_: Rank, where: str, rank: int, fabric: str, routes: Routes, count: int) -> dict[str, str]:
    """A source; what carries its links in the end."""
    model = Model(sources(rank), within="bfloat16")
    given = {"rendezvous": where, "rank": rank, "size": SOURCES, "deadline": 30, "fabric": FABRICS[fabric](rank)}
    with RefitSession.source(model, routes=routes, window_bytes=4096, **given) as session:
        for version in range(1, count + 1):
            model.fill(version=version)
            session.push(version=version)
        return {f"{src}-{dst}": by for (src, dst), by in session.links.items()}


def receives(_: Rank, where: str, rank: int, fabric: str) -> int:
    """A target that judges every push; how many there were."""
    model, found = Model(targets(rank), within="bfloat16"), 0
    made = FABRICS[fabric](SOURCES + rank)
    common = {"rendezvous": where, "rank": rank, "size": TARGETS, "deadline": 30, "fabric": made}
    with RefitSession.target(model, engine="e", **common) as session:
        try:
            while True:
                model.poison()
                version = session.receive().version
                assert model.faults(version=version, source="float32") == []
                found += 1
        except SessionClosed:
            return found


def run(ranks: Crew, fabric: str, routes: Routes, count: int) -> list[dict[str, str]]:
    where = free_rendezvous()
    jobs = [(pushes, (where, rank, fabric, routes, count)) for rank in range(SOURCES)]
    told = ranks.results([*jobs, *((receives, (where, rank, fabric)) for rank in range(TARGETS))])
    assert told[SOURCES:] == [count] * TARGETS
    return told[:SOURCES]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(SOURCES + TARGETS) as made:
        yield made


@pytest.mark.parametrize("fabric", FABRICS)
def test_three_routes_in_one_push(ranks: Crew, fabric: str) -> None:
    run(ranks, fabric, HYBRID, 2)


@pytest.mark.parametrize("routes", ALONE, ids=lambda routes: routes[0][1])
def test_each_route_alone(ranks: Crew, routes: Routes) -> None:
    run(ranks, "two hosts", routes, 2)


def test_two_routes_over_two_fabrics_many_times(ranks: Crew) -> None:
    told = run(ranks, "two hosts", (("*.experts.*", "fanout"), ("*", "reshard")), 100)
    served = set().union(*(set(links.values()) for links in told))
    assert "tcp" in served
    assert any(by.startswith("shm") for by in served)
