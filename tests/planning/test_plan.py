"""The plan as a value: sizes beyond 32 bits, tables, digests, the cache, and layouts of reported faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest
from planning_support import messages, part, plan_of, play, rows, whole, world

from refit_sdk.box import Box
from refit_sdk.errors import PlanError
from refit_sdk.plan import PlanCache, input_digest
from refit_sdk.settings import MIB, Settings
from refit_sdk.topology import Topology
from refit_sdk.world import Manifest, Region, Seat, World

LARGE = (262144, 8960)


def test_more_than_2_to_the_31_elements_plan_right() -> None:
    """262144 × 8960 elements: sizes, offsets and element numbers don't fit 32 bits."""
    sources = [[rows("w", LARGE, i * 65536, (i + 1) * 65536)] for i in range(4)]
    plan = plan_of(world(sources, e=[[part("w", LARGE, Box((0, 0), (262144, 8960)))]]))
    assert plan.totals().nbytes == 2 * 2_348_810_240
    seen = 0
    for message in (m for window in plan.program(4).windows for m in window.recvs):
        (piece,) = message.pieces
        assert piece.box.shape[1] == 8960
        seen += piece.box.size
    assert seen == 2_348_810_240
    assert plan.peak_bytes(4) <= 2 * 64 * MIB


def test_a_tensor_larger_than_a_window_is_cut_by_rows() -> None:
    small = [whole(f"s{i}", 1024, 512, layers=(0, 1)) for i in range(16)]
    sides = world([[*small, whole("big", 40960, 512)]], e=[[*small, whole("big", 40960, 512)]])
    plan = plan_of(sides, window_bytes=4 * MIB)
    assert max(plan.peak_bytes(process) for process in range(2)) <= 2 * 4 * MIB
    assert {piece.box.shape[1] for _, _, message in messages(plan) for piece in message.pieces} == {512}
    assert plan.num_windows <= 1.2 * 14


def test_uneven_shards_and_chunks() -> None:
    """3 sources of 7, 5 and 3 rows, 2 targets, and windows of 2 rows."""
    sources = [[rows("w", (15, 4), a, b)] for a, b in ((0, 7), (7, 12), (12, 15))]
    play(plan_of(world(sources, e=[[rows("w", (15, 4), 0, 8)], [rows("w", (15, 4), 8, 15)]]), window_bytes=16))


def test_hand_made_columns() -> None:
    """Columns of 2, 3, 4 and 5 and rows of 3, 3, 3 and 1, each to a replicated tensor."""
    edges = (0, 2, 5, 9, 14)
    columns = [[part("c", (3, 14), Box((0, a), (3, b)))] for a, b in pairwise(edges)]
    by_rows = [[rows("r", (10, 2), a, min(a + 3, 10))] for a in range(0, 10, 3)]
    both = [a + b for a, b in zip(columns, by_rows, strict=True)]
    play(plan_of(world(both, e=[[whole("c", 3, 14), whole("r", 10, 2)]])))


def test_padding_rows_never_travel() -> None:
    """Vocabulary of 1000 rows: 8 sources of up to 128, 4 targets of up to 252."""
    sources = [[rows("w", (1000, 3), i * 128, min(i * 128 + 128, 1000))] for i in range(8)]
    targets = [[rows("w", (1000, 3), i * 252, min(i * 252 + 252, 1000))] for i in range(4)]
    plan = plan_of(world(sources, e=targets))
    play(plan)
    assert len(plan.moves) == 11
    assert plan.totals().nbytes == 1000 * 3 * 2


def test_uneven_pipeline_stages_and_interleaved_ones() -> None:
    stages = [(0, 3), (3, 5), (5, 6)]
    sources = [[whole("l.{}.w", 4, layers=layers)] for layers in stages]
    plan = plan_of(world(sources, e=[[whole("l.{}.w", 4, layers=(0, 6))]]))
    assert {(move.server, move.box.start[0], move.box.stop[0]) for move in plan.moves} == {
        (0, 0, 3),
        (1, 3, 5),
        (2, 5, 6),
    }
    interleaved = [part("l.{}.w", (4,), *(Box((a + b, 0), (a + b + 2, 4)) for b in (0, 4))) for a in (0, 2)]
    play(plan_of(world([[each] for each in interleaved], e=[[whole("l.{}.w", 4, layers=(0, 8))]])))


