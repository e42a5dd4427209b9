"""What a controller asks for, message by message: engines that are absent, unknown or busy, or dropped in joining."""

from __future__ import annotations

import pytest
from talk import EVERYBODY, FINE, Talk, joined

from refit_sdk import messages
from refit_sdk.coordinator import Coordinator
from refit_sdk.errors import RendezvousError
from refit_sdk.messages import Done, EngineDone
from refit_sdk.states import SessionState


@pytest.fixture
def talk() -> Talk:
    return joined()


def counting(engines: int) -> Talk:
    """A rendezvous that waits for engines of any name."""
    return Talk(Coordinator(engines=engines, deadline=10.0, heartbeat=2.0, now=0.0))


def test_joining_goes_on_without_an_absent_engine_that_was_dropped() -> None:
    talk = Talk()
    for name in EVERYBODY[:-1]:
        talk.enter(name)
    talk.take(talk.hub.drop("b", "its node is down", now=0.0))
    assert talk.hub.engine_states() == {"a": "waiting"}
    talk.form(*EVERYBODY[:-1])
    assert talk.hub.state is SessionState.IDLE
    assert "not of an engine that is waited for" in talk.enter("b[0]").reason  # type: ignore[attr-defined]


def test_joining_goes_on_without_an_engine_that_was_dropped_after_it_came() -> None:
    talk = Talk()
    for name in ("source[0]", "a[0]", "a[1]", "b[0]"):
        talk.enter(name)
    talk.take(talk.hub.drop("b", "it burns", now=0.0))
    assert talk.last("b[0]") == messages.Closed(reason="engine b was dropped: it burns", normal=False)
    assert talk.kinds("a[0]") == ["Welcome"]
    talk.enter("source[1]")
    talk.form(*EVERYBODY[:-1])
    assert talk.hub.state is SessionState.IDLE


def test_with_a_number_of_engines_a_dropped_one_lowers_it() -> None:
    talk = counting(2)
    for name in EVERYBODY:
        if name != "b[0]":
            talk.enter(name)
    talk.take(talk.hub.drop("a", "it burns", now=0.0))
    assert talk.hub.state is SessionState.JOINING
    talk.enter("b[0]")
    talk.form("source[0]", "source[1]", "b[0]")
    assert talk.hub.state is SessionState.IDLE
    assert isinstance(talk.enter("a[0]"), messages.Refused)
    talk.take(talk.hub.admit("a"))
    assert isinstance(talk.enter("a[0]"), messages.Welcome)


@pytest.mark.parametrize("admitted", [True, False])
def test_without_any_engine_joining_waits_for_one_that_is_admitted(admitted: bool) -> None:
    talk = counting(1)
    for name in ("source[0]", "source[1]", "a[0]"):
        talk.enter(name)
    talk.take(talk.hub.drop("a", "it burns", now=0.0))
    assert talk.hub.state is SessionState.JOINING
    if admitted:
        talk.take(talk.hub.admit("b"))
        talk.enter("b[0]")
        talk.form("source[0]", "source[1]", "b[0]")
        assert talk.hub.state is SessionState.IDLE
    else:
        talk.wait(10)
        assert talk.last("source[0]").causes[0] == "any rank of any engine (admit one) didn't join in 10 s"


def test_an_absent_engine_is_dropped_between_pushes(talk: Talk) -> None:
    talk.take(talk.hub.admit("c"))
    assert talk.hub.engine_states()["c"] == "waiting"
    talk.ready("a[0]", "a[1]", "b[0]", "source[0]", "source[1]", require=3)
    assert "engine c hasn't joined" in talk.last("source[0]").causes[0]
    talk.take(talk.hub.drop("c", "it never came", now=0.0))
    assert sorted(talk.hub.engine_states()) == ["a", "b"]
    talk.ready("source[0]", require=3)
    assert "engine c" not in talk.last("source[0]").causes[0]


def test_a_source_that_returns_may_state_the_engines_that_were_stated_at_first(talk: Talk) -> None:
    talk.take(talk.hub.drop("b", "it burns", now=0.0))
    talk.take(talk.hub.admit("c"))
    talk.lose("source[1]")
    assert isinstance(talk.enter("source[1]", engines=("a", "b")), messages.Welcome)


def test_admitting_while_any_engine_may_come_keeps_the_others_in() -> None:
    talk = counting(2)
    talk.enter("a[0]")
    talk.take(talk.hub.admit("c"))
    assert isinstance(talk.enter("b[0]"), messages.Welcome)


