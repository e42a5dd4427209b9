"""Tied tensors: a side may have one tensor under two names, and the other two tensors, or one under either name."""

from __future__ import annotations

import pytest
from planning_support import plan_of, rows, whole, world

from refit_sdk.aliases import TiedShare
from refit_sdk.box import Box
from refit_sdk.errors import PlanError
from refit_sdk.plan import Plan
from refit_sdk.world import Manifest

HEAD, EMBED = "lm_head.weight", "model.embed.weight"


def tied(name: str = EMBED, other: str = HEAD) -> Manifest:
    return Manifest([whole(name, 4, 2)], [(other, name)])


def names(plan: Plan) -> list[str]:
    return sorted(move.name for move in plan.moves)


def test_a_source_alias_gives_a_target_its_second_tensor() -> None:
    assert names(plan_of(world([tied()], e=[[whole(EMBED, 4, 2), whole(HEAD, 4, 2)]]))) == [HEAD, EMBED]


def test_a_source_alias_that_nobody_wants_is_fine() -> None:
    assert names(plan_of(world([tied()], e=[[whole(EMBED, 4, 2)]]))) == [EMBED]
    assert names(plan_of(world([tied()], e=[[whole(HEAD, 4, 2)]]))) == [HEAD]


@pytest.mark.parametrize("had", [EMBED, HEAD])
def test_a_tied_target_takes_whichever_name_sources_have(had: str) -> None:
    plan = plan_of(world([[whole(had, 4, 2)]], e=[tied()]))
    assert names(plan) == [had]
    assert plan.tied_checks == ()


def test_both_tied_the_other_way_round_meet_under_the_targets_name() -> None:
    assert names(plan_of(world([tied()], e=[tied(HEAD, EMBED)]))) == [HEAD]


def test_a_tied_target_prefers_its_own_name_and_has_the_other_checked() -> None:
    halves = [rows(HEAD, (4, 2), 0, 2)], [rows(HEAD, (4, 2), 2, 4), whole(EMBED, 4, 2)]
    plan = plan_of(world(list(halves), e=[tied()]))
    assert set(names(plan)) == {EMBED}
    (check,) = plan.tied_checks
    assert check.names == (HEAD, EMBED)
    assert check.shares == (
        TiedShare(0, HEAD, Box((0, 0), (2, 2))),
        TiedShare(1, HEAD, Box((2, 0), (4, 2))),
        TiedShare(1, EMBED, Box((0, 0), (4, 2))),
    )


def test_replicas_of_a_tied_tensor_are_checked_once() -> None:
    (check,) = plan_of(world([[whole(HEAD, 4, 2), whole(EMBED, 4, 2)]] * 3, e=[tied()])).tied_checks
    assert [share.process for share in check.shares] == [0, 0]


def test_sources_that_disagree_on_a_tie_are_checked() -> None:
    plan = plan_of(world([tied(), [whole(HEAD, 4, 2)]], e=[[whole(EMBED, 4, 2), whole(HEAD, 4, 2)]]))
    (check,) = plan.tied_checks
    assert {(share.process, share.name) for share in check.shares} == {(0, EMBED), (1, HEAD)}


def test_a_tie_that_nobody_wants_is_neither_checked_nor_fine() -> None:
    with pytest.raises(PlanError, match=r"model.embed.weight: sources have it and no target wants it"):
        plan_of(world([tied()], e=[[whole("w", 4)]]))


def test_one_member_of_a_family_under_another_name() -> None:
    target = Manifest([whole("mtp.{}.embed", 4, 2, layers=(0, 3))], [(EMBED, "mtp.1.embed")])
    source = [whole(EMBED, 4, 2), whole("mtp.{}.embed", 4, 2, layers=(0, 1)), whole("mtp.2.embed", 4, 2, layers=(2, 3))]
    with pytest.raises(PlanError):
        plan_of(world([source[:2]], e=[target]))
    other = whole("mtp.{}.embed", 4, 2, layers=(2, 3))
    plan = plan_of(world([source[:2], [other]], e=[target]))
    pieces = [piece for w in plan.program(2).windows for message in w.recvs for piece in message.pieces]
    assert sorted(piece.name for piece in pieces) == [EMBED, "mtp.0.embed", "mtp.2.embed"]


def test_routes_match_the_name_that_travels() -> None:
    plan = plan_of(world([[whole(HEAD, 4, 2)]], e=[tied()]), routes=[("lm_head.*", "reshard")])
    assert names(plan) == [HEAD]
