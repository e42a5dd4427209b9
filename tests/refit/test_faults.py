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
from truths import silent, unfenced, unnamed, untruths

from refit_sdk.testing.ranks import free_rendezvous

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


def check(
    heard: dict[str, Told],
    victim: str,
    *,
    named: str = "",
    serves: str = "",
    may_serve: str = "",
    before: str = "poison",
) -> None:
    """All have raised and named the victim, but those of engines that committed; and nothing untrue was said."""
    unraised = [name for name in silent(heard) if name[0] not in may_serve]
    assert unraised == [name for name in heard if name[0] in serves]
    assert unnamed(heard, named or victim) == {}
    version = int(before) + 1 if before.isdigit() else 1
    assert untruths(heard, before=dict.fromkeys(heard, before), version=version) == []
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
    *((stage, victim) for stage in ("preparing", "moving") for victim in ("source[0]", "source[1]")),
    *((stage, "a[1]") for stage in ("looking", "agreeing", "moving", "installing")),
    ("agreeing", "source[1]"),
]


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize(("stage", "victim"), PUSHING)
def test_pushing(stage: str, victim: str, how: str) -> None:
    with cast(places()) as crew:
        crew.ask(victim, "holds", stage, 4 if stage == "moving" else 1)
        crew.begin(1, held=[victim])
        crew.at_stage(victim)
        struck = strike(crew, victim, how)
        heard = hear(crew, others(victim), struck)
        check(heard, victim, serves="b" if victim == "a[1]" and stage in ("moving", "installing") else "")
        if victim != "source[0]":
            expected = "torn" if stage in ("moving", "installing") else "untouched"
            assert {told.engines["a"] for name, told in heard.items() if name[0] in "sa"} == {expected}
        if how == "stopped":
            go_on(crew, victim)


@pytest.mark.parametrize("victim", ["source[0]", "source[1]", "a[1]"])
def test_killed_after_it_confirmed_while_its_engine_has_not(victim: str) -> None:
    with cast(places()) as crew:
        crew.ask(victim, "holds", "confirmed")
        held_back = ["a[0]", "b[0]"]
        for name in held_back:
            crew.ask(name, "holds", "installing")
        crew.begin(1, held=[*held_back, victim])
        for name in (*held_back, victim):
            crew.at_stage(name)
        struck = strike(crew, victim, "killed")
        for name in held_back:
            crew.release(name)
        heard = hear(crew, others(victim), struck)
        check(heard, victim, serves="b" if victim == "a[1]" else "")
        if victim != "source[0]":
            assert {told.engines["a"] for name, told in heard.items() if name[0] in "sa"} == {"torn"}


@pytest.mark.parametrize("victim", ["source[1]", "a[1]"])
def test_stopped_after_it_confirmed_the_push_is_complete_and_the_next_one_names_it(victim: str) -> None:
    with cast(places()) as crew:
        crew.ask(victim, "holds", "confirmed")
        crew.begin(1, held=[victim])
        crew.at_stage(victim)
        strike(crew, victim, "stopped")
        heard = {name: crew.told(name) for name in others(victim)}
        assert {told.raised for told in heard.values()} == {""}
        assert untruths(heard, before=dict.fromkeys(heard, "poison"), version=1) == []
        heard = crew.push(2, but=[victim], first=[name for name in ("a[0]", "b[0]") if name != victim])
        check(heard, victim, before="1")
        crew.ranks[victim].signal(signal.SIGCONT)
        crew.release(victim)
        told = crew.told(victim)
        assert told.raised == "PushError" or set(told.engines.values()) == {"complete"}
        assert crew.ask(victim, *crew.verbs(2)[victim]).raised == "PushError"


BESIDE = {"agreeing": "agreed", "confirmed": "installing"}
"""Where `a[0]` is while `a[1]` is at a stage."""


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("stage", ["looking", "agreeing", "moving", "installing", "confirmed"])
def test_the_controller_while_a_rank_is_at(stage: str, how: str) -> None:
    with cast(places(), controlled=True) as crew:
        held = {"a[1]": stage}
        if stage in BESIDE:
            held["a[0]"] = BESIDE[stage]
        for name, at in held.items():
            crew.ask(name, "holds", at, 4 if at == "moving" else 1)
        crew.begin(1, held=list(held))
        for name in held:
            crew.at_stage(name)
        struck = strike(crew, "controller", how)
        heard = hear(crew, [name for name in NAMES if name not in held], struck)
        for name in held:
            crew.release(name)
            heard[name] = crew.told(name)
        check(heard, "the controller", may_serve="b")
        said = {name: told.engines for name, told in heard.items()}
        if stage == "looking":
            assert {state for engines in said.values() for state in engines.values()} == {"untouched"}
        if stage == "agreeing":
            assert (said["a[0]"], said["b[0]"]) == ({"a": "in doubt"}, {"b": "untouched"})


