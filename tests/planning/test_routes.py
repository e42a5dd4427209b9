"""Rules: what patterns match, which rule takes what, and how a rule cuts a family."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_support import plan_of, play, whole, world
from refit_backends.reshard import Reshard

from refit_sdk.box import Box
from refit_sdk.errors import PlanError
from refit_sdk.routes import Pattern, partition


class Other(Reshard):
    """Reshard by another name."""

    name = "other"


PATTERNS = st.lists(st.sampled_from([*"*?", "l.", "w", "1", "0", "[0-2]", "[!1]", "[!a]", ".", "1?"]), max_size=6).map(
    "".join
)


@example(["l.[!a].w"], "l.{}.w")
@example(["l.?.w"], "l.{}.w")
@given(st.lists(PATTERNS, max_size=4), st.sampled_from(["l.{}.w", "{}", "l.{}.e.{}.w1", "w"]))
def test_partition_is_fnmatchcase_of_every_member(texts: list[str], template: str) -> None:
    stacked = template.count("{}")
    members = Box([0, 9][:stacked], [13, 11][:stacked])
    found = {}
    for boxes, rules in partition([Pattern(text) for text in texts], template, (members,)):
        for box in boxes:
            for index in box.points():
                assert index not in found
                found[index] = rules
    names = {index: template.format(*index) for index in members.points()}
    assert found == {
        index: tuple(i for i, text in enumerate(texts) if fnmatchcase(name, text)) for index, name in names.items()
    }


def test_a_rule_that_cuts_a_family_splits_it() -> None:
    sides = world([[whole("l.{}.w", 4, layers=(0, 12))]], e=[[whole("l.{}.w", 4, layers=(0, 12))]])
    plan = plan_of(sides, routes=[("l.1*", "other"), ("*", "reshard")], transports={"other": Other()})
    play(plan)
    assert [(row.transport, row.tensors, row.pattern) for row in plan.rows()] == [
        ("other", 3, "l.1*"),
        ("reshard", 9, "*"),
    ]
    assert {(move.box.start[0], move.box.stop[0]) for move in plan.moves} == {(0, 1), (1, 2), (2, 10), (10, 12)}


def test_a_window_belongs_to_one_transport() -> None:
    sides = world([[whole("l.{}.w", 4, layers=(0, 4))]] * 2, e=[[whole("l.{}.w", 4, layers=(0, 4))]] * 2)
    plan = plan_of(sides, routes=[("l.1.*", "other"), ("*", "reshard")], transports={"other": Other()}, window_bytes=8)
    play(plan)
    used: dict[int, set[str]] = {}
    for step in range(len(plan.steps)):
        used.setdefault(int(plan.steps.window[step]), set()).add(plan.families[int(plan.steps.family[step])].transport)
    assert all(len(transports) == 1 for transports in used.values())
    assert {transport for each in used.values() for transport in each} == {"other", "reshard"}


@pytest.mark.parametrize(
    ("routes", "wrong"),
    [
        pytest.param([("x", "reshard"), ("*", "reshard")], "route 'x' → 'reshard' matches no tensor", id="nothing"),
        pytest.param([("*", "reshard"), ("w", "reshard")], "route 'w' → 'reshard' can never match", id="shadowed"),
        pytest.param(
            [("w", "reshard"), ("v", "reshard"), ("*", "reshard")],
            "route '\\*' → 'reshard' can never match",
            id="by two",
        ),
        pytest.param([("w", "reshard")], "v: no route matches it", id="not total"),
        pytest.param([("*", "nope")], "leads to 'nope'; the transports are reshard", id="unknown"),
    ],
)
def test_routes_that_are_wrong(routes: list[tuple[str, str]], wrong: str) -> None:
    sides = world([[whole("w", 4), whole("v", 4)]], e=[[whole("w", 4), whole("v", 4)]])
    with pytest.raises(PlanError, match=wrong):
        plan_of(sides, routes=routes)


def test_a_cast_rule_that_matches_nothing_is_wrong() -> None:
    sides = world([[whole("w", 4)]], e=[[whole("w", 4)]])
    with pytest.raises(PlanError, match=r"cast 'x' → 'int8' matches no tensor"):
        plan_of(sides, casts=[("x", "int8")])
    with pytest.raises(PlanError, match=r"cast '\*' → 'int9': no such dtype"):
        plan_of(sides, casts=[("*", "int9")])
