"""Pictures of a tensor: every box is where it must be on paper, in the row of its side."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from planning_support import part, plan_of, rows, whole, world

from refit_sdk.box import Box
from refit_sdk.errors import RefitError
from refit_sdk.plan import Plan
from refit_sdk.render.drawing import COLOURS

OUTLINE, PAPER = "#eeeeee", "#ffffff"


def drawn(plan: Plan, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The panels, each with its boxes as fractions of its outline (left, top, right, bottom); and all texts."""
    root = ElementTree.fromstring(plan.draw(name))
    panels: list[dict[str, Any]] = []
    for each in root:
        tag = each.tag.rpartition("}")[2]
        if tag != "rect" or each.get("fill") == PAPER:
            continue
        x, y, width, height = (int(each.attrib[key]) for key in ("x", "y", "width", "height"))
        if each.get("fill") == OUTLINE:
            panels.append({"at": (x, y, width, height), "boxes": [], "colours": set()})
        else:
            left, top, wide, high = panels[-1]["at"]
            corners = ((x - left) / wide, (y - top) / high, (x + width - left) / wide, (y + height - top) / high)
            panels[-1]["boxes"].append(corners)
            panels[-1]["colours"].add(each.get("fill"))
    return panels, [each.text or "" for each in root if each.tag.endswith("text")]


def near(found: list[tuple[float, ...]], wanted: list[tuple[float, ...]]) -> bool:
    return len(found) == len(wanted) and all(
        abs(a - b) < 0.06
        for one, other in zip(sorted(found), sorted(wanted), strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_rows_above_and_columns_below() -> None:
    shape = (12, 8)
    columns = [[part("w", shape, Box((0, a), (12, b)))] for a, b in pairwise((0, 2, 8))]
    plan = plan_of(world([[rows("w", shape, a, b)] for a, b in pairwise((0, 3, 6, 12))], e=columns))
    panels, texts = drawn(plan, "w")
    wanted = [(0, 0, 1, 1 / 4), (0, 1 / 4, 1, 1 / 2), (0, 1 / 2, 1, 1), (0, 0, 1 / 4, 1), (1 / 4, 0, 1, 1)]
    assert [near(panel["boxes"], [box]) for panel, box in zip(panels, wanted, strict=True)] == [True] * 5
    assert texts == [
        "w  12×8",
        *(f"source[{n}]" for n in range(3)),
        "e[0]",
        "e[1]",
        "dim 0 runs down, dim 1 runs across",
    ]
    tops = [panel["at"][1] for panel in panels]
    assert tops == [tops[0]] * 3 + [tops[3]] * 2
    assert tops[3] > tops[0] + panels[0]["at"][3]
    assert [panel["colours"] for panel in panels] == [{COLOURS[n]} for n in (0, 1, 2, 0, 1)]
    assert panels[0]["at"][2] * 12 == pytest.approx(panels[0]["at"][3] * 8, rel=0.05)


def test_ranks_that_hold_the_same_share_a_panel_and_several_boxes_are_all_drawn() -> None:
    shape = (8, 4)
    strided = [[part("w", shape, Box((a, 0), (a + 2, 4)), Box((a + 4, 0), (a + 6, 4)))] for a in (0, 2)]
    plan = plan_of(world([[whole("w", 8, 4, layers=(0, 0))]] * 6, a=strided, b=[[whole("w", 8, 4, layers=(0, 0))]]))
    panels, texts = drawn(plan, "w")
    assert texts[1:-1] == ["source[0, 1, 2, …, 5]", "a[0]", "a[1]", "b[0]"]
    assert near(panels[2]["boxes"], [(0, 1 / 4, 1, 1 / 2), (0, 3 / 4, 1, 1)])


def test_a_member_of_a_family_is_drawn_by_its_own_name() -> None:
    halves = [[part("layers.{}.w", (4, 2), Box((n, 0, 0), (n + 2, 4, 2)))] for n in (0, 2)]
    plan = plan_of(world(halves, e=[[whole("layers.{}.w", 4, 2, layers=(0, 4))]]))
    assert drawn(plan, "layers.1.w")[1][1:3] == ["source[0]", "e[0]"]
    assert drawn(plan, "layers.2.w")[1][1:3] == ["source[1]", "e[0]"]


@pytest.mark.parametrize(
    ("shape", "cut", "told"),
    [
        ((), None, "s"), ((6,), 0, "dim 0 runs across"),
        ((2, 8, 3, 6), 3, "dim 0 runs down, dim 3 runs across; dims 1, 2 aren't drawn"),
        ((2, 8, 4), 1, "dim 0 runs down, dim 1 runs across; dims 2 aren't drawn"),
    ],
)  # fmt: skip
def test_any_number_of_dims(shape: tuple[int, ...], cut: int | None, told: str) -> None:
    box = Box.whole(shape)
    boxes = [box] if cut is None else [box.narrow(cut, 0, 2), box.narrow(cut, 2, shape[cut])]
    panels, texts = drawn(plan_of(world([[part("w", shape, b)] for b in boxes], e=[[part("w", shape, box)]])), "w")
    assert len(panels) == len(boxes) + 1
    assert told in texts[-1] or shape == ()


def test_a_name_that_nobody_holds_is_refused() -> None:
    plan = plan_of(world([[rows("w", (4, 2), 0, 4)]], e=[[rows("w", (4, 2), 0, 4)]]))
    with pytest.raises(RefitError, match="no rank of the plan holds 'v'; it has w"):
        plan.draw("v")


def test_names_with_signs_of_xml_stay_text() -> None:
    name = "a<b>&c"
    plan = plan_of(world([[rows(name, (4, 2), 0, 4)]], e=[[rows(name, (4, 2), 0, 4)]]))
    assert drawn(plan, name)[1][0].startswith(name)
