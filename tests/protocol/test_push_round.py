"""One push as the rendezvous follows it: first causes, hearsay, verdicts, and who is waited for."""

from __future__ import annotations

import pytest

from refit_sdk.messages import Done, EngineDone
from refit_sdk.push import EnginePart, PushRound
from refit_sdk.states import PushState

FINE = EngineDone(8, 8)
WROTE = EngineDone(0, 4, mutated=True)
SOURCES = {1: "source[0]", 2: "source[1]"}


def a_push(*, require: int = 0, torn: bool = False, sources: dict[int, str] | None = None) -> PushRound:
    """Sources 1 and 2, the engine `a` of 3 and 4, the engine `b` of 5; they serve version 6, and 7 is pushed."""
    parts = [EnginePart("a", {3: "a[0]", 4: "a[1]"}, 6, torn=torn), EnginePart("b", {5: "b[0]"}, 6)]
    return PushRound(1, version=7, require=require, sources=sources or SOURCES, parts=parts)


def says(push: PushRound, link: int, said: EngineDone = FINE, *, of: str = "ab") -> list[str]:
    """A rank's word of the engines it is in; the engines that fail by it."""
    mine = [name for name in of if link in push.sources or link in push.parts[name].names]
    return [part.name for part in push.done(link, Done(push=1, engines=dict.fromkeys(mine, said)))]


def failed(cause: str, *, mutated: bool = False, lost: str = "") -> EngineDone:
    return EngineDone(0, 0, cause, mutated, lost)


def test_complete_when_every_rank_of_the_engine_confirmed() -> None:
    push = a_push()
    says(push, 3)
    assert push.decide() == []
    says(push, 4)
    (decided,) = push.decide()
    assert (decided.name, decided.verdict.state, decided.verdict.version) == ("a", PushState.COMPLETE, 7)
    assert not push.ended


def test_the_push_ends_when_the_sources_have_spoken_too() -> None:
    push = a_push()
    for link in (3, 4, 5, 1):
        says(push, link)
    push.decide()
    assert (push.ended, push.silent) == (False, {2})
    says(push, 2)
    assert push.ended
    assert push.committed


@pytest.mark.parametrize(
    ("first", "other", "torn", "state", "version"),
    [
        (failed("x"), FINE, False, PushState.UNTOUCHED, 6),
        (failed("x"), WROTE, False, PushState.TORN, None),
        (failed("x", mutated=True), FINE, False, PushState.TORN, None),
        (failed("x"), FINE, True, PushState.TORN, None),
        (FINE, FINE, True, PushState.COMPLETE, 7),
    ],
    ids=["nobody wrote", "the other wrote", "it wrote", "torn before", "torn before, whole now"],
)
def test_what_an_engine_is_after_a_failure(
    first: EngineDone, other: EngineDone, torn: bool, state: PushState, version: int | None
) -> None:
    push = a_push(torn=torn)
    says(push, 3, first)
    says(push, 4, other)
    push.decide()
    verdict = push.verdicts["a"]
    assert (verdict.state, verdict.version) == (state, version)


def test_an_engine_that_lost_a_rank_is_torn() -> None:
    push = a_push()
    says(push, 3)
    assert [part.name for part in push.lost(4, "it is gone")] == ["a"]
    push.decide()
    assert push.verdicts["a"].state == PushState.TORN
    assert push.verdicts["a"].cause == "a[1]: it is gone"


def test_a_lost_source_fails_every_engine_that_is_not_decided() -> None:
    push = a_push()
    says(push, 5)
    push.decide()
    assert [part.name for part in push.lost(2, "it is gone")] == ["a"]
    assert push.source_lost
    assert push.verdicts["b"].state == PushState.COMPLETE
    assert push.failures == {"source[1]": "it is gone"}


def test_the_first_cause_stays() -> None:
    push = a_push()
    assert says(push, 3, failed("no kernel")) == ["a"]
    assert says(push, 4, failed("also bad")) == []
    assert push.lost(1, "it is gone")[0].name == "b"
    assert push.parts["a"].cause == "a[0]: no kernel"
    assert push.failures == {"a[0]": "no kernel", "source[0]": "it is gone"}


def test_hearsay_names_the_rank_that_it_is_about() -> None:
    push = a_push()
    says(push, 3, failed("a[0] waited for it", lost="source[1]"))
    assert push.failures == {"source[1]": "a[0] waited for it"}


def test_the_word_of_the_rendezvous_replaces_hearsay() -> None:
    push = a_push()
    assert says(push, 3, failed("a[0] lost it", lost="a[1]")) == ["a"]
    assert push.lost(4, "no sign of life") == []
    assert push.failures == {"a[1]": "no sign of life"}


