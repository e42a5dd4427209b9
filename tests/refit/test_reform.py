"""After a loss: the survivors go on, ranks come back, and the next push is exact."""

from __future__ import annotations

import pytest
from attrs import evolve
from nodes import Cast, Place, Told, cast, columns, rows, whole

from refit_sdk.testing.ranks import free_rendezvous

DEADLINE, HEARTBEAT = 5.0, 3.0


def places(sources: list[Place], *engines: tuple[str, int]) -> list[Place]:
    """The sources, and engines of (name, ranks); an engine's ranks share the columns."""
    where, names = free_rendezvous(), tuple(name for name, _ in engines)
    made = [evolve(place, where=where, engines=names) for place in sources]
    for name, size in engines:
        made += [Place(where=where, engine=name, rank=r, size=size, held=columns(r, size)) for r in range(size)]
    return [evolve(place, deadline=DEADLINE, heartbeat=HEARTBEAT) for place in made]


def sharded(size: int) -> list[Place]:
    return [Place(where="", rank=r, size=size, held=rows(r, size)) for r in range(size)]


def replicated(size: int) -> list[Place]:
    return [Place(where="", rank=r, size=size, held=whole()) for r in range(size)]


def lose(crew: Cast, name: str, version: int) -> dict[str, Told]:
    """Kill a rank between pushes; what the others are told of the next push."""
    crew.ranks[name].kill()
    targets = [each for each in crew.ranks if not each.startswith(("source", "controller")) and each != name]
    return crew.push(version, but=[name], first=targets)


def reform(crew: Cast, *, but: list[str]) -> dict[str, Told]:
    """All survivors re-form."""
    names = [name for name in crew.ranks if name not in but and name != "controller"]
    return crew.together(dict.fromkeys(names, ("reform",)))


def raised(told: dict[str, Told]) -> set[str]:
    return {each.raised for each in told.values()}


def exact(told: dict[str, Told], version: int) -> bool:
    """Whether every push and receive went well, and every target holds the version and serves."""
    targets = [each for name, each in told.items() if not name.startswith("source")]
    return raised(told) == {""} and {(each.content, each.fenced) for each in targets} == {(str(version), None)}


def test_an_engine_lost_its_rank_and_the_others_go_on() -> None:
    with cast(places(sharded(2), ("a", 1), ("b", 2))) as crew:
        assert exact(crew.push(1), 1)
        assert raised(lose(crew, "a[0]", 2)) == {"PushError"}
        assert raised(reform(crew, but=["a[0]"])) == {""}
        assert exact(crew.push(3, but=["a[0]"]), 3)
        assert not [seat for seat in crew.ask("source[0]", "plan_ranks").value if seat.startswith("a")]


def test_the_only_engine_is_lost_and_a_new_one_is_served() -> None:
    made = places(sharded(2), ("a", 1))
    with cast(made) as crew:
        assert exact(crew.push(1), 1)
        crew.ranks["a[0]"].kill()
        assert raised(reform(crew, but=["a[0]"])) == {""}
        crew.add(made[2])
        assert exact(crew.push(2, first=["a[0]"]), 2)


def test_a_source_is_lost_and_its_replica_serves() -> None:
    with cast(places(replicated(2), ("a", 2))) as crew:
        assert exact(crew.push(1), 1)
        told = lose(crew, "source[1]", 2)
        assert raised(told) == {"PushError"}
        assert [name for name, each in told.items() if "source[1]" not in each.text] == []
        assert raised(reform(crew, but=["source[1]"])) == {""}
        assert exact(crew.push(3, but=["source[1]"]), 3)


def test_a_source_is_lost_without_a_replica_and_comes_back() -> None:
    made = places(sharded(2), ("a", 1))
    with cast(made) as crew:
        assert exact(crew.push(1), 1)
        lose(crew, "source[1]", 2)
        told = reform(crew, but=["source[1]"])
        assert raised(told) == {"PlanError"}
        assert [name for name, each in told.items() if "model.layers.0.w" not in each.text] == []
        crew.add(made[1])
        assert exact(crew.push(3), 3)


@pytest.mark.parametrize("reforms", [False, True], ids=["as it is", "after a reform"])
def test_a_new_process_takes_the_lost_seat(reforms: bool) -> None:
    made = places(sharded(2), ("a", 2), ("b", 1))
    with cast(made) as crew:
        assert exact(crew.push(1), 1)
        crew.ranks["a[1]"].kill()
        if reforms:
            assert raised(reform(crew, but=["a[1]"])) == {""}
            fenced = str(crew.ask("a[0]", "counts").fenced)
            assert "its engine lacks a[1]: it serves from the first push after that came back" in fenced
            assert exact(crew.push(2, but=["a[0]", "a[1]"]), 2)
        told = crew.add(made[3])
        assert (told.content, bool(told.fenced)) == ("poison", True)
        assert exact(crew.push(3, first=["a[0]", "a[1]"]), 3)
        assert exact(crew.push(4), 4)


def test_a_rank_that_came_late_stays_fenced_when_the_push_fails_untouched() -> None:
    made = places(replicated(2), ("a", 1), ("b", 1))
    with cast(made) as crew:
        assert exact(crew.push(1), 1)
        crew.ranks["a[0]"].kill()
        crew.add(made[2])
        told = crew.push(1, first=["a[0]", "b[0]"])
        assert raised(told) == {"PushError"}
        assert (told["a[0]"].engines["a"], bool(told["a[0]"].fenced)) == ("untouched", True)
        assert (told["b[0]"].engines["b"], told["b[0]"].fenced) == ("untouched", None)
        assert exact(crew.push(2, first=["a[0]"]), 2)


@pytest.mark.parametrize("host", ["source[0]", "controller"])
def test_the_host_dies_and_a_new_session_works(host: str) -> None:
    made = places(replicated(2), ("a", 1))
    with cast(made, controlled=host == "controller") as crew:
        assert exact(crew.push(1), 1)
        crew.ranks[host].kill()
        told = crew.push(2, but=[host])
        assert raised(told) == {"PushError"}
        survivors = [name for name in crew.ranks if name != host]
        crew.together(dict.fromkeys(survivors, ("close",)))
        anew = evolve(made[0], where=free_rendezvous())
        if host == "source[0]":
            crew.start_process(anew)
        crew.together(dict.fromkeys(survivors, ("move_to", anew.where)))
        everybody = ["source[0]", "source[1]", "a[0]"]
        assert raised(crew.together(dict.fromkeys(everybody, ("join",)))) == {""}
        assert exact(crew.push(1, but=["controller"]), 1)
        assert exact(crew.push(2, but=["controller"]), 2)


def test_nothing_grows_over_losses_and_returns() -> None:
    made = places(replicated(2), ("a", 2))
    counts = []
    with cast(made) as crew:
        for cycle in range(4):
            assert exact(crew.push(3 * cycle + 1), 3 * cycle + 1)
            assert raised(lose(crew, "a[1]", 3 * cycle + 2)) == {"PushError"}
            reform(crew, but=["a[1]"])
            crew.add(made[3])
            assert exact(crew.push(3 * cycle + 3, first=["a[0]", "a[1]"]), 3 * cycle + 3)
            counts.append([crew.ask(name, "counts").value for name in ("source[0]", "source[1]", "a[0]")])
    assert counts[-1] == counts[1]
