"""Any rank dies or stops at any stage: all others raise in time and name it, and what is said of an engine is true.

What is said is held against the engine's bytes: untouched means that they are what they were, complete that they are
the new version's; torn or in doubt means that the engine doesn't serve.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

import pytest
from attrs import evolve
from nodes import Cast, Place, Told, cast, columns, rows, whole
from ranks import free_rendezvous

DEADLINE, HEARTBEAT = 3.0, 2.0
MARGIN = 10.0
"""Seconds beyond the deadline that a crowded machine may take."""

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NAMES = ("source[0]", "source[1]", "a[0]", "a[1]", "b[0]")


def places(victim: str = "", stage: str = "", **about: object) -> list[Place]:
    """Two sources, the engine `a` of two ranks, the engine `b` of one. One of them is held at a stage."""
    where = free_rendezvous()
    made = [Place(where=where, rank=r, size=2, held=rows(r, 2), engines=("a", "b")) for r in range(2)]
    made += [Place(where=where, engine="a", rank=r, size=2, held=columns(r, 2)) for r in range(2)]
    made += [Place(where=where, engine="b", rank=0, size=1, held=whole())]
    made = [evolve(place, deadline=DEADLINE, heartbeat=HEARTBEAT) for place in made]
    return [evolve(place, stage=stage, **about) if str(place) == victim else place for place in made]


def others(victim: str) -> list[str]:
    return [name for name in NAMES if name != victim]


def strike(crew: Cast, victim: str, how: str) -> float:
    """Kill or stop a rank; when."""
    at = time.monotonic()
    if how == "killed":
        crew.ranks[victim].kill()
    else:
        crew.ranks[victim].signal(SIGNALS[how])
    return at


def hear(crew: Cast, names: Iterable[str], struck: float) -> dict[str, Told]:
    """What the ranks were told, each in time."""
    heard = {name: crew.told(name, timeout=DEADLINE + HEARTBEAT + MARGIN) for name in names}
    late = {name: told.at - struck for name, told in heard.items() if told.at - struck > DEADLINE + HEARTBEAT + MARGIN}
    assert late == {}
    return heard


def untruths(heard: dict[str, Told], *, before: str, version: int) -> list[str]:
    """Everything said of an engine that its living ranks' bytes or fences contradict."""
    found = []
    ranks = {name: told for name, told in heard.items() if not name.startswith("source")}
    for teller, told in heard.items():
        for engine, state in told.engines.items():
            for name, rank in ranks.items():
                if name.startswith(f"{engine}["):
                    said = f"{teller} says that {engine} is {state}; {name} is {rank.content}, fenced: {rank.fenced}"
                    found += [said] if not is_true(state, rank, before=before, version=version) else []
    return found


def is_true(state: str, rank: Told, *, before: str, version: int) -> bool:
    match state:
        case "untouched":
            return rank.content == before
        case "complete":
            return rank.content == str(version) and rank.fenced is None
        case _:
            return state in ("torn", "in doubt")


def unfenced(heard: dict[str, Told]) -> list[str]:
    """Ranks that serve though they were told that their engine doesn't hold one version."""
    return [
        name
        for name, told in heard.items()
        if not name.startswith("source") and told.engines.get(name[0]) in ("torn", "in doubt") and told.fenced is None
    ]


def check(heard: dict[str, Told], victim: str, *, named: str = "", serves: Iterable[str] = ()) -> None:
    """All have raised and named the victim, but those of engines that committed; and nothing untrue was said."""
    silent = [name for name, told in heard.items() if not told.raised]
    assert silent == [name for name in heard if name[0] in serves]
    unnamed = {name: told.text for name, told in heard.items() if told.raised and (named or victim) not in told.text}
    assert unnamed == {}
    assert untruths(heard, before="poison", version=1) == []
    assert unfenced(heard) == []


def go_on(crew: Cast, victim: str, *, held: bool = True) -> Told:
    """Let a stopped rank run again: it hears that it was left behind, and doesn't hang."""
    crew.ranks[victim].signal(signal.SIGCONT)
    if held:
        crew.release(victim)
    told = crew.told(victim, timeout=DEADLINE * 3 + MARGIN)
    assert told.raised in ("PushError", "RendezvousError")
    if not victim.startswith("source"):
        assert told.content in ("poison",) or told.fenced, told
    return told


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("victim", ["source[0]", "source[1]", "a[1]"])
@pytest.mark.parametrize("stage", ["joining", "connecting"])
def test_joining(stage: str, victim: str, how: str) -> None:
    with cast(places(victim, stage), join=False) as crew:
        for name in NAMES:
            crew.start(name, "join")
        crew.at_stage(victim)
        struck = strike(crew, victim, how)
        heard = hear(crew, others(victim), struck)
        check(heard, victim, named="source rank 0" if (stage, victim) == ("joining", "source[0]") else "")
        if how == "stopped":
            go_on(crew, victim)


PUSHING = [
    *((stage, victim) for stage in ("preparing", "moving", "confirmed") for victim in ("source[0]", "source[1]")),
    *((stage, "a[1]") for stage in ("looking", "moving", "installing", "confirmed")),
]


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize(("stage", "victim"), PUSHING)
def test_pushing(stage: str, victim: str, how: str) -> None:
    with cast(places()) as crew:
        crew.ask(victim, "holds", stage, 4 if stage == "moving" else 1)
        held_back = [name for name in ("a[0]", "b[0]") if stage == "confirmed"]
        for name in held_back:
            crew.ask(name, "holds", "installing")
        for name, verb in crew.verbs(1).items():
            crew.start(name, *verb)
        for name in (*held_back, victim):
            crew.at_stage(name)
        struck = strike(crew, victim, how)
        for name in held_back if how == "killed" else ():
            crew.release(name)
        heard = hear(crew, [name for name in others(victim) if how == "killed" or name not in held_back], struck)
        for name in held_back if how == "stopped" else ():
            crew.release(name)
            heard[name] = crew.told(name)
        check(heard, victim, serves="b" if victim == "a[1]" and stage not in ("looking",) else "")
        if victim != "source[0]":
            expected = "untouched" if stage in ("preparing", "looking") else "torn"
            assert {told.engines["a"] for name, told in heard.items() if name[0] in "sa"} == {expected}
        if how == "stopped":
            go_on(crew, victim)


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("stage", ["looking", "moving", "installing", "confirmed"])
def test_the_controller_while_a_rank_is_at(stage: str, how: str) -> None:
    with cast(places(), controlled=True) as crew:
        crew.ask("a[1]", "holds", stage, 4 if stage == "moving" else 1)
        for name, verb in crew.verbs(1).items():
            crew.start(name, *verb)
        crew.at_stage("a[1]")
        struck = strike(crew, "controller", how)
        heard = hear(crew, others("a[1]"), struck)
        crew.release("a[1]")
        heard["a[1]"] = crew.told("a[1]")
        check(heard, "the controller", serves="b" if stage in ("installing", "confirmed") else "")