@pytest.mark.parametrize("verb", ["pause", "resume", "drop"])
def test_a_name_that_is_not_known_is_an_error_with_the_nearest(talk: Talk, verb: str) -> None:
    talk.take(talk.hub.admit("rollout-0"))
    more = {"reason": "", "now": 0.0} if verb == "drop" else {}
    with pytest.raises(RendezvousError) as caught:
        getattr(talk.hub, verb)("rolout-0", **more)
    assert "engine 'rolout-0' is not known here; known are: a, b, rollout-0" in str(caught.value)
    assert "the nearest is rollout-0: see the name, or admit it" in str(caught.value)


@pytest.mark.parametrize(("verb", "state"), [("pause", "ready"), ("resume", "paused")])
def test_an_absent_engine_is_neither_paused_nor_resumed(talk: Talk, verb: str, state: str) -> None:
    talk.take(talk.hub.admit("c"))
    with pytest.raises(RendezvousError, match=f"'c' hasn't joined, it must be {state}: start its ranks, or drop it"):
        getattr(talk.hub, verb)("c")


def test_what_to_do_where_a_verb_does_not_fit_the_state(talk: Talk) -> None:
    with pytest.raises(RendezvousError, match="'a' is ready, it must be paused: it takes part already"):
        talk.hub.resume("a")
    talk.ready(*EVERYBODY)
    with pytest.raises(RendezvousError, match="'a' is moving, it must be ready: ask again when the push has ended"):
        talk.hub.pause("a")
    talk.done(EngineDone(1, 1, "it failed", mutated=True), "a[0]", "a[1]")
    talk.done(FINE, "b[0]", "source[0]", "source[1]")
    with pytest.raises(RendezvousError, match="'a' is torn, it must be ready: mend it by a push first, or drop it"):
        talk.hub.pause("a")
    talk.lose("a[1]")
    with pytest.raises(RendezvousError, match="'a' is lost, it must be ready: start its ranks again, or drop it"):
        talk.hub.pause("a")


def test_an_engine_is_not_paused_once_a_push_to_it_has_begun(talk: Talk) -> None:
    talk.ready(*EVERYBODY, word=False)
    with pytest.raises(RendezvousError, match="'a' can't be paused now: a push to it has begun"):
        talk.hub.pause("a")
    talk.word(*EVERYBODY)
    talk.done(FINE, *EVERYBODY)
    assert talk.last("a[0]").committed
    talk.take(talk.hub.pause("a"))
    assert talk.hub.engine_states()["a"] == "paused"


def test_nobody_is_asked_to_bring_back_what_was_dropped(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    talk.take(talk.hub.drop("b", "it burns", now=0.0))
    talk.done(FINE, "a[0]", "a[1]", "source[0]", "source[1]")
    causes = talk.last("source[0]").causes
    assert causes == ("b[0]: dropped: it burns", "push again once that is mended")


def test_before_a_push_moves_those_of_a_dropped_engine_hear_that_first_and_the_others_push_again(talk: Talk) -> None:
    talk.ready(*EVERYBODY, word=False)
    talk.take(talk.hub.drop("a", "it burns", now=0.0))
    assert talk.last("b[0]").causes == ("a[0]: dropped: it burns", "push again, without it")
    assert next(kind for kind in talk.kinds("a[1]") if kind in ("Closed", "Fault")) == "Closed"
    talk.ready("b[0]", "source[0]", "source[1]")
    talk.form("b[0]", "source[0]", "source[1]")
    assert talk.last("b[0]").engines == ("b",)


def test_a_lost_rank_is_named_with_what_to_do(talk: Talk) -> None:
    talk.ready(*EVERYBODY)
    assert talk.hub.push is not None
    number = talk.hub.push.number
    talk.lose("b[0]")
    talk.up("a[0]", Done(push=number, engines={"a": FINE}))
    talk.up("a[1]", Done(push=number, engines={"a": FINE}))
    talk.done(FINE, "source[0]", "source[1]")
    again = "start b[0] again, or call reform() on every survivor"
    assert talk.last("source[0]").causes == ("b[0]: it is gone", again)
    assert talk.last("a[0]").committed
    talk.ready("source[0]", version=2)
    assert talk.last("source[0]").causes == ("b[0]: it is gone", again)