def test_who_is_blamed_is_believed_of_itself() -> None:
    push = a_push()
    assert says(push, 3, failed("a[0] lost it", lost="source[0]")) == ["a"]
    assert says(push, 1, failed("a value overflows"), of="a") == []
    assert push.parts["a"].cause == "source[0]: a value overflows"


def test_a_verdict_of_hearsay_waits_for_the_source_that_is_accused() -> None:
    push = a_push()
    says(push, 1, of="b")
    says(push, 5, failed("b[0] lost it", lost="source[1]+c[0]"))
    assert push.decide() == []
    says(push, 2, failed("w: a finite value became infinite"), of="b")
    (decided,) = push.decide()
    assert decided.cause == "source[1]: w: a finite value became infinite"


def test_a_verdict_of_hearsay_does_not_wait_for_the_lost() -> None:
    push = a_push()
    says(push, 5, failed("b[0] lost it", lost="source[1]"))
    push.lost(2, "it is gone")
    (decided,) = push.decide()
    assert decided.cause == "source[1]: it is gone"


def test_who_is_blamed_and_blames_another_passes_it_on() -> None:
    push = a_push()
    says(push, 3, failed("a[0] waited for it", lost="source[0]"))
    says(push, 1, failed("source[0] waited for it", lost="a[1]"), of="a")
    push.lost(4, "no word")
    assert push.parts["a"].cause == "a[1]: no word"


def test_a_rank_that_is_fine_does_not_clear_the_blame_on_it() -> None:
    push = a_push()
    says(push, 3, failed("a[0] lost it", lost="source[0]"))
    says(push, 1, of="a")
    assert push.parts["a"].cause == "source[0]: a[0] lost it"


def test_what_a_rank_was_told_is_not_its_own_word() -> None:
    push = a_push()
    says(push, 3, failed("a[0] lost it", lost="source[0]"))
    says(push, 1, failed("source[0]: a[0] lost it"), of="a")
    assert push.lost(1, "it is gone")[0].name == "b"
    assert push.parts["a"].cause == "source[0]: it is gone"


def test_hearsay_alone_is_told_with_those_who_are_still_silent() -> None:
    push = a_push()
    says(push, 1, of="a")
    says(push, 3, failed("a[0] lost it", lost="a[1]"))
    says(push, 4, failed("a[1]: a[0] lost it"))
    push.decide()
    assert push.verdicts["a"].cause == "a[1]: a[0] lost it; no word yet from source[1], b[0]"


def test_the_loss_of_another_does_not_replace_what_a_rank_said_of_itself() -> None:
    push = a_push()
    says(push, 3, failed("no kernel"))
    push.lost(4, "it is gone")
    assert push.parts["a"].cause == "a[0]: no kernel"


def test_the_deadline_names_all_who_are_silent() -> None:
    push = a_push()
    says(push, 3)
    says(push, 5)
    push.decide()
    (late,) = push.expire(2.0)
    assert late.cause == "source[0]: no word from source[0], source[1], a[1] in 2 s"
    assert push.expired


def test_nothing_said_after_the_verdict_changes_it() -> None:
    push = a_push()
    says(push, 3)
    says(push, 4)
    push.decide()
    assert says(push, 1, failed("too late"), of="a") == []
    push.lost(4, "it is gone")
    assert push.verdicts["a"].state == PushState.COMPLETE
    assert push.parts["a"].cause == ""


def test_words_of_unknown_engines_are_ignored() -> None:
    push = a_push()
    assert push.done(1, Done(push=1, engines={"z": failed("x")})) == []


@pytest.mark.parametrize(
    ("require", "complete", "committed"),
    [(0, 2, True), (0, 1, False), (1, 1, True), (1, 0, False), (2, 1, False)],
)
def test_committed_when_as_many_engines_as_required_are_complete(require: int, complete: int, committed: bool) -> None:
    push = a_push(require=require)
    for link in (3, 4, 5):
        fine = {2: True, 1: link == 5, 0: False}[complete]
        says(push, link, FINE if fine else failed("x"))
    push.decide()
    assert push.committed is committed


def test_a_process_on_both_sides_has_both_names_and_its_bytes_are_counted_once() -> None:
    push = a_push(sources={1: "source[0]", 3: "source[1]"})
    assert push.name(3) == "source[1]+a[0]"
    says(push, 3)
    assert push.ranks() == {"a[0]": (0, 8), "source[1]": (16, 0)}
    assert push.ranks(["b"]) == {}
