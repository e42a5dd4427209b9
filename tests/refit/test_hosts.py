"""Sessions over shared memory and over several hosts (stated, on one machine): links, losses, refusals."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from attrs import evolve
from nodes import Cast, Place, Told, cast, columns, rows, whole
from truths import silent, unfenced, unnamed, untruths

from refit_sdk.errors import RefitError
from refit_sdk.session import RefitSession
from refit_sdk.testing.models import Model
from refit_sdk.testing.ranks import Rank, free_rendezvous, running

DEADLINE, HEARTBEAT, MARGIN = 4.0, 3.0, 20.0
HOSTS = {"source[0]": "x", "source[1]": "y", "a[0]": "x", "a[1]": "y", "b[0]": "x"}


def places(fabric: str, hosts: dict[str, str]) -> list[Place]:
    """Two sources, the engine `a` of two ranks, the engine `b` of one; the fabric is on these hosts."""
    where = free_rendezvous()
    made = [Place(where=where, rank=r, size=2, held=rows(r, 2), engines=("a", "b")) for r in range(2)]
    made += [Place(where=where, engine="a", rank=r, size=2, held=columns(r, 2)) for r in range(2)]
    made += [Place(where=where, engine="b", rank=0, size=1, held=whole())]
    common: dict[str, Any] = {"fabric": fabric, "deadline": DEADLINE, "heartbeat": HEARTBEAT}
    return [evolve(place, host=hosts.get(str(place), ""), **common) for place in made]


def linked(crew: Cast) -> dict[tuple[str, str], str]:
    """What serves each link, as both of its ends say."""
    found: dict[tuple[str, str], str] = {}
    for name in crew.ranks:
        for src, dst, by in crew.ask(name, "links").value:
            assert found.setdefault((src, dst), by) == by, "the ends of a link disagree"
    return found


PAIRS = [(source, target) for source in ("source[0]", "source[1]") for target in ("a[0]", "a[1]", "b[0]")]


@pytest.mark.parametrize("fabric", ["gloo", "tcp", "shm", "two copies", "mixed"])
def test_links_say_what_serves_them(fabric: str) -> None:
    expected = {"gloo": {"staged"}, "tcp": {"tcp"}, "two copies": {"shm"}}.get(fabric, {"shm (one copy)", "shm"})
    with cast(places(fabric, {})) as crew:
        found = linked(crew)
        assert sorted(found) == sorted(PAIRS)
        assert set(found.values()) <= expected or fabric == "gloo"
        assert {told.content for name, told in crew.push(1).items() if "source" not in name} == {"1"}


def test_two_hosts_have_shared_memory_inside_and_tcp_between() -> None:
    with cast(places("mixed", HOSTS)) as crew:
        for (src, dst), by in linked(crew).items():
            assert by.startswith("shm") if HOSTS[src] == HOSTS[dst] else by == "tcp", (src, dst)
        for version in (1, 2):
            heard = crew.push(version)
            assert {told.content for name, told in heard.items() if "source" not in name} == {str(version)}


def test_what_is_relayed_goes_another_way_when_a_rank_comes_back_on_another_host() -> None:
    made = [evolve(place, transport="broadcast") for place in places("mixed", HOSTS)]
    with cast(made) as crew:
        assert {told.content for name, told in crew.push(1).items() if "source" not in name} == {"1"}
        crew.ranks["a[1]"].kill()
        crew.add(evolve(made[3], host="x"))
        heard = crew.push(2, first=["a[0]", "a[1]", "b[0]"])
        assert {told.content for name, told in heard.items() if "source" not in name} == {"2"}
        hosts = {**HOSTS, "a[1]": "x"}
        found = linked(crew)
        assert ("a[0]", "a[1]") in found or ("a[1]", "a[0]") in found
        for (src, dst), by in found.items():
            assert by.startswith("shm") if hosts[src] == hosts[dst] else by == "tcp", (src, dst)


def hear(crew: Cast, names: list[str]) -> dict[str, Told]:
    return {name: crew.told(name, timeout=DEADLINE + HEARTBEAT + MARGIN) for name in names}


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("victim", ["source[1]", "a[1]"])
@pytest.mark.parametrize(
    ("fabric", "hosts"),
    [("shm", {}), ("two copies", {}), ("tcp", {}), ("mixed", HOSTS)],
    ids=["one copy", "two copies", "tcp", "two hosts"],
)
def test_a_rank_that_is_lost_while_it_moves_is_named_and_the_rest_is_true(
    fabric: str, hosts: dict[str, str], victim: str, how: str
) -> None:
    with cast(places(fabric, hosts)) as crew:
        crew.push(1)
        crew.ask(victim, "holds", "moving", 2)
        for name, verb in crew.verbs(2).items():
            crew.start(name, *verb)
        crew.at_stage(victim)
        if how == "killed":
            crew.ranks[victim].kill()
        else:
            crew.ranks[victim].signal(signal.SIGSTOP)
        heard = hear(crew, [name for name in crew.ranks if name != victim])
        spared = [name for name in silent(heard) if name != "b[0]"]
        assert spared == []
        assert unnamed(heard, victim) == {}
        assert untruths(heard, before=dict.fromkeys(heard, "1"), version=2) == []
        assert unfenced(heard) == []


def joins(_: Rank, where: str, rank: int, host: str) -> str:
    """A source or target that asks for shared memory alone."""
    os.environ["REFIT_HOST"] = host
    given: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "fabric": "shm", "deadline": 20}
    try:
        if rank:
            RefitSession.target(Model(whole()), engine="a", **given)
        else:
            RefitSession.source(Model(whole()), **given)
    except RefitError as error:
        return str(error)
    return "joined"


def test_shared_memory_alone_is_refused_between_hosts_on_every_rank() -> None:
    where = free_rendezvous()
    with running([(joins, (where, rank, f"host-{rank}")) for rank in range(2)]) as ranks:
        for rank in ranks:
            told = rank.result()
            assert "fabric shm joins processes of one host only" in told
            assert "'host-0'" in told
            assert "'host-1'" in told
            assert "use fabric 'mixed'" in told
