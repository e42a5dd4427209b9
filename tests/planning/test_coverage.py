"""Sides that don't fit together: each reason is told, with names and boxes, all in one error, before anything moves."""

from __future__ import annotations

import pytest
from planning_support import part, plan_of, play, rows, whole, world

from refit_sdk.box import Box
from refit_sdk.errors import PlanError
from refit_sdk.world import Part, Region, Seat, World


def violations(world: World, **settings: object) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan_of(world, **settings)
    return list(caught.value.violations)


def test_an_uncovered_region_is_named_with_its_box() -> None:
    sources = [[rows("w", (8, 4), 0, 3)], [rows("w", (8, 4), 5, 8)]]
    assert violations(world(sources, e=[[whole("w", 8, 4)]])) == [
        "w (8, 4): no source holds [3:5, 0:4], which e[0] needs"
    ]


def test_a_name_that_no_source_has_gets_the_nearest() -> None:
    sources = [[whole("model.layers.{}.mlp.up_proj.weight", 4), whole("norm", 2)]]
    targets = [[whole("model.layers.{}.mlp.up_projs.weight", 4), whole("norm", 2)]]
    (found,) = violations(world(sources, e=targets), ignore=["*.up_proj.*"])
    assert found == (
        "model.layers.0.mlp.up_projs.weight … model.layers.1.mlp.up_projs.weight (2 tensors) (4,): e wants it, and no "
        "source has it; the nearest name is model.layers.0.mlp.up_proj.weight … model.layers.1.mlp.up_proj.weight "
        "(2 tensors)"
    )


def test_a_missing_member_is_told_from_the_ones_that_are_there() -> None:
    found = violations(
        world([[whole("l.{}.w", 4, layers=(0, 3))]], e=[[whole("l.{}.w", 4, layers=(1, 4))]]), ignore=["*"]
    )
    assert found == ["l.3.w (4,): e wants it, and no source has it; sources have l.0.w … l.2.w (3 tensors)"]


def test_source_tensors_that_nobody_wants_need_an_ignore() -> None:
    sides = world([[whole("w", 4), whole("mtp.{}.w", 4, layers=(0, 3))]], e=[[whole("w", 4)]])
    (found,) = violations(sides)
    assert found.startswith("mtp.0.w … mtp.2.w (3 tensors): sources have it and no target wants it")
    (found,) = violations(sides, ignore=["mtp.[01].*"])
    assert found.startswith("mtp.2.w: sources have it")
    plan_of(sides, ignore=["mtp.*"])


def test_an_ignored_tensor_that_is_wanted_moves_all_the_same() -> None:
    assert plan_of(world([[whole("w", 4)]], e=[[whole("w", 4)]]), ignore=["*"]).totals().nbytes == 8


def test_shapes_that_disagree_are_told_once() -> None:
    assert violations(world([[whole("w", 64, 4)], [whole("v", 2)]], e=[[whole("w", 128, 4), whole("v", 2)]])) == [
        "w: the shapes disagree, (64, 4) at the sources and (128, 4) at the targets"
    ]


def test_zero_matches_say_to_check_the_prefixes() -> None:
    found = violations(world([[whole("model.w", 4)]], e=[[whole("language_model.model.w", 4)]]))
    assert found[0].startswith(
        "no name matches: targets want 1 tensors (as language_model.model.w), sources have 1 (as model.w)"
    )


def test_an_engine_that_holds_half_of_a_tensor_has_an_incomplete_layout() -> None:
    (found,) = violations(world([[whole("w", 8, 4)]], e=[[rows("w", (8, 4), 0, 4)]]))
    assert found == (
        "w (8, 4): the ranks of e hold 16 of its 32 elements; the layout is incomplete, as when a sharded tensor isn't "
        "marked as one"
    )


def test_each_engine_is_complete_by_itself() -> None:
    halves = [rows("w", (8, 4), 0, 4)], [rows("w", (8, 4), 4, 8)]
    plan_of(world([[whole("w", 8, 4)]], e=list(halves), f=[[whole("w", 8, 4)]]))
    assert len(violations(world([[whole("w", 8, 4)]], e=[halves[0]], f=[halves[1]]))) == 2


@pytest.mark.parametrize(
    ("source", "target", "settings", "wrong"),
    [
        pytest.param("float32", "bfloat16", {}, None, id="narrowing masters is allowed"),
        pytest.param("bfloat16", "float32", {}, None, id="widening is allowed"),
        pytest.param(
            "float32", "float16", {}, "float32 → float16 changes values; declare it", id="float16 must be declared"
        ),
        pytest.param("float32", "float16", {"casts": [("w", "float16")]}, None, id="declared"),
        pytest.param(
            "float32", "float16", {"casts": [("w", "int8"), ("*", "float16")]}, None, id="declared beside another"
        ),
        pytest.param("float32", "bfloat16", {"cast": "never"}, "cast='never' forbids", id="never, narrowing"),
        pytest.param("bfloat16", "float32", {"cast": "never"}, "cast='never' forbids", id="never, widening"),
        pytest.param("int8", "int8", {"cast": "never"}, None, id="never, and none is needed"),
    ],
)
def test_casts(source: str, target: str, settings: dict[str, object], wrong: str | None) -> None:
    sides = world([[whole("w", 4, dtype=source)]], e=[[whole("w", 4, dtype=target)]])
    if wrong is None:
        plan_of(sides, **settings)
    else:
        (found,) = violations(sides, **settings)
        assert found.startswith("w: ")
        assert wrong in found


