"""The kit kills mutants: wrong transports and fabrics, each by the test meant for it. Sound ones pass the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from refit_backends.inproc import InprocFabric
from refit_backends.reshard import Reshard

from refit_sdk import moves as planning
from refit_sdk.settings import Settings
from refit_sdk.testing.cases import Shard, case, cut
from refit_sdk.testing.rig import Rig
from refit_sdk.testing.suites import FabricRules, TransportRules, judge
from refit_sdk.transport import Moves, Steps

sys.path.append(str(Path(__file__).parent))
import wrong_fabrics as wrong

CASE = case("rows to columns", cut((12, 10), 2, Shard(0)), cut((12, 10), 3, Shard(1)))
SMALL = Settings(window_bytes=1024, coalesce_bytes=0)


class Rotated(Reshard):
    """Each process gets what the next one needs."""

    def steps(self, moves: Moves, topology: Any) -> Steps:
        found = super().steps(moves, topology)
        return evolve(found, dst=np.roll(found.dst, 1))


class DroppedTail(Reshard):
    """The last column of each step stays behind."""

    def steps(self, moves: Moves, topology: Any) -> Steps:
        found = super().steps(moves, topology)
        stop = found.stop.copy()
        stop[:, -1] = np.maximum(found.start[:, -1] + 1, stop[:, -1] - 1)
        return evolve(found, stop=stop)


class DoubleWrite(Reshard):
    """The first step is made twice."""

    def steps(self, moves: Moves, topology: Any) -> Steps:
        found = super().steps(moves, topology)
        twice = np.r_[0, np.arange(len(found))]
        return Steps(*(getattr(found, name)[twice] for name in ("move", "start", "stop", "src", "dst", "round")))


class Moody(Reshard):
    """Another order of steps whenever it is asked."""

    turn = 0

    def steps(self, moves: Moves, topology: Any) -> Steps:
        Moody.turn += 1
        found = super().steps(moves, topology)
        turned = np.roll(np.arange(len(found)), Moody.turn)
        return Steps(*(getattr(found, name)[turned] for name in ("move", "start", "stop", "src", "dst", "round")))


def fails(check: Callable[[], Any]) -> bool:
    """Whether a check of the kit fails."""
    try:
        check()
    except Exception:  # noqa: BLE001 - a failing check is the answer
        return True
    return False


@pytest.mark.parametrize("checked", [True, False], ids=["planner-checks", "planner-is-blind"])
@pytest.mark.parametrize("mutant", [Rotated, DroppedTail, DoubleWrite], ids=lambda mutant: mutant.__name__)
def test_wrong_steps_fail_a_push(mutant: type[Reshard], checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the planner's own check, and, were that not there, by the kit's judge."""
    if not checked:
        monkeypatch.setattr(planning, "_check", lambda *args: None)
    assert not fails(lambda: judge(Rig(Reshard(), InprocFabric()).play(CASE)))
    assert fails(lambda: judge(Rig(mutant(), InprocFabric()).play(CASE)))


@pytest.mark.parametrize("mutant", [Rotated, DroppedTail, DoubleWrite], ids=lambda mutant: mutant.__name__)
def test_wrong_steps_fail_the_kits_own_reckoning(mutant: type[Reshard], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over plain indices, without anything moved."""
    monkeypatch.setattr(planning, "_check", lambda *args: None)
    rules = TransportRules()
    assert not fails(lambda: rules.test_every_move_reaches_all_that_need_it_once(Rig(Reshard(), InprocFabric())))
    assert fails(lambda: rules.test_every_move_reaches_all_that_need_it_once(Rig(mutant(), InprocFabric())))


def test_steps_that_depend_on_anything_else_are_seen() -> None:
    rules = TransportRules()
    assert not fails(lambda: rules.test_the_same_moves_give_the_same_steps(Rig(Reshard(), InprocFabric())))
    assert fails(lambda: rules.test_the_same_moves_give_the_same_steps(Rig(Moody(), InprocFabric())))


RULES = FabricRules()
MEANT: dict[str, tuple[type[wrong.Group], Callable[[Rig], Any]]] = {
    "stale window": (wrong.Stale, lambda rig: RULES.test_a_buffer_used_again_brings_new_bytes(rig, 4096)),
    "early acknowledge": (wrong.Early, RULES.test_nothing_is_done_before_its_bytes_are_there),
    "early acknowledge of a send": (wrong.EarlySend, RULES.test_nothing_is_done_before_its_bytes_are_there),
    "silent no-op": (wrong.Silent, RULES.test_messages_of_a_pair_match_in_order),
    "short send": (wrong.Short, RULES.test_large_messages_pass_each_other_whole),
    "reordering": (wrong.Reordering, RULES.test_messages_of_a_pair_match_in_order),
    "bytes not counted": (wrong.NoCount, lambda rig: judge(rig.play(CASE))),
}


@pytest.mark.parametrize("what", MEANT)
def test_a_wrong_fabric_fails_the_test_meant_for_it(what: str) -> None:
    mutant, check = MEANT[what]
    assert not fails(lambda: check(Rig("reshard", wrong.Wrong(wrong.Group))))
    assert fails(lambda: check(Rig("reshard", wrong.Wrong(mutant))))


@pytest.mark.parametrize("what", [what for what in MEANT if what not in ("early acknowledge of a send",)])
def test_a_wrong_fabric_fails_a_push_too(what: str) -> None:
    case_of_many = case("many windows", cut((40, 24), 2, Shard(0)), cut((40, 24), 3, Shard(1)), settings=SMALL)
    assert fails(lambda: judge(Rig("reshard", wrong.Wrong(MEANT[what][0])).play(case_of_many)))