@pytest.mark.parametrize("victim", ["source[1]", "a[1]"])
def test_a_rank_that_beats_but_does_not_move_is_named_when_the_deadline_passes(victim: str) -> None:
    made = [evolve(place, deadline=2.0, heartbeat=60.0) for place in places()]
    with cast(made) as crew:
        crew.ask(victim, "holds", "moving", 4)
        crew.begin(1, held=[victim])
        crew.at_stage(victim)
        heard = hear(crew, others(victim), time.monotonic())
        held_up = {name: heard.pop(name) for name in others(victim) if victim == "a[1]" and name == "b[0]"}
        check(heard, victim)
        assert untruths(heard | held_up, before=dict.fromkeys(NAMES, "poison"), version=1) == []
        assert unfenced(held_up) == []
        crew.release(victim)
        assert crew.told(victim).raised == "PushError"


def replicas(*engines: str, plain: str = "") -> list[Place]:
    """Two sources that both hold everything, and engines of one rank each."""
    where = free_rendezvous()
    made = [Place(where=where, rank=r, size=2, held=whole(), engines=engines) for r in range(2)]
    made += [Place(where=where, engine=e, rank=0, size=1, held=whole(), plain=e == plain) for e in engines]
    return [evolve(place, deadline=DEADLINE, heartbeat=HEARTBEAT) for place in made]


@pytest.mark.parametrize(("stage", "state"), [("moving", "torn"), ("preparing", "untouched")])
def test_a_plain_module_refuses_its_forward_only_while_torn(stage: str, state: str) -> None:
    with cast(replicas("b", plain="b")) as crew:
        assert crew.push(1)["b[0]"].content == "1"
        crew.ask("source[1]", "holds", stage, 3 if stage == "moving" else 1)
        crew.begin(2, held=["source[1]"])
        crew.at_stage("source[1]")
        strike(crew, "source[1]", "killed")
        heard = {name: crew.told(name) for name in ("source[0]", "b[0]")}
        assert {told.engines["b"] for told in heard.values()} == {state}
        refusal = crew.ask("b[0]", "serves").value
        assert ("fenced" in refusal) == (state == "torn")
        crew.together(dict.fromkeys(("source[0]", "b[0]"), ("reform",)))
        assert crew.ask("b[0]", "serves").value == refusal
        after = crew.push(3, but=["source[1]"])
        assert after["b[0]"].content == "3"
        assert crew.ask("b[0]", "serves").value == ""


@pytest.mark.parametrize("require", ["all", 2, 1])
def test_an_engine_whose_install_raises_is_torn_and_the_other_commits(require: object) -> None:
    made = [evolve(p, breaks="no kernel for this shape") if p.engine == "c" else p for p in replicas("b", "c")]
    with cast(made) as crew:
        heard = crew.push(1, require=require)
        raised = {name: told.raised for name, told in heard.items()}
        sources = "" if require == 1 else "PushError"
        assert raised == {"source[0]": sources, "source[1]": sources, "b[0]": "", "c[0]": "PushError"}
        for told in (heard["source[0]"], heard["source[1]"]):
            assert told.engines == {"b": "complete", "c": "torn"}
            assert require == 1 or "no kernel for this shape" in told.text
            assert ("1 of 2 required engines committed" in told.text) == (require == 2)
        assert "no kernel for this shape" in heard["c[0]"].text
        assert heard["c[0]"].fenced
        assert (heard["b[0]"].content, heard["b[0]"].fenced) == ("1", None)
        crew.ask("c[0]", "mends")
        heard = crew.push(2)
        assert {(told.raised, told.content, told.fenced) for told in heard.values() if told.content} == {
            ("", "2", None)
        }


def test_versions_only_go_up_and_all_sources_push_the_same() -> None:
    with cast(replicas("b")) as crew:
        assert {told.raised for told in crew.push(37).values()} == {""}
        again = crew.push(37, first=["b[0]"])
        assert {(told.raised, told.engines["b"]) for told in again.values()} == {("PushError", "untouched")}
        crew.enter("b[0]", "receive")
        differing = crew.together({"source[0]": ("push", 38), "source[1]": ("push", 39)}) | {"b[0]": crew.told("b[0]")}
        assert {told.raised for told in differing.values()} == {"PushError"}
        assert "source[0] pushes 38" in differing["b[0]"].text
        assert {told.raised for told in crew.push(40).values()} == {""}