def test_views_that_overlap_by_a_row_get_it_once() -> None:
    views = part("w", (6, 2), Box((0, 0), (4, 2)), Box((3, 0), (6, 2)))
    plan = plan_of(world([[whole("w", 6, 2)]], e=[[views]]))
    play(plan)
    assert plan.totals().nbytes == 24


def test_replicas_are_read_as_often_as_they_are_needed() -> None:
    sources = [[rows("w", (8, 2), 4 * (i % 2), 4 * (i % 2) + 4)] for i in range(8)]
    assert plan_of(world(sources, e=[[whole("w", 8, 2)]])).totals().nbytes == 32


def test_an_expert_in_two_slots_arrives_once() -> None:
    doubled = part("e.{}.w", (4,), Box((0, 0), (2, 4)))
    doubled = attrs.evolve(
        doubled, regions=[Region(Box((0, 0), (1, 4)), "bfloat16", copies=2), Region(Box((1, 0), (2, 4)), "bfloat16")]
    )
    assert plan_of(world([[whole("e.{}.w", 4)]], e=[[doubled]])).totals().nbytes == 16


def test_a_member_that_only_sources_have_shifts_nothing() -> None:
    targets = [[whole("l.{}.w", 4, layers=(1, 5))]]
    exact = plan_of(world([[whole("l.{}.w", 4, layers=(1, 5))]], e=targets))
    more = plan_of(world([[whole("l.{}.w", 4, layers=(0, 7)), whole("a", 3), whole("z", 3)]], e=targets), ignore=["*"])
    assert exact.program(1) == more.program(1)
    assert exact.digest == more.digest


def test_a_process_on_both_sides_copies_what_it_has() -> None:
    sides = world([[rows("w", (4, 2), 0, 2)], [rows("w", (4, 2), 2, 4)]], e=[[whole("w", 4, 2)]])
    together = World(0, (*sides.seats[:2], Seat("target", "e", 0, 1)), sides.manifests, sides.manifest_of)
    plan = plan_of(together)
    play(plan)
    (window,) = plan.program(1).windows
    assert [(engine, str(piece.box)) for engine, piece in window.copies] == [("e", "[2:4, 0:2]")]
    assert plan.totals().local_nbytes == plan.totals().nbytes == 8


def test_a_piece_for_two_engines_has_a_message_for_each() -> None:
    sides = world([[whole("w", 4)]], e=[[whole("w", 4)]], f=[[whole("w", 4)]])
    together = World(0, (*sides.seats[:2], Seat("target", "f", 0, 1)), sides.manifests, sides.manifest_of)
    plan = plan_of(together)
    play(plan)
    assert sorted(message.engine for _, _, message in messages(plan)) == ["e", "f"]


