"""Joining, message by message: processes that can't ask for their seats, and patterns of frozen tensors."""

from __future__ import annotations

from typing import Any

import pytest
from talk import EVERYBODY, NAMES, Talk

from refit_sdk import messages
from refit_sdk.messages import Claim, Unable
from refit_sdk.states import SessionState

REASON = "PluginError: exactly one target adapter must accept a Foo, but none did"
STRANGER = 99


def says_unable(talk: Talk, *claims: Claim) -> None:
    sent = talk.hub.receive(STRANGER, Unable(claims=claims, reason=REASON), now=talk.now)
    assert [message for link, message in sent if link == STRANGER] == [messages.Refused(reason=REASON)]
    talk.take([(link, message) for link, message in sent if link != STRANGER])


@pytest.mark.parametrize("name", ["a[1]", "source[1]"])
def test_joining_fails_at_once_where_a_rank_cannot_join(name: str) -> None:
    talk = Talk()
    first = ("source[0]", "a[0]")
    for other in first:
        talk.enter(other)
    says_unable(talk, Claim(*NAMES[name]))
    told = f"{name} can't join: {REASON}; mend that, and start every rank again"
    for other in first:
        assert (talk.last(other).error, talk.last(other).causes) == ("RendezvousError", (told,))
    assert talk.hub.state is SessionState.CLOSED
    talk.up("a[0]", messages.Leave(reason="joining failed"))
    late = [other for other in EVERYBODY if other not in (name, *first)]
    assert sorted(talk.hub.untold) == sorted(_awaited(late))
    for other in late:
        assert talk.enter(other) == messages.Refused(reason=told)
    assert talk.hub.untold == []


def _awaited(names: list[str]) -> list[str]:
    return ["any rank of b" if name == "b[0]" else name for name in names]


def test_a_process_with_two_seats_is_named_by_both() -> None:
    talk = Talk()
    talk.enter("source[0]")
    says_unable(talk, Claim(*NAMES["source[1]"]), Claim(*NAMES["b[0]"]))
    assert talk.last("source[0]").causes[0].startswith("source[1]+b[0] can't join: PluginError")
    talk.enter("a[0]")
    talk.enter("a[1]")
    assert talk.hub.untold == []


@pytest.mark.parametrize(
    "claim",
    [
        Claim("source", "", 0, 2),
        Claim("source", "", 1, 3),
        Claim("source", "", 2, 2),
        Claim("target", "z", 0, 1),
        Claim("target", "a", 1, 3),
        Claim("target", "a+b", 0, 1),
    ],
    ids=["a taken seat", "another size", "beyond the size", "another engine", "an engine of another size", "no name"],
)
def test_who_could_not_have_had_the_seat_ends_nothing(claim: Claim) -> None:
    talk = Talk()
    talk.enter("source[0]")
    talk.enter("a[0]")
    says_unable(talk, claim)
    assert talk.hub.state is SessionState.JOINING
    assert talk.hub.untold == []
    talk.wait(10)
    assert f"{claim} was refused: {REASON}" in talk.last("a[0]").causes


def test_who_comes_late_and_cannot_join_ends_nothing() -> None:
    talk = Talk()
    for name in EVERYBODY:
        talk.enter(name)
    talk.form(*EVERYBODY)
    talk.lose("a[1]")
    says_unable(talk, Claim(*NAMES["a[1]"]))
    assert talk.hub.state is SessionState.IDLE
    assert isinstance(talk.enter("a[1]"), messages.Welcome)


def test_a_busy_host_gives_everybody_the_whole_deadline() -> None:
    talk = Talk()
    talk.enter("source[0]")
    assert talk.hub.wait_anew(now=9.0) == []
    talk.wait(10)
    assert talk.hub.state is SessionState.JOINING
    talk.wait(9)
    assert talk.hub.state is SessionState.CLOSED
    assert talk.hub.wait_anew(now=30.0) == []
    talk.wait(30)
    assert talk.kinds("source[0]") == ["Welcome", "Fault"]


def everybody_with(frozen: dict[str, dict[str, str | None]], *, talk: Talk | None = None) -> Talk:
    talk = talk or Talk()
    for name in EVERYBODY:
        about: dict[str, Any] = {"frozen": frozen[name]} if name in frozen else {}
        talk.enter(name, **about)
    return talk


def test_frozen_patterns_that_match_nothing_are_refused_all_at_once() -> None:
    talk = everybody_with({"a[0]": {"visua.*": "", "x": None}, "a[1]": {"visua.*": "visual.w"}, "b[0]": {"q": ""}})
    advice = "see the pattern, or leave it out"
    wanted = (
        f"frozen 'visua.*' matches no tensor of engine a; the nearest name is visual.w: {advice}",
        f"frozen 'q' matches no tensor of engine b: {advice}",
    )
    for name in EVERYBODY:
        assert (talk.last(name).error, talk.last(name).causes) == ("PlanError", wanted)
    assert talk.hub.state is SessionState.CLOSED


def test_a_frozen_pattern_need_match_on_one_rank_of_the_engine_only() -> None:
    talk = everybody_with({"a[0]": {"visual.*": ""}, "a[1]": {"visual.*": None}})
    assert {type(talk.last(name)) for name in EVERYBODY} == {messages.Form}


def test_a_late_engine_with_a_frozen_pattern_that_matches_nothing_fails_the_push_and_the_reform() -> None:
    talk = everybody_with({})
    talk.form(*EVERYBODY)
    talk.lose("b[0]")
    talk.enter("b[0]", frozen={"q": ""})
    talk.ready("b[0]", *EVERYBODY[:-1])
    assert {(talk.last(name).error, talk.last(name).engines["a"].state) for name in EVERYBODY} == {
        ("PlanError", "untouched")
    }
    assert talk.hub.state is SessionState.IDLE
    talk.ready(*EVERYBODY, kind="reform")
    assert {talk.last(name).error for name in EVERYBODY} == {"PlanError"}
    assert talk.hub.state is SessionState.IDLE
    talk.take(talk.hub.drop("b", "it's wrong", now=0.0))
    rest = EVERYBODY[:-1]
    talk.ready(*rest)
    talk.form(*rest)
    assert talk.last("a[0]").engines == ("a",)
