"""The fabrics of CUDA memory over a stand-in for its libraries; `tests/gpu/run.sh` runs the same cases on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_ranks
import gpu_standins
import msgspec
import pytest
import torch
from gpu_cases import Place, alone
from moving_support import Leg, Table, connect, executors, fragment, heard, poisoned, run, started, threads, truth
from refit_backends.cuda_ipc import CudaIpcFabric
from refit_backends.nccl import NcclFabric, Word, host

from refit_sdk.box import Box
from refit_sdk.controller import RefitController
from refit_sdk.fabric import Fabric, FabricError, Group
from refit_sdk.program import Piece
from refit_sdk.session import RefitSession

HOST = Place(torch.device("cpu"), gpu_standins.StandinNccl, gpu_standins.busy)
COUNTS = gpu_standins.standin()


class ManyStandinNccls:
    """A fabric for each process, for all its groups. For threads that play processes."""

    name = "nccl (stand-in)"

    def __init__(self) -> None:
        self._of: dict[int, Fabric] = defaultdict(gpu_standins.StandinNccl)

    @classmethod
    def missing(cls) -> str | None:
        return None

    def connect(self, *, process: int, **about: Any) -> Group:
        return self._of[process].connect(process=process, **about)


@pytest.mark.parametrize("fabric", [NcclFabric, CudaIpcFabric])
def test_says_what_is_missing_here(fabric: type[Fabric]) -> None:
    if torch.version.cuda is None:
        assert f"torch {torch.__version__} was built without CUDA" in str(fabric.missing())
    else:
        assert torch.cuda.is_available() == (fabric.missing() is None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device, so the checks would be run")
def test_the_script_says_not_run_where_there_is_no_device() -> None:
    script = Path(gpu_cases.__file__).with_name("run.sh")
    told = subprocess.run([script], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
    assert told.returncode == 3, told.stderr
    first, *lines, counts = [line for line in told.stdout.splitlines() if line]
    assert first.startswith("Python ")
    assert len(lines) > len(gpu_cases.ALONE)
    assert all(line.startswith("not run ") and "CUDA" in line for line in lines)
    assert counts == f"0 held, 0 FAILED, {len(lines)} not run"


@pytest.mark.parametrize("case", gpu_cases.ALONE, ids=lambda case: case.__name__)
def test_one_member_sends_to_itself(case: Callable[[Place], None]) -> None:
    case(HOST)
    assert COUNTS.standin_calls_that_wait() == 0, "the host waited for the device"
    assert COUNTS.standin_last_error() == 0, "an error is left for torch to find"


def test_sizes_have_64_bits() -> None:
    group, nbytes = alone(HOST), (1 << 31) + 5
    buffer = torch.empty(nbytes, dtype=torch.uint8)  # never touched: the stand-in only counts what is so large
    works = [group.recv(buffer, peer=4), group.send(buffer, peer=4)]
    assert [work.wait(30) for work in works] == [nbytes, nbytes]
    assert COUNTS.standin_largest() == nbytes
    group.close()


def test_what_is_flushed_goes_on_while_nobody_waits() -> None:
    ends = connect(ManyStandinNccls(), 2)
    into, sent = HOST.empty(1000), HOST.random(1000)
    recv, send = ends[1].recv(into, peer=0), ends[0].send(sent, peer=1)
    ends[0].flush()
    assert recv.wait(10) == send.wait(10) == 1000
    assert torch.equal(into, sent)
    for end in ends:
        end.close()


def test_windows_of_two_groups_come_in_one_order_on_all_processes() -> None:
    """0 posts the windows of `b` and of `a` before it waits, 1 only the first. Begun as one, 0's would begin with `a`,
    and wait for 1, which waits for `b`."""
    table, fabric = Table(), ManyStandinNccls()
    a, b = (connect(fabric, 2, group=name, store=table) for name in ("a", "b"))

    def process(me: int) -> int:
        works, moved = [], 0
        for group in (b, a):
            works.append(group[me].recv(HOST.empty(700_000), peer=1 - me))
            works.append(group[me].send(HOST.random(700_000), peer=1 - me))
            group[me].flush()
            if me:
                moved += sum(work.wait(10) for work in works)
                works.clear()
        return moved + sum(work.wait(10) for work in works)

    assert threads(2, process) == [700_000 * 4] * 2
    for end in (*a, *b):
        end.close()


def test_groups_of_one_window_come_in_the_order_of_their_names() -> None:
    """0 posts `a` first and 1 `b`, twenty times: begun in the order of posting, each would wait for the other."""
    table, fabric = Table(), ManyStandinNccls()
    a, b = (connect(fabric, 2, group=name, store=table) for name in ("a", "b"))

    def process(me: int) -> int:
        works = []
        for _ in range(20):
            for group in (a, b) if me else (b, a):
                works.append(group[me].recv(HOST.empty(70_000), peer=1 - me))
                works.append(group[me].send(HOST.random(70_000), peer=1 - me))
            a[me].flush()
        return sum(work.wait(10) for work in works)

    assert threads(2, process) == [70_000 * 80] * 2
    for end in (*a, *b):
        end.close()


SHAPE = (60, 40)
WHOLE = Box.whole(SHAPE)


def test_programs_of_two_engines_arrive_whole() -> None:
    """Sources 0 and 1 hold halves; 2 is engine x, 3 is engine y; 64 pieces a window, in sixteen windows."""
    values = truth("w", SHAPE, torch.bfloat16)
    halves = {0: Box((0, 0), (30, 40)), 1: Box((30, 0), (60, 40))}
    legs = [
        Leg(row // 30, target, Piece("w", Box((row, column), (row + 1, column + 10)), "bfloat16"), engine, row % 16)
        for target, engine in ((2, "x"), (3, "y"))
        for row in range(60)
        for column in range(0, 40, 10)
    ]
    into = {target: poisoned(torch.empty(SHAPE, dtype=torch.bfloat16)) for target in (2, 3)}
    sources = {p: [fragment("w", SHAPE, box, values[box.slices()].clone())] for p, box in halves.items()}
    targets = {target: [fragment("w", SHAPE, WHOLE, view)] for target, view in into.items()}
    made = executors(ManyStandinNccls(), legs, sources, targets, together=False)
    for _ in range(2):
        moved = run(made)
        assert all(not each.failed for each in moved.values()), moved
        assert all(torch.equal(view, values) for view in into.values())
        for view in into.values():
            poisoned(view)
    assert COUNTS.standin_calls_that_wait() == 0


@pytest.mark.parametrize("fabric", [gpu_standins.StandinNccl, gpu_standins.StandinCudaIpc])
def test_a_session_pushes_over_it(fabric: Callable[[], Fabric]) -> None:
    new, old, links = {"w": torch.rand(300, 70)}, {"w": torch.zeros(300, 70)}, {}
    with RefitController(rendezvous="tcp://127.0.0.1:0") as controller:
        where = controller.rendezvous

        def generate() -> None:
            with RefitSession.target(old, rendezvous=where, engine="a", rank=0, size=1, fabric=fabric()) as session:
                session.receive()
                session.receive()

        thread = threading.Thread(target=generate)
        thread.start()
        with RefitSession.source(new, rendezvous=where, rank=0, size=1, fabric=fabric()) as session:
            session.push(version=1)
            assert torch.equal(old["w"], new["w"])
            new["w"].mul_(2)
            session.push(version=2)
            links = session.links
        thread.join(30)
    assert torch.equal(old["w"], new["w"])
    assert set(links.values()) == {fabric.name.removesuffix(" (stand-in)")}  # type: ignore[attr-defined]


def test_memory_of_another_device_is_refused() -> None:
    group = NcclFabric(library=gpu_standins.library(), runtime=gpu_standins.library()).connect(
        group="g", members=[4], process=4, store=Table(), timeout=5
    )
    with pytest.raises(
        FabricError, match=r"carries the memory of cuda devices, the buffer of 3 bytes to send is on cpu"
    ):
        group.send(torch.zeros(3, dtype=torch.uint8), peer=4)
    group.close()


def test_members_with_another_nccl_are_named() -> None:
    table = Table()
    table.set("g/nccl/here/0", msgspec.json.encode(Word(23007, host(), "0000:00:00.0", "00" * 128)))
    with pytest.raises(FabricError, match=r"process 0 has NCCL 2\.30\.7, process 1 has 2\.28\.3"):
        HOST.make().connect(group="g", members=[0, 1], process=1, store=table, timeout=5)


def test_an_old_nccl_is_refused() -> None:
    COUNTS.standin_version(20805)
    try:
        with pytest.raises(FabricError, match=r"NCCL 2\.8\.5 at .* is too old; it takes 2\.14\.0"):
            alone(HOST)
    finally:
        COUNTS.standin_version(22803)


def test_a_communicator_that_does_not_stand_in_time_names_its_members() -> None:
    table = Table()
    table.set("g/nccl/here/0", msgspec.json.encode(Word(22803, host(), "0000:00:00.0", "00" * 128)))
    with pytest.raises(FabricError, match=r"no communicator of 0 on .*\(processes \[0, 1\] share a device"):
        HOST.make().connect(group="g", members=[0, 1], process=1, store=table, timeout=0.5)


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(FabricError, match=r"\[1, 2\] did not come"):
        HOST.make().connect(group="g", members=[0, 1, 2], process=0, store=Table(), timeout=0.2)


def test_device_memory_that_cannot_be_opened_is_known_when_it_connects() -> None:
    table = Table()
    fabrics = [CudaIpcFabric(runtime=gpu_standins.library(), slot_nbytes=size) for size in (1 << 16, 1 << 17)]
    before = COUNTS.standin_held()
    errors = threads(2, lambda i: fabrics[i].connect(group="g", members=[0, 1], process=i, store=table, timeout=10))
    for error in errors:
        assert isinstance(error, FabricError)
        assert "2 pairs can't: process 0 on 0000:00:00.0 can't open that of process 1" in str(error)
    assert COUNTS.standin_held() == before


def test_cuda_ipc_takes_contiguous_device_memory_only() -> None:
    ends = connect(gpu_standins.StandinCudaIpc(), 2)
    with pytest.raises(FabricError, match="contiguous memory"):
        ends[0].send(torch.zeros(4, 4, dtype=torch.uint8).t()[:2], peer=1)
    for end in ends:
        end.close()


def of(where: str, members: int, turns: int = 1) -> tuple[str, int, int, dict[str, str]]:
    return f"{where} (stand-in)", members, turns, {}


@pytest.mark.parametrize(("where", "members"), [("cuda_ipc", 3), ("nccl", 3)])
def test_processes_exchange_with_all_others(where: str, members: int) -> None:
    with started(gpu_ranks.exchanges, members) as (_, pipes):
        for pipe in pipes:
            pipe.send(of(where, members))
        for process, pipe in enumerate(pipes):
            word, _, links = heard(pipe)
            assert word == "done"
            peers = [peer for peer in range(members) if peer != process]
            assert links == {pair: where for peer in peers for pair in ((process, peer), (peer, process))}
        for pipe in pipes:
            pipe.send("close")
        assert [heard(pipe) for pipe in pipes] == ["closed"] * members


@pytest.mark.parametrize("where", ["cuda_ipc", "nccl"])
def test_who_is_killed_is_missed_and_the_others_end(where: str) -> None:
    with started(gpu_ranks.exchanges_until_one_dies, 3) as (processes, pipes):
        for pipe in pipes:
            pipe.send(of(where, 3))
        assert [heard(pipe) for pipe in pipes] == ["connected"] * 3
        processes[1].kill()
        for pipe in (pipes[0], pipes[2]):
            word, peer, told = heard(pipe)
            assert word == "lost", told
            assert (peer is None) == (where == "nccl"), told
            assert heard(pipe) == "closed"


def test_cuda_ipc_holds_no_more_after_six_groups_than_after_two() -> None:
    with started(gpu_ranks.cycles, 2) as (_, pipes):
        for pipe in pipes:
            pipe.send(of("cuda_ipc", 2, 6))
        for pipe in pipes:
            left = heard(pipe)
            assert left[-1] <= left[1], left
