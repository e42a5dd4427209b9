"""The rendezvous's mind, message by message: who is refused and why, what a deadline does, and what losses leave."""

from __future__ import annotations

import re
from typing import Any

import pytest
from talk import EVERYBODY, FINE, WROTE, Talk, joined

from refit_sdk import messages
from refit_sdk.coordinator import LONGER
from refit_sdk.errors import RendezvousError
from refit_sdk.messages import Claim, Done, EngineDone, Linked, Planned, Ready
from refit_sdk.states import SessionState


@pytest.fixture
def talk() -> Talk:
    return joined()


@pytest.mark.parametrize(
    ("name", "about", "reason"),
    [
        ("source[1]", {"sdk": "0.0.9"}, "refit_sdk is 0.0.9 here"),
        ("source[1]", {"claims": (Claim("source", "", 0, 2),)}, r"source\[0\] is taken, by process 7 on here"),
        ("source[1]", {"claims": (Claim("source", "", 1, 3),)}, "says there are 3 source ranks, the others 2"),
        ("source[1]", {"claims": (Claim("source", "", 2, 2),)}, "ranks are 0 to 1"),
        ("source[1]", {"claims": (Claim("source", "", -1, 2),)}, "ranks are 0 to 1"),
        ("source[1]", {"engines": 3}, "waits for engines=3"),
        ("source[1]", {"settings": '{"cast":"never"}'}, "settings differ"),
        ("source[1]", {"plugins": {"gloo": "2"}}, "plug-ins differ"),
        ("source[1]", {"manifests": (b"junk",)}, "manifest"),
        ("source[1]", {"manifests": ()}, "1 seats were claimed with 0 manifests"),
        ("source[1]", {"claims": (), "manifests": ()}, "0 seats"),
        ("a[1]", {"claims": (Claim("target", "z", 0, 1),)}, "not of an engine that is waited for"),
        ("source[1]", {"claims": (Claim("source", "a", 1, 2),)}, "a source rank claims a seat of engine 'a'"),
        ("a[1]", {"claims": (Claim("target", "", 1, 2),)}, "can't be called ''"),
        ("a[1]", {"claims": (Claim("target", "source", 1, 2),)}, "can't be called 'source'"),
        ("a[1]", {"claims": (Claim("target", "a+b", 1, 2),)}, r"can't be called 'a\+b'"),
        ("a[1]", {"claims": (Claim("target", "a\n", 1, 2),)}, "can't be called"),
        ("a[1]", {"claims": (Claim("target", "a", 1, 4),)}, "says its engine has 4 ranks, the others say 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_claim_that_can_not_be_is_refused_and_changes_nothing(name: str, about: Any, reason: str) -> None:
    talk = Talk()
    talk.enter("source[0]")
    talk.enter("a[0]")
    answer = talk.enter(name, **about)
    assert isinstance(answer, messages.Refused)
    assert re.search(reason, answer.reason)
    assert isinstance(talk.enter(name), messages.Welcome)


def test_the_deadline_of_joining_names_who_is_missing() -> None:
    talk = Talk()
    talk.enter("source[0]")
    talk.enter("a[1]")
    talk.wait(10)
    fault = talk.last("source[0]")
    assert fault.causes == ("source[1], a[0], any rank of b didn't join in 10 s", LONGER)
    assert talk.hub.state is SessionState.CLOSED
    assert isinstance(talk.enter("b[0]"), messages.Refused)


def test_plans_that_differ_are_named() -> None:
    talk = Talk()
    for name in EVERYBODY:
        talk.enter(name)
    for name in EVERYBODY:
        talk.up(name, Planned(epoch=1, input_digest="i", plan_digest="q" if name == "a[1]" else "p"))
    assert {talk.last(name).error for name in EVERYBODY} == {"PlanError"}
    assert "a[1] made different plans" in talk.last("b[0]").causes[0]


@pytest.mark.parametrize("causes", [("no source holds w", "nobody wants v"), ()])
def test_what_fails_on_one_is_raised_on_all(talk: Talk, causes: tuple[str, ...]) -> None:
    talk.ready(*EVERYBODY, kind="reform")
    talk.up("b[0]", messages.Failed(epoch=talk.hub.epoch, error="PlanError", causes=causes))
    for name in EVERYBODY:
        assert (talk.last(name).error, talk.last(name).causes) == ("PlanError", causes)
        assert {verdict.state for verdict in talk.last(name).engines.values()} == {"untouched"}


def test_words_of_an_earlier_epoch_and_of_strangers_change_nothing(talk: Talk) -> None:
    talk.ready(*EVERYBODY, kind="reform")
    before = {name: list(heard) for name, heard in talk.heard.items()}
    old = talk.hub.epoch - 1
    talk.up("a[0]", Planned(epoch=old, input_digest="x", plan_digest="y"))
    talk.up("a[0]", Linked(epoch=old))
    talk.up("a[0]", messages.Failed(epoch=old, error="PlanError", causes=("late",)))
    talk.up("a[0]", Done(push=99, engines={"a": WROTE}))
    assert talk.hub.receive(77, Ready(kind="push", manifests=(None,), version=1), now=0.0) == []
    assert talk.heard == before


@pytest.mark.parametrize(
    ("versions", "text"),
    [((2, 3), "different versions"), ((1, 1), "versions only go up"), ((0, 0), "versions only go up")],
)
def test_a_version_that_can_not_be_pushed(talk: Talk, versions: tuple[int, int], text: str) -> None:
    talk.push(1, *EVERYBODY)
    talk.ready("a[0]", "a[1]", "b[0]")
    talk.ready("source[0]", version=versions[0])
    if versions[0] != versions[1]:
        talk.ready("source[1]", version=versions[1])
    assert text in talk.last("a[0]").causes[0]
    assert talk.hub.state is SessionState.IDLE


def test_tied_tensors_of_different_values_move_nothing(talk: Talk) -> None:
    talk.ready(*EVERYBODY, word=False)
    for name, mine in (("source[0]", (5, 1)), ("source[1]", (2, 5))):
        talk.up(name, Linked(epoch=talk.hub.epoch, sums=(("head", "embed", *mine),)))
    talk.word("a[0]", "a[1]", "b[0]")
    assert talk.last("b[0]").error == "PlanError"
    assert "head and embed are one tensor at a target" in talk.last("b[0]").causes[0]


def test_nobody_moves_before_everybody_has_given_its_word(talk: Talk) -> None:
    talk.ready(*EVERYBODY, word=False)
    talk.word(*EVERYBODY[:-1])
    assert "Go" not in [kind for name in EVERYBODY for kind in talk.kinds(name)]
    talk.word(EVERYBODY[-1])
    assert {talk.kinds(name)[-1] for name in EVERYBODY} == {"Go"}


def test_a_loss_before_the_last_word_leaves_all_untouched_and_connects_anew(talk: Talk) -> None:
    talk.ready(*EVERYBODY, word=False)
    talk.word(*EVERYBODY[:-1])
    talk.lose("b[0]")
    survivors = EVERYBODY[:-1]
    assert {verdict.state for name in survivors for verdict in talk.last(name).engines.values()} == {"untouched"}
    talk.ready(*survivors, require=1)
    assert talk.last("a[0]").fresh == ("a",)
    talk.form(*survivors)
    assert talk.last("a[0]").engines == ("a",)


def test_who_does_not_give_its_word_is_named_at_the_deadline(talk: Talk) -> None:
    talk.ready(*EVERYBODY, word=False)
    talk.word(*EVERYBODY[1:])
    talk.wait(10)
    assert talk.last("b[0]").causes == ("source[0] didn't connect in 10 s", LONGER)


def test_who_does_not_call_push_is_named_at_the_deadline(talk: Talk) -> None:
    talk.ready("source[0]", "a[0]", "b[0]")
    talk.wait(10)
    assert talk.last("b[0]").causes == ("source[1], a[1] didn't call push() or receive() in 10 s", LONGER)
    assert set(talk.last("b[0]").failures) == {"source[1]", "a[1]"}


def test_at_the_deadline_of_a_push_all_are_told_to_drop_and_only_the_silent_are_expelled(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.done(FINE, "source[0]", "b[0]")
    talk.wait(10)
    assert [talk.last(name).engine for name in ("source[1]", "a[0]", "a[1]")] == ["a"] * 3
    talk.done(EngineDone(0, 0, "dropped"), "source[1]", "a[0]")
    talk.wait(2)
    assert isinstance(talk.last("a[1]"), messages.Closed)
    assert talk.last("a[0]").engines["a"].state == "torn"
    assert talk.last("b[0]").engines["b"].state == "complete"
    assert set(talk.hub.membership.lost) == {"a[1]"}


def test_a_failure_said_just_before_the_deadline_does_not_expel_the_others(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.done(EngineDone(0, 0, "waited 10 s", lost="source[1]"), "a[0]", "b[0]")
    talk.wait(10)
    assert "Closed" not in [kind for name in EVERYBODY for kind in talk.kinds(name)]
    talk.done(EngineDone(0, 0, "dropped"), "source[0]", "source[1]", "a[1]")
    outcome = talk.last("source[0]")
    assert {verdict.state for verdict in outcome.engines.values()} == {"untouched"}
    assert outcome.failures == {"source[1]": "dropped"}
    assert talk.hub.membership.lost == {}


def test_a_torn_engine_stays_torn_through_losses_and_returns_until_a_full_push(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.done(WROTE, "a[0]", "a[1]")
    talk.done(FINE, "b[0]", "source[0]", "source[1]")
    assert talk.last("source[0]").engines["a"].state == "torn"
    talk.lose("a[1]")
    talk.ready("source[0]", version=2)
    assert (talk.last("source[0]").engines["a"].state, talk.last("source[0]").engines["a"].version) == ("torn", None)
    talk.enter("a[1]")
    talk.ready("source[0]", version=1)
    assert talk.last("source[0]").engines["a"].state == "torn"
    talk.ready("a[0]", "a[1]", "b[0]", "source[0]", "source[1]", version=2)
    talk.form(*EVERYBODY)
    talk.done(FINE, *EVERYBODY)
    assert talk.last("a[1]").engines["a"].state == "complete"
    talk.ready("source[0]", version=2)
    assert talk.last("source[0]").engines["a"].state == "untouched"


def test_an_engine_of_only_new_processes_is_not_torn(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.done(FINE, "source[0]", "source[1]", "a[0]", "a[1]")
    talk.done(WROTE, "b[0]")
    talk.lose("b[0]")
    talk.enter("b[0]")
    talk.ready("source[0]", version=1)
    verdict = talk.last("source[0]").engines["b"]
    assert (verdict.state, verdict.version) == ("untouched", None)


def test_an_engine_with_a_new_rank_serves_no_version(talk: Talk) -> None:
    talk.push(1, *EVERYBODY)
    talk.lose("a[1]")
    talk.enter("a[1]")
    talk.ready("source[0]", version=1)
    assert talk.last("source[0]").engines["a"].version is None
    assert talk.last("source[0]").engines["b"].version == 1


def test_receiving_beside_a_lost_rank_is_an_error_at_once(talk: Talk) -> None:
    talk.lose("a[1]")
    talk.ready("a[0]")
    assert talk.last("a[0]").failures == {"a[1]": "it is gone"}
    talk.ready("b[0]")
    assert "Fault" not in talk.kinds("b[0]")


def test_receiving_after_a_source_was_lost_is_an_error_at_once(talk: Talk) -> None:
    talk.lose("source[1]")
    talk.ready("source[0]")
    talk.ready("b[0]")
    assert talk.last("b[0]").failures == {"source[1]": "it is gone"}


def test_who_waits_in_a_push_is_called_to_the_reform(talk: Talk) -> None:
    talk.ready("b[0]")
    talk.lose("a[1]")
    assert "Fault" not in talk.kinds("b[0]")
    talk.ready("source[0]", "source[1]", "a[0]", kind="reform")
    assert talk.last("b[0]").causes == ("a[1]: it is gone", "source[0] called reform(): call it too")
    talk.ready("b[0]")
    assert "source[0], source[1], a[0] called reform()" in talk.last("b[0]").causes[1]
    talk.ready("b[0]", kind="reform")
    talk.form("source[0]", "source[1]", "b[0]")
    assert talk.last("b[0]") == messages.Formed(epoch=2)


def test_a_rank_lost_in_idle_is_told_to_its_own_engine_and_to_the_next_push(talk: Talk) -> None:
    talk.ready("a[0]", "b[0]")
    talk.lose("a[1]", "no sign of life")
    assert talk.last("a[0]").failures == {"a[1]": "no sign of life"}
    assert "Fault" not in talk.kinds("b[0]")
    talk.ready("source[0]")
    assert talk.last("source[0]").failures == talk.last("b[0]").failures == {"a[1]": "no sign of life"}


def test_with_fewer_required_a_push_goes_on_without_the_lost_engine(talk: Talk) -> None:
    talk.lose("a[1]")
    talk.ready("b[0]", "source[0]", "source[1]", require=1)
    talk.form("source[0]", "source[1]", "b[0]")
    assert talk.last("b[0]").engines == ("b",)


def test_a_reform_without_a_whole_engine_waits_for_one(talk: Talk) -> None:
    talk.push(1, *EVERYBODY)
    talk.lose("a[1]")
    talk.lose("b[0]")
    talk.ready("source[0]", "source[1]", "a[0]", kind="reform")
    assert talk.last("a[0]") == messages.Formed(epoch=1, waiting=True, lacks=("a[1]",))
    for name in ("source[0]", "source[1]"):
        assert talk.last(name) == messages.Formed(epoch=1, waiting=True)
    talk.enter("b[0]")
    talk.ready("b[0]", "source[0]", "source[1]", version=2)
    talk.form("b[0]", "source[0]", "source[1]")
    talk.done(FINE, "b[0]", "source[0]", "source[1]")
    assert talk.last("source[0]").committed


def test_a_push_that_no_engine_can_take_is_refused_at_once_and_says_why(talk: Talk) -> None:
    talk.lose("a[1]")
    survivors = ("source[0]", "source[1]", "a[0]", "b[0]")
    talk.ready(*survivors, kind="reform")
    talk.form("source[0]", "source[1]", "b[0]")
    talk.take(talk.hub.pause("b"))
    talk.ready("source[0]")
    fault = talk.last("source[0]")
    assert fault.causes[0] == "no engine can take the push: engine a lacks a[1]; engine b is paused"
    assert fault.failures == {"a[1]": "engine a lacks a[1]", "b[0]": "engine b is paused"}
    assert talk.hub.state is SessionState.IDLE
    talk.enter("a[1]")
    talk.ready("source[0]", "source[1]", "a[0]", "a[1]")
    assert isinstance(talk.last("a[1]"), messages.Form)


def test_a_push_waits_for_a_whole_engine_if_it_has_no_other_and_names_who_is_late(talk: Talk) -> None:
    talk.lose("a[1]")
    talk.lose("b[0]")
    talk.ready("source[0]", "source[1]", "a[0]", kind="reform")
    talk.enter("a[1]")
    talk.ready("source[0]", "source[1]", "a[0]")
    talk.wait(10)
    assert talk.last("source[0]").causes == ("a[1] didn't call push() or receive() in 10 s", LONGER)
    assert set(talk.last("source[0]").failures) == {"a[1]"}


@pytest.mark.parametrize(
    ("paused", "text"),
    [
        ("", "the push requires 3 engines, 2 take part"),
        ("a", "the push requires 3 engines, 1 takes part: engine a is paused"),
    ],
)
def test_a_push_that_requires_more_engines_than_there_are_is_refused_at_once(
    talk: Talk, paused: str, text: str
) -> None:
    if paused:
        talk.take(talk.hub.pause(paused))
    talk.ready("b[0]")
    talk.ready("source[0]", require=3)
    assert talk.last("b[0]").causes[0] == text
    assert {verdict.state for verdict in talk.last("b[0]").engines.values()} == {"untouched"}


def test_a_target_hears_of_its_own_engine_and_the_sources_of_all_that_were_required(talk: Talk) -> None:
    talk.ready(*EVERYBODY, require=2)
    talk.done(FINE, "b[0]", "source[0]", "source[1]")
    talk.done(EngineDone(0, 0, "no kernel"), "a[0]", "a[1]")
    assert talk.last("b[0]").committed
    assert not talk.last("a[0]").committed
    assert not talk.last("source[0]").committed
    outcome = talk.last("source[0]")
    assert (outcome.engines["a"].cause, outcome.engines["b"].cause) == ("a[0]: no kernel", "")
    assert outcome.failures == {"a[0]": "no kernel"}
    assert outcome.causes[:2] == ("a[0]: no kernel", "1 of 2 required engines committed")
    assert talk.last("a[0]").causes == ("a[0]: no kernel", "push again once that is mended")
    assert talk.last("b[0]").causes == ()


def test_the_only_engine_hears_of_itself(talk: Talk) -> None:
    talk.take(talk.hub.drop("a", "it burns", now=0.0))
    survivors = ("source[0]", "source[1]", "b[0]")
    talk.ready(*survivors, require=1)
    talk.form(*survivors)
    talk.done(FINE, *survivors)
    assert [talk.last(name).committed for name in survivors] == [True] * 3


def test_an_accused_source_that_stays_silent_is_expelled_and_is_the_cause(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.done(EngineDone(0, 0, "the connection ended", lost="source[1]"), "a[0]", "a[1]", "b[0]")
    talk.done(FINE, "source[0]")
    assert "Outcome" not in talk.kinds("b[0]")
    talk.wait(10)
    talk.wait(2)
    assert talk.last("b[0]").failures == {"source[1]": "no word of the push in 10 s"}
    assert isinstance(talk.last("source[1]"), messages.Closed)


def test_a_lost_source_needs_a_reform(talk: Talk) -> None:
    talk.lose("source[1]")
    assert talk.hub.state is SessionState.BROKEN
    talk.ready("source[0]")
    assert talk.last("source[0]").failures == {"source[1]": "it is gone"}
    survivors = ("source[0]", "a[0]", "a[1]", "b[0]")
    talk.ready(*survivors, kind="reform")
    talk.form(*survivors)
    assert talk.hub.state is SessionState.IDLE
    talk.push(1, *survivors)
    assert talk.last("source[0]").committed


@pytest.mark.parametrize("name", ["a[1]", "source[1]"])
def test_a_loss_that_is_noticed_while_others_re_form_already_is_accepted(talk: Talk, name: str) -> None:
    survivors = [other for other in EVERYBODY if other != name]
    first, *others = survivors
    talk.ready(first, kind="reform")
    talk.lose(name)
    talk.ready(*others, kind="reform")
    halved = ["a[0]"] if name == "a[1]" else []
    talk.form(*(other for other in survivors if other not in halved))
    assert {other: talk.last(other).waiting for other in survivors} == {other: other in halved for other in survivors}
    assert talk.hub.state is SessionState.IDLE


def test_a_source_that_comes_after_a_reform_is_connected_to_every_engine(talk: Talk) -> None:
    talk.push(1, *EVERYBODY)
    talk.lose("source[1]")
    survivors = ("source[0]", "a[0]", "a[1]", "b[0]")
    talk.ready(*survivors, kind="reform")
    talk.form(*survivors)
    talk.push(2, *survivors)
    talk.enter("source[1]")
    talk.ready(*EVERYBODY, version=3)
    assert talk.last("a[0]").fresh == ("a", "b")
    talk.form(*EVERYBODY)
    talk.done(FINE, *EVERYBODY)
    assert talk.last("source[1]").committed


def test_the_last_source_ends_the_session(talk: Talk) -> None:
    talk.lose("source[1]")
    talk.lose("source[0]")
    assert talk.hub.state is SessionState.CLOSED
    assert talk.last("a[0]").reason == "all sources have closed: source[0]: it is gone"


def test_a_loss_while_moving_leaves_the_other_engine_alone(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.lose("a[1]")
    assert [type(talk.last(name)).__name__ for name in ("source[0]", "a[0]", "b[0]")] == ["Drop", "Drop", "Go"]
    talk.done(FINE, "b[0]")
    assert talk.last("b[0]").committed
    talk.done(EngineDone(0, 0, "dropped"), "a[0]")
    talk.done(FINE, "source[0]", "source[1]")
    outcome = talk.last("source[0]")
    assert {name: verdict.state for name, verdict in outcome.engines.items()} == {"a": "torn", "b": "complete"}
    assert not outcome.committed


def test_paused_dropped_and_admitted_engines(talk: Talk) -> None:
    talk.take(talk.hub.pause("a"))
    with pytest.raises(RendezvousError, match="'a' is paused, it must be ready"):
        talk.hub.pause("a")
    talk.ready("b[0]", "source[0]", "source[1]")
    talk.done(FINE, "b[0]", "source[0]", "source[1]")
    assert list(talk.last("source[0]").engines) == ["b"]
    talk.take(talk.hub.resume("a"))
    talk.take(talk.hub.drop("a", "it burns", now=0.0))
    assert talk.last("a[0]").reason == "engine a was dropped: it burns"
    assert talk.hub.engine_states() == {"b": "ready"}
    assert isinstance(talk.enter("a[0]"), messages.Refused)
    talk.take(talk.hub.admit("a"))
    assert isinstance(talk.enter("a[0]"), messages.Welcome)
    with pytest.raises(RendezvousError, match="'z' is not known"):
        talk.hub.resume("z")
