"""The suites that a transport's or a fabric's own tests subclass: pushes of every case, and each kind's own rules.

    class TestAcme(TransportSuite):
        transport = "acme"

`transport` and `fabric` are names of plug-ins, classes, or objects; `device` is where the tensors are. Both suites play
every case; `TransportSuite` then looks at the steps, `FabricSuite` at what single messages and lost peers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from refit_sdk.errors import UnsupportedMoveError
from refit_sdk.fabric import within_process
from refit_sdk.testing import reckoning, talks
from refit_sdk.testing.cases import Case, Tier, catalogue, needed
from refit_sdk.testing.machine import check_pushes
from refit_sdk.testing.member import SURE
from refit_sdk.testing.rig import MOST_PROCESSES, FabricLike, Played, Rig, asked, made, plan_of
from refit_sdk.testing.support import Row
from refit_sdk.transport import Moves, Steps, Transport

Pair = tuple[Any, Any]


class _Suite:
    """What all suites have: a rig for each pair of transport and fabric that is tried."""

    transport: ClassVar[str | Transport | type[Any]] = "reshard"
    fabric: ClassVar[FabricLike] = "inproc"
    device: ClassVar[str] = "cpu"
    processes: ClassVar[int] = MOST_PROCESSES
    """Processes that the fabric can join here; larger cases are not run."""
    tier: ClassVar[Tier] = "quick"
    one_in: ClassVar[int] = 1
    """Of so many cases one is played: for variants of what is tried whole elsewhere."""

    @classmethod
    def pairs(cls, config: pytest.Config) -> list[Pair]:
        """The transports and fabrics to try."""
        return [(cls.transport, cls.fabric)]

    @classmethod
    def option(cls, config: pytest.Config, name: str) -> Any:
        """An option of the kit's plug-in, or the suite's own word where it isn't given."""
        return config.getoption(f"refit_{name}", None) or getattr(cls, name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for each pair, and for each case of the tier."""
        assert metafunc.cls is not None
        if "rig" in metafunc.fixturenames:
            pairs = metafunc.cls.pairs(metafunc.config)
            labels = [f"{_name(transport)} over {_name(fabric)}" for transport, fabric in pairs]
            metafunc.parametrize("rig", pairs, ids=labels, indirect=True, scope="class")
        if "case" in metafunc.fixturenames:
            cases = catalogue(self.option(metafunc.config, "tier"))[:: self.one_in]
            metafunc.parametrize("case", cases, ids=[case.id for case in cases])

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, request: pytest.FixtureRequest) -> Iterator[Rig]:
        """One transport over one fabric, and the ranks that are played by."""
        transport, fabric = request.param
        found = transport() if isinstance(transport, type) else transport
        rig = Rig(found, fabric, device=cls.option(request.config, "device"))
        yield rig
        rig.close()

    @pytest.fixture(autouse=True)
    def _usable(self, request: pytest.FixtureRequest) -> None:
        if "rig" in request.fixturenames and "case" not in request.fixturenames:
            reason = request.getfixturevalue("rig").missing()
            if reason:
                pytest.skip(f"not run here: {reason}")


def _name(plugin: Any) -> str:
    return plugin if isinstance(plugin, str) else getattr(plugin, "name", type(plugin).__name__)


class Pushes(_Suite):
    """Every case, pushed twice: bit-exact, nothing else written, every byte counted."""

    def test_moves(self, rig: Rig, case: Case, request: pytest.FixtureRequest) -> None:
        """Moved, or refused at planning, where a case may be."""
        row = Row(rig.label, case.group, case.id)
        reason = rig.missing() or self._too_large(case, request.config)
        if reason:
            request.node.user_properties.append(row.property("not run here", reason))
            pytest.skip(f"not run here: {reason}")
        try:
            played = rig.play(case)
        except UnsupportedMoveError as refusal:
            if case.required or not refusal.need:
                raise
            request.node.user_properties.append(row.property("refused", refusal.need))
            return
        judge(played)
        request.node.user_properties.append(row.property("moved", ""))

    def _too_large(self, case: Case, config: pytest.Config) -> str | None:
        most, wanted = int(self.option(config, "processes")), len(case.processes)
        return f"{wanted} processes, and at most {most} can be joined" if wanted > most else None

    def test_pushes_in_any_order_with_any_trouble(self, rig: Rig) -> None:
        """A state machine of sessions: pushes, lost bytes, moved storage, dropped engines, in any order."""
        check_pushes(rig)


def judge(played: Played) -> None:
    """Fail unless every process found its bytes right, and as many came as planned, on the links that were planned."""
    case, outcomes = played.case, played.outcomes
    faults = [f"process {i}: {fault}" for i, each in enumerate(outcomes) for fault in each.faults]
    assert faults == []
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []
    assert played.arrived() == played.planned(), "bytes that the kit counted at receivers, against the plan"
    assert played.sent() == played.planned(), "bytes that the kit counted at senders, against the plan"
    assert [outcome.arrived for outcome in outcomes] == [
        sum(nbytes for link, nbytes in played.arrived().items() if link[2] == process)
        for process in range(len(outcomes))
    ]
    assert played.plan.num_windows >= case.windows
    check_copies(played)


def check_copies(played: Played) -> None:
    """Fail unless bytes crossed as often as the transport's record says."""
    classes = reckoning.classes_of(played.plan)
    total = sum(played.arrived().values())
    if classes == {"direct"}:
        assert total == needed(played.case), "bytes that arrived, against those needed, counted by element"
    if played.case.nbytes is not None:
        return  # tied tensors have two names, by which nothing here can be counted element by element
    assert total >= needed(played.case)
    if classes == {"domain"}:
        for place, (crossed, unique) in reckoning.crossings(played).items():
            assert crossed <= unique * 1.01 + 1, f"{crossed} bytes crossed into {place}, which needs {unique}"
    if classes == {"one"}:
        left, unique = reckoning.leaving(played)
        assert left <= unique * 1.01 + 1, f"{left} bytes left the sources, of {unique} that are needed"


class _Recording:
    """A transport that keeps what it was asked and what it said."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.calls: list[tuple[Moves, Any, Steps]] = []
        self.name, self.capabilities = inner.name, inner.capabilities

    def steps(self, moves: Moves, topology: Any) -> Steps:
        """The inner one's, kept."""
        for array in (moves.start, moves.stop, moves.server, moves.need, moves.need_start, moves.holder):
            array.setflags(write=False)
        answer = self.inner.steps(moves, topology)
        self.calls.append((moves, topology, answer))
        return answer


class TransportRules(_Suite):
    """What a transport's steps must be, whatever carries them."""

    def _asked(self, rig: Rig) -> tuple[Transport, list[Any]]:
        if len(asked(rig.transport)) > 1:
            pytest.skip(f"not run here: {rig.transport!r} has no steps of its own")
        (inner,) = asked(rig.transport)
        calls = []
        for case in catalogue():
            recording = _Recording(inner)
            try:
                plan_of(case, cast(Transport, recording))
            except UnsupportedMoveError:
                continue
            calls += recording.calls
        assert calls, "the transport refused every case"
        return inner, calls

    def test_the_same_moves_give_the_same_steps(self, rig: Rig) -> None:
        """Asked again, in another order of questions, by another object, a transport says the same."""
        inner, calls = self._asked(rig)
        other = type(inner)() if _is_plain(inner) else inner
        for moves, topology, answer in reversed(calls):
            again = other.steps(moves, topology)
            for name in ("move", "start", "stop", "src", "dst", "round"):
                assert np.array_equal(getattr(again, name), getattr(answer, name)), name

    def test_every_move_reaches_all_that_need_it_once(self, rig: Rig) -> None:
        """Played over plain indices: each element comes once, from who has it by then."""
        _, calls = self._asked(rig)
        assert [wrong for moves, _, steps in calls for wrong in reckoning.misdelivered(moves, steps)] == []

    def test_plans_are_the_same_in_another_process(self, rig: Rig) -> None:
        """With another seed of Python's hashes, the plan's digest is the same."""
        if not isinstance(rig.transport, str):
            pytest.skip("not run here: only a plug-in's name means something in another process")
        cases = catalogue()[:: max(1, len(catalogue()) // 12)]
        ours = reckoning.digests(rig.transport, [case.id for case in cases])
        assert reckoning.digests_elsewhere(rig.transport, [case.id for case in cases]) == ours


def _is_plain(transport: Any) -> bool:
    return not getattr(transport, "__dict__", None)


class FabricRules(_Suite):
    """What a fabric's messages must be, whatever is planned, and what it says of peers that fail."""

    def test_messages_of_a_pair_match_in_order(self, rig: Rig) -> None:
        """Whatever their lengths."""
        assert rig.talk(talks.in_order, (0, 1)) == [[2, 2, 1], ([2, 2, 1], [[1, 2], [3, 4], [5]])]

    def test_many_messages_of_a_pair_match_in_order(self, rig: Rig) -> None:
        """Five hundred at once."""
        assert rig.talk(talks.many, (0, 1), 500) == [[], []]

    def test_large_messages_pass_each_other_whole(self, rig: Rig) -> None:
        """To the last byte, and neither waits for the other."""
        assert rig.talk(talks.large, (0, 1)) == [True, True]

    def test_what_is_posted_goes_on_while_nobody_waits(self, rig: Rig) -> None:
        """Two windows are posted before the first is waited for."""
        assert rig.talk(talks.unwaited, (0, 1)) == [True, True]

    @pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20], ids="{}-bytes".format)
    def test_a_buffer_used_again_brings_new_bytes(self, rig: Rig, nbytes: int) -> None:
        """A buffer that is done may be read, and written, at once."""
        assert rig.talk(talks.again, (0, 1), 60, nbytes) == [[], []]

    def test_nothing_is_done_before_its_bytes_are_there(self, rig: Rig) -> None:
        """A receive that nobody has sent to, and a large send that nobody receives, wait."""
        assert rig.talk(talks.early, (0, 1)) == [False, False]

    def test_all_pairs_at_once_in_both_directions(self, rig: Rig) -> None:
        """Nobody waits for another pair."""
        assert rig.talk(talks.all_pairs, (0, 1, 2)) == [[10, 20], [1, 21], [2, 12]]

    def test_peers_are_world_numbers(self, rig: Rig) -> None:
        """Not places in the list of members."""
        assert rig.talk(talks.all_pairs, (3, 7)) == [[73], [37]]

    @pytest.mark.parametrize("size", [1, 3, 12], ids="{}-bytes-sent".format)
    def test_another_length_is_an_error_and_writes_nothing_beyond(self, rig: Rig, size: int) -> None:
        """A peer that sends too little, or too much."""
        sender, beyond = rig.talk(talks.lengths, (0, 1), size)
        assert sender
        assert beyond == [0] * 10

    def test_messages_in_another_order_are_an_error_or_go_by_their_lengths(self, rig: Rig) -> None:
        """A peer that reorders what it sends is never taken for one that doesn't."""
        _, found = rig.talk(talks.swapped, (0, 1))
        assert isinstance(found, str) or found == ([2, 3], [[4, 5], [1, 2, 3]])

    def test_a_member_that_does_not_come_is_named(self, rig: Rig) -> None:
        """By everybody who waits for it."""
        for said in rig.talk(talks.incomplete, (0, 2), (0, 1, 2, 3)):
            assert "[1, 3]" in said

    def test_a_group_of_one_needs_no_peer(self, rig: Rig) -> None:
        """And may be closed twice."""
        assert rig.talk(talks.alone, (4,)) == [True]

    def test_abort_ends_what_is_pending_at_once_and_says_why(self, rig: Rig) -> None:
        """From another thread; the first reason stays."""
        (said, seconds), *_ = rig.talk(talks.aborted, (0, 1, 2))
        assert said == ["engine e is dropped"] * 4
        assert seconds < SURE

    def test_a_lost_peer_is_named_and_other_pairs_go_on(self, rig: Rig) -> None:
        """A process that is killed, in the middle of a message."""
        (said, carried), _, received = rig.talk(talks.left, (0, 1, 2), lost=(1,))
        assert said[1] == 1
        assert "process 1" in said[0]
        assert (carried, received) == ([1, 1], [8, 8])

    def test_a_wait_that_runs_out_names_the_peer_and_ends_the_group(self, rig: Rig) -> None:
        """A process that is stopped. Other groups go on."""
        (said, after), _, received = rig.talk(talks.silent, (0, 1, 2), lost=(1,))
        assert said[1] == 1
        assert all("process 1" in each for each in (said[0], *after))
        assert received == [6]

    def test_abort_leaves_other_groups_as_they_are(self, rig: Rig) -> None:
        """Of the same processes."""
        assert rig.talk(talks.apart, (0, 1)) == [[1], [6]]

    def test_eight_groups_at_once(self, rig: Rig) -> None:
        """None takes another's address."""
        assert rig.talk(talks.at_once, (0, 1), 8) == [8, 8]

    def test_closing_gives_back_files_and_threads(self, rig: Rig) -> None:
        """No more after six groups than after three; a thread that has ended may be seen for a moment."""
        if within_process(made(rig.fabric)):
            pytest.skip("not run here: threads of one process share their files")
        for counts in rig.talk(talks.cycles, (0, 1), 6):
            before, after = zip(*counts[:3], strict=True), zip(*counts[3:], strict=True)
            assert [min(late) <= max(early) for early, late in zip(before, after, strict=True)] == [True, True]

    def test_runs_are_gathered_and_scattered_and_nothing_beside_them_is_written(self, rig: Rig) -> None:
        """Of fabrics that take runs in place of buffers."""
        sender, receiver = rig.talk(talks.scattered, (0, 1))
        if sender is None:
            pytest.skip("not run here: the fabric takes buffers only")
        assert receiver == (sender, True)

    @pytest.mark.parametrize("fault", ["dies", "stalls"])
    def test_a_peer_that_fails_in_a_push_fails_its_engine(self, rig: Rig, fault: str) -> None:
        """All who move with it fail within the deadline, and one that died is named by who sends to it.

        Of one that stalls, those who wait for it and those who wait for them have one deadline: whoever gives up first
        is named.
        """
        case = reckoning.row_by_row()
        played = rig.play(case, faulty={3: fault}, faulty_at=1, deadline=4.0 if fault == "stalls" else 20.0)
        first, second, other = (played.outcomes[process] for process in (0, 1, 2))
        assert [set(outcome.failed) for outcome in (first, second, other)] == [{"a"}, {"a"}, {"a"}]
        assert fault == "stalls" or 3 in {outcome.lost.get("a") for outcome in (first, second)}
        assert [outcome.faults for outcome in (first, second, other)] == [[], [], []]
        assert fault == "stalls" or other.mutated == {"a"}


class TransportSuite(Pushes, TransportRules):
    """All that a transport is held to. Set `transport`."""


class FabricSuite(Pushes, FabricRules):
    """All that a fabric is held to. Set `fabric`."""