def test_the_wire_has_the_narrower_dtype() -> None:
    sides = world([[whole("w", 4, dtype="float32")]], e=[[whole("w", 4)]], f=[[whole("w", 4, dtype="float32")]])
    assert {(move.engine, move.nbytes) for move in plan_of(sides).moves} == {("e", 8), ("f", 16)}


def test_replicas_in_several_dtypes_serve_the_targets_own() -> None:
    sources = [[whole("w", 4, dtype="float32")], [whole("w", 4, dtype="bfloat16")]]
    moves = plan_of(world(sources, e=[[whole("w", 4, dtype="bfloat16")]], f=[[whole("w", 4, dtype="float32")]])).moves
    assert {(move.engine, move.server) for move in moves} == {("f", 0), ("e", 1)}


def test_a_rank_wants_an_element_in_one_dtype() -> None:
    both = [Part(whole("w", 4).spec, [Region(Box.whole((4,)), dtype) for dtype in ("bfloat16", "float32")])]
    (found,) = violations(world([[whole("w", 4, dtype="float32")]], e=[both]))
    assert found == "w [0:4]: e[0] has it in several dtypes (bfloat16, float32); let it have one"


def test_a_cut_off_the_granule_is_an_error() -> None:
    sources = [[rows("w", (8, 4), 0, 3, granule=(1, 1))], [rows("w", (8, 4), 3, 8)]]
    found = violations(world(sources, e=[[whole("w", 8, 4, granule=(2, 1))]]))
    assert found == [
        f"w (8, 4): a cut at {box} isn't on the granule (2, 1); both sides must cut at its multiples"
        for box in ("[0:3, 0:4]", "[3:8, 0:4]")
    ]


def test_a_granule_larger_than_the_tensors_edge_is_fine() -> None:
    play(plan_of(world([[whole("w", 5, 4, granule=(128, 128))]], e=[[whole("w", 5, 4)]])))


def test_balance_and_windows_cut_on_granules() -> None:
    sources = [[whole("w", 12, 8, dtype="int8", granule=(4, 8))]] * 3
    plan = plan_of(world(sources, e=[[whole("w", 12, 8, dtype="int8", granule=(2, 4))]]), window_bytes=40)
    play(plan)
    boxes = [box for process in range(3) for w in plan.program(process).windows for m in w.sends for box in m.pieces]
    assert len(boxes) == 3
    assert all(piece.box.start[0] % 4 == 0 and piece.box.shape == (4, 8) for piece in boxes)


def test_replicas_with_different_granules_are_cut_on_both() -> None:
    sources = [[whole("w", 30, dtype="int8", granule=(granule,))] for granule in (2, 3)]
    plan = plan_of(world(sources, e=[[whole("w", 30, dtype="int8")]]), window_bytes=8)
    boxes = [piece.box for p in range(2) for w in plan.program(p).windows for m in w.sends for piece in m.pieces]
    assert sorted(boxes) == [Box((start,), (start + 6,)) for start in (0, 6, 12, 18, 24)]


def test_a_granule_that_fits_no_window_is_an_error() -> None:
    (found,) = violations(world([[whole("w", 8, 4, granule=(4, 4))]], e=[[whole("w", 8, 4)]]), window_bytes=16)
    assert "one granule (4, 4) of bfloat16 is larger than a window of 16 bytes" in found


def test_two_ranks_of_an_engine_in_one_process_are_refused() -> None:
    sides = world([[whole("w", 4)]], e=[[whole("w", 4)], [whole("w", 4)]])
    together = World(0, (*sides.seats[:2], Seat("target", "e", 1, 1)), sides.manifests, sides.manifest_of)
    assert violations(together) == ["process 1 has 2 ranks of e; a process can be one rank of a target"]


@pytest.mark.parametrize(("missing", "seats"), [("source", slice(1, 2)), ("target", slice(0, 1))])
def test_a_side_without_ranks_is_an_error(missing: str, seats: slice) -> None:
    sides = world([[whole("w", 4)]], e=[[whole("w", 4)]])
    (found,) = violations(World(0, sides.seats[seats], sides.manifests, sides.manifest_of[seats]))
    assert found.startswith(f"no {missing} has joined")


def test_everything_wrong_is_in_one_error() -> None:
    sources = [[rows("a", (4,), 0, 2), whole("b", 4), whole("c", 4, dtype="float32"), whole("extra", 4)]]
    targets = [[whole("a", 4), whole("b", 5), whole("c", 4, dtype="int8"), whole("unknown.name", 1)]]
    found = violations(
        world(sources, e=targets), routes=[("none", "reshard"), ("a", "reshard"), ("b", "teleport")], ignore=["x"]
    )
    for words in (
        "a (4,): no source holds [2:4]",
        "b: the shapes disagree",
        "unknown.name (1,): e wants it",
        "extra: sources have it",
        "c: float32 → int8",
        "route 'none' → 'reshard' matches no tensor",
        "c: no route matches it",
        "'teleport'; the transports are reshard",
        "ignore 'x' matches no tensor",
    ):
        assert any(words in line for line in found), (words, found)


def test_a_rank_without_anything_is_idle() -> None:
    plan = plan_of(world([[whole("w", 4)], []], e=[[whole("w", 4)], []]))
    assert [len(plan.program(process).windows) for process in range(4)] == [1, 0, 1, 0]


def test_empty_shards_and_empty_tensors_are_nowhere() -> None:
    sources = [[rows("w", (4,), 0, 4), part("none", (0, 3), Box((0, 0), (0, 3)))], [rows("w", (4,), 4, 4)]]
    targets = [[rows("w", (4,), 0, 4), part("none", (0, 3), Box((0, 0), (0, 3)))], [rows("w", (4,), 4, 4)]]
    assert plan_of(world(sources, e=targets)).totals().nbytes == 8
