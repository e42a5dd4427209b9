"""What transports answer: relays in rounds, refusals by capability, and answers that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from hypothesis import given
from planning_support import plan_of, play, rows, settings, storage, whole, world, worlds
from refit_backends.reshard import Reshard

from refit_sdk.errors import PluginError, UnsupportedMoveError
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Moves, Steps
from refit_sdk.windows import DEEP, LAG
from refit_sdk.world import World


class Chain:
    """Each move goes to the first process that needs it, from that to the second, and so on: one round each."""

    name = "chain"
    capabilities: ClassVar[Capabilities] = Capabilities(copies="one")

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        count = np.diff(moves.need_start)
        move = np.repeat(np.arange(len(moves)), count)
        place = np.arange(len(move)) - moves.need_start[:-1][move]
        src = np.where(place == 0, moves.server[move], moves.need[np.maximum(np.arange(len(move)) - 1, 0)])
        return Steps(move, moves.start[move], moves.stop[move], src, moves.need, place)


class Through(Chain):
    """Each move goes to the lowest holder that doesn't serve it first, if there is one, and from there to the needs."""

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        direct = Reshard().steps(moves, topology)
        via = np.array([moves.holder[moves.holder_start[i]] for i in range(len(moves))])
        more = np.flatnonzero(via != moves.server)
        gather = Steps(more, moves.start[more], moves.stop[more], moves.server[more], via[more], np.zeros_like(more))
        late = attrs.evolve(direct, src=via[direct.move], round=np.ones_like(direct.move))
        return Steps(*(np.concatenate(both) for both in zip(attrs.astuple(gather), attrs.astuple(late), strict=True)))


@pytest.mark.parametrize("transport", [Chain()], ids=["chain"])
def test_relays_deliver_once_in_rounds(transport: Any) -> None:
    @given(worlds(), settings())
    def check(world: World, limits: dict[str, Any]) -> None:
        plan = plan_of(world, routes=[("*", "chain")], transports={"chain": transport}, **limits)
        arrived = play(plan)
        for place, named in storage(world, "target").items():
            for name, where in named.items():
                np.testing.assert_array_equal(arrived[place][name], where.astype(int))

    check()


def test_later_rounds_go_on_beside_earlier_ones_of_other_moves() -> None:
    sides = world([[whole("w", 64, 8)]], e=[[whole("w", 64, 8)]] * 3)
    plan = plan_of(sides, routes=[("*", "chain")], transports={"chain": Chain()}, window_bytes=128, coalesce_bytes=0)
    play(plan)
    assert plan.num_windows <= DEEP * 16 // 15 + 2 * LAG + 1


def test_gathering_to_a_source_goes_through_the_engines_group() -> None:
    sides = world([[rows("w", (4, 2), 0, 4)], [rows("w", (4, 2), 0, 4)]], e=[[whole("w", 4, 2)]])
    plan = plan_of(sides, routes=[("*", "chain")], transports={"chain": Through()})
    for process in range(3):
        for window in plan.program(process).windows:
            assert {message.engine for message in (*window.sends, *window.recvs)} == {"e"}


def broken(change: Callable[[Steps], Steps]) -> Any:
    class Broken(Reshard):
        name = "broken"

        def steps(self, moves: Moves, topology: Topology) -> Steps:
            return change(super().steps(moves, topology))

    return Broken()


def _without(steps: Steps, row: int) -> Steps:
    return Steps(*(np.delete(array, row, axis=0) for array in attrs.astuple(steps)))


def _again(steps: Steps) -> Steps:
    return Steps(*(np.concatenate((array, array[:1])) for array in attrs.astuple(steps)))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        pytest.param(lambda s: _without(s, -1), "doesn't bring all of a move", id="a step is missing"),
        pytest.param(
            lambda s: attrs.evolve(s, stop=s.stop - [[1, 0]]), "doesn't bring all of a move", id="tail is dropped"
        ),
        pytest.param(_again, "sends an element to a process twice", id="double write"),
        pytest.param(
            lambda s: attrs.evolve(s, start=s.start + 1, stop=s.stop + 1), "sends what isn't in the move", id="rotated"
        ),
        pytest.param(
            lambda s: attrs.evolve(s, src=s.dst[::-1].copy()),
            "relays what hasn't arrived by then",
            id="relay too early",
        ),
        pytest.param(
            lambda s: attrs.evolve(s, src=np.full_like(s.src, 3)),
            "isn't a source or of the move's engine",
            id="other engine",
        ),
        pytest.param(
            lambda s: attrs.evolve(s, src=np.full_like(s.src, 9)), "isn't a source or of the move's engine", id="nobody"
        ),
    ],
)
def test_a_wrong_answer_is_caught_at_planning(change: Callable[[Steps], Steps], wrong: str) -> None:
    sides = world([[whole("w", 4, 2)]], e=[[whole("w", 4, 2)], [whole("w", 4, 2)]], f=[[whole("v", 4, 2)]])
    sides = attrs.evolve(
        sides,
        manifests=(attrs.evolve(sides.manifests[0], parts=[whole("w", 4, 2), whole("v", 4, 2)]), *sides.manifests[1:]),
    )
    with pytest.raises(PluginError, match=wrong) as caught:
        plan_of(sides, routes=[("w", "broken"), ("v", "reshard")], transports={"broken": broken(change)})
    assert caught.value.plugin == "broken"


@pytest.mark.parametrize(
    ("able", "need"),
    [
        pytest.param(Capabilities(max_ndim=2), "3 dims (at most 2)", id="dims"),
        pytest.param(Capabilities(dtypes=frozenset({"int8"})), "dtype bfloat16 (only int8)", id="dtype"),
        pytest.param(Capabilities(casts=False), "a cast float32 → bfloat16", id="cast"),
        pytest.param(Capabilities(max_sources=1), "2 sources (at most 1)", id="sources"),
        pytest.param(Capabilities(max_targets=0), "1 targets (at most 0)", id="targets"),
    ],
)
def test_what_a_transport_cannot_do_is_refused_at_planning(able: Capabilities, need: str) -> None:
    class Limited(Reshard):
        name = "limited"
        capabilities = able

    sides = world([[whole("l.{}.w", 4, 2, dtype="float32")]] * 2, e=[[whole("l.{}.w", 4, 2)]])
    with pytest.raises(UnsupportedMoveError) as caught:
        plan_of(sides, routes=[("*", "limited")], transports={"limited": Limited()})
    assert (caught.value.transport, caught.value.need) == ("limited", need)
