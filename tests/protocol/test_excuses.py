"""Ranks that can't enter a push or a reform: who hears of it and when, and what the next round does."""

from __future__ import annotations

from typing import Any

import pytest
from talk import EVERYBODY, FINE, Talk, joined

from refit_sdk import messages
from refit_sdk.messages import Fault, Unready
from refit_sdk.states import SessionState

CAUSE = "RuntimeError: the optimizer's step isn't done"
TARGETS = ("a[0]", "a[1]", "b[0]")


@pytest.fixture
def talk() -> Talk:
    return joined()


def excuse(talk: Talk, name: str, *, version: int | None = None, kind: Any = "push") -> None:
    version = 1 if version is None and name.startswith("source") and kind == "push" else version
    talk.up(name, Unready(kind=kind, cause=CAUSE, version=version))


def hears(talk: Talk, name: str, of: str) -> bool:
    """Whether the last that a rank heard is the excuse of another: with cause, name and untouched engines."""
    last = talk.last(name)
    if not isinstance(last, Fault):
        return False
    assert (last.error, last.failures) == ("PushError", {of: CAUSE})
    assert last.causes[0] == f"{of}: {CAUSE}"
    assert last.causes[1].startswith("mend it there, then call ")
    assert {verdict.state for verdict in last.engines.values()} == {"untouched"}
    return True


def test_all_who_wait_hear_at_once_that_a_source_cannot_push(talk: Talk) -> None:
    talk.ready("source[0]", *TARGETS)
    excuse(talk, "source[1]")
    assert [name for name in EVERYBODY if hears(talk, name, "source[1]")] == ["source[0]", *TARGETS]
    assert talk.hub.state is SessionState.IDLE
    talk.push(1, *EVERYBODY)
    assert talk.last("b[0]").committed


def test_targets_that_wait_alone_hear_of_a_source_too(talk: Talk) -> None:
    talk.ready("a[0]", "b[0]")
    excuse(talk, "source[1]")
    assert hears(talk, "a[0]", "source[1]")
    assert hears(talk, "b[0]", "source[1]")
    assert not hears(talk, "a[1]", "source[1]")


def test_who_comes_later_to_the_same_push_hears_once(talk: Talk) -> None:
    excuse(talk, "source[1]")
    talk.ready("a[0]", "source[0]")
    assert hears(talk, "source[0]", "source[1]")
    assert hears(talk, "a[0]", "source[1]")
    talk.ready("source[0]", "a[0]")
    talk.ready("source[1]", "a[1]", "b[0]")
    talk.word("a[0]", "source[0]")
    talk.done(FINE, *EVERYBODY)
    assert talk.last("source[0]").committed


def test_an_engine_that_is_left_out_hears_of_no_push(talk: Talk) -> None:
    talk.take(talk.hub.pause("b"))
    excuse(talk, "source[1]")
    talk.ready("b[0]", "a[0]")
    assert hears(talk, "a[0]", "source[1]")
    assert not hears(talk, "b[0]", "source[1]")


def test_a_source_that_comes_with_another_version_is_not_told(talk: Talk) -> None:
    excuse(talk, "source[1]", version=1)
    talk.ready("source[0]", version=2)
    assert not hears(talk, "source[0]", "source[1]")
    assert talk.hub.state is SessionState.GATHERING


def test_who_enters_after_all_is_excused_no_more(talk: Talk) -> None:
    excuse(talk, "source[1]")
    talk.ready("source[1]", "source[0]", *TARGETS)
    talk.done(FINE, *EVERYBODY)
    assert talk.last("source[0]").committed


@pytest.mark.parametrize("who", [("source[0]", "source[1]"), ("a[0]", "a[1]")])
def test_ranks_that_all_excused_themselves_push_again_at_once(talk: Talk, who: tuple[str, str]) -> None:
    for name in who:
        excuse(talk, name)
    talk.push(1, *who, *(name for name in EVERYBODY if name not in who))
    assert talk.last(who[0]).committed


def test_all_who_wait_in_a_push_hear_that_a_target_cannot_take_it(talk: Talk) -> None:
    talk.ready("source[0]", "a[0]", "b[0]")
    excuse(talk, "a[1]")
    assert [name for name in EVERYBODY if hears(talk, name, "a[1]")] == ["source[0]", "a[0]", "b[0]"]
    talk.ready("source[1]")
    assert hears(talk, "source[1]", "a[1]")
    assert talk.hub.state is SessionState.IDLE
    talk.push(1, *EVERYBODY)
    assert talk.last("a[1]").committed


def test_before_a_push_only_the_ranks_of_its_engine_hear_of_a_target(talk: Talk) -> None:
    talk.ready("a[0]", "b[0]")
    excuse(talk, "a[1]")
    assert hears(talk, "a[0]", "a[1]")
    assert not hears(talk, "b[0]", "a[1]")
    talk.ready("a[0]")
    talk.ready("source[0]", "source[1]")
    assert [name for name in ("source[0]", "source[1]", "b[0]") if not hears(talk, name, "a[1]")] == []
    assert len([message for message in talk.heard["a[0]"] if isinstance(message, Fault)]) == 1
    talk.ready("b[0]", "a[1]", "source[0]", "source[1]")
    talk.word("a[0]")
    talk.done(FINE, *EVERYBODY)
    assert talk.last("b[0]").committed