def test_pipeline_stages_are_all_busy_in_each_window() -> None:
    """Stage by stage would take four times the windows."""
    sources = [[whole("l.{}.w", 256, 64, layers=(8 * i, 8 * i + 8))] for i in range(4)]
    targets = [[part("l.{}.w", (256, 64), Box((0, 64 * i, 0), (32, 64 * i + 64, 64)))] for i in range(4)]
    plan = plan_of(world(sources, e=targets), window_bytes=64 * 1024)
    best = -(-plan.totals().sent_nbytes // (64 * 1024))
    assert best <= plan.num_windows <= 1.35 * best


def test_plans_differ_in_what_shapes_them() -> None:
    sides = world([[whole("w", 64, 4)]] * 2, e=[[whole("w", 64, 4)]])
    plans = [
        plan_of(sides),
        plan_of(sides, window_bytes=64),
        plan_of(world([[whole("w", 64, 4)]], e=[[whole("w", 64, 4)]])),
    ]
    assert len({plan.digest for plan in plans}) == len(set(plans)) == 3
    assert plan_of(sides) == plans[0] != "a plan"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": Settings(window_ops=3)},
        {"topology": Topology(("a", "b"), (0, 1))},
        {"plugins": {"reshard": "2"}},
        {"world": world([[whole("w", 5)]], e=[[whole("w", 4)]])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_input_digest_has_all_that_shapes_a_plan(change: dict[str, object]) -> None:
    asked = {
        "world": world([[whole("w", 4)]], e=[[whole("w", 4)]]),
        "settings": Settings(),
        "topology": Topology.single(2),
        "plugins": {"reshard": "1"},
    }
    assert input_digest(**asked) == input_digest(**asked)  # type: ignore[arg-type]
    assert input_digest(**asked) != input_digest(**asked | change)  # type: ignore[arg-type]


def test_the_input_digest_does_not_know_the_order_of_ranks() -> None:
    sides = world([[whole("w", 4)], []], e=[[whole("w", 4)]])
    turned = World(0, sides.seats[::-1], sides.manifests[::-1], tuple(2 - i for i in sides.manifest_of[::-1]))
    both = [
        input_digest(each, settings=Settings(), topology=Topology.single(3), plugins={}) for each in (sides, turned)
    ]
    assert both[0] == both[1]


def test_the_cache_keeps_the_last_few_and_no_failures() -> None:
    cache, made = PlanCache(capacity=2), []

    def make() -> object:
        made.append(len(made))
        return made[-1]

    assert [cache.get(key, make) for key in "abacab"] == [0, 1, 0, 2, 0, 3]  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        cache.get("wrong", lambda: plan_of(world([], e=[[whole("w", 4)]])))
    assert cache.get("wrong", make) == 4  # type: ignore[arg-type]


def test_the_table_and_json_tell_what_moves() -> None:
    halves = [part("l.{}.w", (8, 4), Box((0, 4 * i, 0), (2, 4 * i + 4, 4)), dtype="float32") for i in range(2)]
    sources = [[half, whole("n", 4)] for half in halves]
    plan = plan_of(world(sources, e=[[whole("l.{}.w", 8, 4), whole("n", 4)]] * 2))
    told = json.loads(plan.to_json())
    assert [(row["name"], row["tensors"], row["nbytes"]) for row in told["rows"]] == [("l.{}.w", 2, 256), ("n", 1, 16)]
    assert sum(row["share"] for row in told["rows"]) == pytest.approx(1)
    assert told["totals"]["gather_broadcast_nbytes"] == 2 * (128 + 8) + 64
    text = str(plan)
    for words in (
        plan.digest,
        "l.{}.w",
        "float32 → bfloat16",
        "reshard",
        "272 B between",
        "gather-broadcast would move 336 B",
    ):
        assert words in text


ANOTHER_PROCESS = """
from planning_support import part, plan_of, rows, whole, world
sources = [[rows("w", (64, 4), 16 * (i % 4), 16 * (i % 4) + 16), whole("l.{}.n", 8)] for i in range(8)]
engines = {name: [[rows("w", (64, 4), 32 * t, 32 * t + 32), whole("l.{}.n", 8)] for t in range(2)] for name in "ef"}
print(plan_of(world(sources, **engines), window_bytes=256, routes=[("l.1.*", "reshard"), ("*", "reshard")]).digest)
"""


def test_processes_that_hash_differently_make_the_same_plan() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    digests = {
        subprocess.run(
            [sys.executable, "-c", ANOTHER_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_equal_manifests_count_once_and_as_often_as_they_sit() -> None:
    sides = world([[whole("w", 64, 8)]] * 2, e=[[whole("w", 64, 8)]])
    once = World(0, sides.seats, sides.manifests[1:], (0, 0, 1))
    assert plan_of(once) == plan_of(sides)


def test_many_engines_of_many_shapes_count_their_elements() -> None:
    """Groups of families whose best dim to search differs: neighbours in one search must not mix."""
    sources = [
        [whole("a.{}.{}", 4, layers=(0, 9)), whole("b", 2), rows("c", (9, 2), i * 3, i * 3 + 3)] for i in range(3)
    ]
    targets = [
        [
            whole("b", 2),
            part("a.{}.{}", (4,), Box((0, 3 * i, 0), (9, 3 * i + 3, 4))),
            rows("c", (9, 2), 3 * i, 3 * i + 3),
        ]
        for i in range(3)
    ]
    play(plan_of(world(sources, e=targets)))


def test_a_manifest_in_another_order_is_the_same() -> None:
    parts = [whole("b", 4), whole("a", 4)]
    assert np.array_equal(*(plan_of(world([Manifest(p)], e=[Manifest(p)])).steps.start for p in (parts, parts[::-1])))
