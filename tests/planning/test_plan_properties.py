"""Random small worlds: what is promised of every plan, against NumPy indices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning_support import dtypes, messages, piece_nbytes, plan_of, play, settings, storage, worlds

from refit_sdk.dtypes import itemsize, wire_dtype
from refit_sdk.world import Manifest, Part, World


@given(worlds(), settings())
def test_every_wanted_element_is_written_exactly_once(world: World, limits: dict[str, Any]) -> None:
    arrived = play(plan_of(world, **limits))
    for place, named in storage(world, "target").items():
        for name, where in named.items():
            np.testing.assert_array_equal(arrived[place][name], where.astype(int), err_msg=f"{place} {name}")


@given(worlds(), settings())
def test_only_what_a_process_lacks_travels(world: World, limits: dict[str, Any]) -> None:
    plan = plan_of(world, **limits)
    have, source, target = storage(world, "source"), dtypes(world, "source"), dtypes(world, "target")
    due = 0
    for (process, _), named in storage(world, "target").items():
        for name, where in named.items():
            held = have.get((process, ""), {}).get(name, np.zeros_like(where))
            due += int((where & ~held).sum()) * itemsize(wire_dtype(source[name], target[name]))
    assert sum(message.nbytes for _, _, message in messages(plan)) == due == plan.totals().nbytes
    assert sum(row.nbytes for row in plan.rows()) == due
    assert sum(move.nbytes * len(move.needs) for move in plan.moves) == due


@given(worlds(), settings(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_listed_changes_nothing(world: World, limits: dict[str, Any], random: Any) -> None:
    order = list(range(len(world.seats)))
    random.shuffle(order)
    slots = list(range(len(world.manifests)))
    random.shuffle(slots)
    manifests = [_reversed(world.manifests[slot]) for slot in slots]
    shuffled = World(
        world.epoch,
        tuple(world.seats[i] for i in order),
        tuple(manifests),
        tuple(slots.index(world.manifest_of[i]) for i in order),
    )
    one, other = plan_of(world, **limits), plan_of(shuffled, **limits)
    assert one == other
    assert hash(one) == hash(other)
    assert [one.program(p) for p in range(world.num_processes)] == [
        other.program(p) for p in range(world.num_processes)
    ]


def _reversed(manifest: Manifest) -> Manifest:
    return Manifest([Part(part.spec, part.regions[::-1]) for part in manifest.parts[::-1]], manifest.aliases[::-1])


@given(worlds(), settings())
def test_windows_keep_their_bounds(world: World, limits: dict[str, Any]) -> None:
    plan = plan_of(world, **limits)
    for process in range(world.num_processes):
        sides: dict[str, list[int]] = {"sends": [], "recvs": []}
        for window in plan.program(process).windows:
            assert len(window.sends) + len(window.recvs) <= limits["window_ops"]
            for side, totals in sides.items():
                travelling = getattr(window, side)
                nbytes = sum(piece_nbytes(world, piece) for message in travelling for piece in message.pieces)
                assert nbytes <= limits["window_bytes"]
                totals.append(sum(-(-message.nbytes // 16) * 16 for message in travelling))
        peak = sum(max(totals[turn::2], default=0) for totals in sides.values() for turn in range(2))
        assert plan.peak_bytes(process) == peak


@given(worlds(), settings())
def test_a_pairs_small_pieces_share_a_message_and_large_ones_have_their_own(
    world: World, limits: dict[str, Any]
) -> None:
    packed: Counter[tuple[int, int, int, str]] = Counter()
    for process, window, message in messages(plan_of(world, **limits)):
        if message.pieces[0].nbytes < limits["coalesce_bytes"]:
            packed[process, window, message.peer, message.engine] += 1
            assert all(piece.nbytes < limits["coalesce_bytes"] for piece in message.pieces)
        else:
            assert len(message.pieces) == 1
    assert not packed or max(packed.values()) == 1


@given(worlds())
def test_the_busiest_rank_is_never_below_a_bound(world: World) -> None:
    totals = plan_of(world, ignore=("*",)).totals()
    assert totals.bounds.egress <= totals.sent_nbytes
    assert totals.bounds.ingress <= totals.received_nbytes
    assert totals.bounds.relayed_egress <= totals.bounds.egress