def test_a_rank_of_its_engine_that_comes_later_hears_once(talk: Talk) -> None:
    excuse(talk, "a[1]")
    talk.ready("a[0]")
    assert hears(talk, "a[0]", "a[1]")
    talk.ready("a[0]")
    assert len([message for message in talk.heard["a[0]"] if isinstance(message, Fault)]) == 1


def test_a_push_does_not_care_for_an_engine_that_it_leaves_out(talk: Talk) -> None:
    talk.take(talk.hub.pause("a"))
    talk.ready("source[0]", "b[0]", require=1)
    excuse(talk, "a[1]")
    talk.ready("source[1]", require=1)
    talk.word("source[0]", "b[0]")
    talk.done(FINE, "source[0]", "source[1]", "b[0]")
    assert talk.last("source[0]").committed


def test_nobody_in_a_push_under_way_hears_of_a_late_rank(talk: Talk) -> None:
    talk.lose("a[1]")
    talk.ready("source[0]", "source[1]", "b[0]", require=1)
    talk.enter("a[1]")
    talk.ready("a[0]")
    excuse(talk, "a[1]")
    assert hears(talk, "a[0]", "a[1]")
    assert not [name for name in ("source[0]", "source[1]", "b[0]") if hears(talk, name, "a[1]")]
    talk.form("source[0]", "source[1]", "b[0]")
    talk.done(FINE, "source[0]", "source[1]", "b[0]")
    assert talk.last("b[0]").committed


@pytest.mark.parametrize("early", [True, False], ids=["others wait", "others come later"])
def test_a_reform_fails_at_once_if_a_rank_cannot_take_part(talk: Talk, early: bool) -> None:
    others = [name for name in EVERYBODY if name != "a[1]"]
    if early:
        talk.ready(*others, kind="reform")
    excuse(talk, "a[1]", kind="reform")
    if not early:
        talk.ready(*others, kind="reform")
    assert [name for name in EVERYBODY if hears(talk, name, "a[1]")] == others
    assert "reform() again" in talk.last("b[0]").causes[1]
    assert talk.hub.state is SessionState.IDLE
    talk.ready(*EVERYBODY, kind="reform")
    talk.form(*EVERYBODY)
    assert talk.last("a[1]") == messages.Formed(epoch=2)


def test_a_reform_does_not_care_for_a_push_that_failed(talk: Talk) -> None:
    talk.ready("source[0]", "a[0]", kind="reform")
    excuse(talk, "source[1]")
    talk.ready("source[1]", "a[1]", "b[0]", kind="reform")
    talk.form(*EVERYBODY)
    assert talk.last("source[0]") == messages.Formed(epoch=2)


@pytest.mark.parametrize("kind", ["push", "reform"])
def test_a_push_that_failed_fails_no_reform_nor_the_other_way_round(talk: Talk, kind: str) -> None:
    excuse(talk, "source[1]", kind=kind)
    others = [name for name in EVERYBODY if name != "source[1]"]
    talk.ready(*others, kind="reform" if kind == "push" else "push")
    assert not [name for name in others if hears(talk, name, "source[1]")]


def test_nobody_in_a_reform_that_forms_hears_of_a_late_rank(talk: Talk) -> None:
    talk.lose("a[1]")
    others = ("source[0]", "source[1]", "a[0]", "b[0]")
    talk.ready(*others, kind="reform")
    talk.enter("a[1]")
    excuse(talk, "a[1]", kind="reform")
    assert not [name for name in others if hears(talk, name, "a[1]")]
    talk.form("source[0]", "source[1]", "b[0]")
    assert talk.last("b[0]") == messages.Formed(epoch=2)


def test_nobody_in_a_push_that_forms_hears_of_a_late_source(talk: Talk) -> None:
    talk.lose("source[1]")
    others = ("source[0]", *TARGETS)
    talk.ready(*others, kind="reform")
    talk.form(*others)
    talk.ready(*others, word=False)
    talk.enter("source[1]")
    excuse(talk, "source[1]")
    talk.word(*others)
    talk.done(FINE, *others)
    assert talk.last("b[0]").committed


def test_without_a_source_the_session_stays_broken(talk: Talk) -> None:
    talk.lose("source[1]")
    talk.ready("source[0]", "a[0]", kind="reform")
    excuse(talk, "b[0]", kind="reform")
    assert talk.hub.state is SessionState.BROKEN


def test_an_excuse_ends_with_its_process(talk: Talk) -> None:
    excuse(talk, "b[0]", kind="reform")
    talk.lose("b[0]")
    others = EVERYBODY[:-1]
    talk.ready(*others, kind="reform")
    talk.form(*others)
    assert talk.last("a[1]") == messages.Formed(epoch=2)


def test_a_session_that_is_over_says_so_to_the_excused_too(talk: Talk) -> None:
    talk.take(talk.hub.close("done", normal=True))
    excuse(talk, "b[0]")
    assert isinstance(talk.last("b[0]"), messages.Closed)


def test_a_target_that_is_torn_is_said_to_be(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.done(messages.EngineDone(1, 1, "it failed", mutated=True), "a[0]", "a[1]")
    talk.done(FINE, "b[0]", "source[0]", "source[1]")
    talk.ready("source[0]", version=2)
    excuse(talk, "source[1]", version=2)
    assert {name: v.state for name, v in talk.last("source[0]").engines.items()} == {"a": "torn", "b": "untouched"}


def test_strangers_cannot_excuse_themselves(talk: Talk) -> None:
    assert talk.hub.receive(77, Unready(kind="push", cause=CAUSE, version=1), now=0.0) == []
    assert isinstance(talk.heard["a[0]"][0], messages.Welcome)
