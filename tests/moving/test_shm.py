"""Shared memory between processes: who shares a host, that nothing outlives a process, and what a full place says."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from select import EPOLLOUT
from typing import Any

import msgspec
import pytest
import shm_cases
import torch
from moving_support import Table, connect, heard, started, threads
from refit_backends.links import Lost, Operation
from refit_backends.records import RECORD, Tag
from refit_backends.shm import ONE_COPY, TWO_COPIES, ShmFabric
from refit_backends.shm_link import ShmLink
from refit_backends.shm_meeting import _GREETING, NONCE_NBYTES, Word
from refit_backends.shm_memory import Reader

from refit_sdk.fabric import FabricError
from refit_sdk.runs import Runs


def left_by(pids: list[int]) -> list[str]:
    """Sockets that these processes listened on, and segments of theirs that anybody still has."""
    marks = [f"refit-{pid}" for pid in pids]
    found = [line for line in Path("/proc/net/unix").read_text().splitlines() if any(m + "-" in line for m in marks)]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        found += [f"{maps}: {line}" for line in lines if any(f"memfd:{mark} " in f"{line} " for mark in marks)]
    return found


def named_files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("fabric", ["one copy", "two copies", "two hosts"])
def test_nothing_is_left_by_a_process_that_is_killed_at_any_moment(fabric: str) -> None:
    chance = random.Random(fabric)
    for cycle in range(10):
        with started(shm_cases.exchanges_until_one_dies, 3) as (processes, pipes):
            pids = begun(pipes, fabric)
            victim = chance.randrange(3)
            while_connecting = cycle % 5 == 4
            if not while_connecting:
                assert [heard(pipe) for pipe in pipes] == ["connected"] * 3
            time.sleep(chance.uniform(0, 0.02 if while_connecting else 0.1))
            processes[victim].kill()
            struck = time.monotonic()
            told = [lost(pipe) for index, pipe in enumerate(pipes) if index != victim]
            assert [(word, after) for word, _, _, after in told] == [("lost", before) for _, _, before, _ in told]
            # Who ends for the loss is lost to the other, so one of the two may name the other one.
            assert while_connecting or victim in [peer for _, peer, _, _ in told]
            assert time.monotonic() - struck < 20
            processes[victim].join(20)
            assert left_by(pids) == []


def begun(pipes: list[Connection], fabric: str) -> list[int]:
    for pipe in pipes:
        pipe.send(fabric)
    return [heard(pipe) for pipe in pipes]


def lost(pipe: Connection) -> Any:
    while (said := heard(pipe)) == "connected":
        pass
    return said


def test_killing_all_at_once_leaves_nothing() -> None:
    files = named_files()
    with started(shm_cases.exchanges_until_one_dies, 3) as (processes, pipes):
        pids = begun(pipes, "two copies")
        assert [heard(pipe) for pipe in pipes] == ["connected"] * 3
        for process in processes:
            process.kill()
        for process in processes:
            process.join(20)
        assert left_by(pids) == []
    assert {name for name in named_files() - files if "refit" in name} == set()


@pytest.mark.parametrize("fabric", ["one copy", "two copies", "two hosts"])
def test_twenty_cycles_hold_no_more_than_two(fabric: str) -> None:
    with started(shm_cases.twenty_cycles, 3) as (_, pipes):
        for pipe in pipes:
            pipe.send(fabric)
        for _ in range(20):
            assert [heard(pipe) for pipe in pipes] == ["done"] * 3
            for pipe in pipes:
                pipe.send("go")
        for pipe in pipes:
            found = heard(pipe)
            assert found[1] == found[19], found


@contextmanager
def connected(fabric: ShmFabric, count: int = 2, **how: Any) -> Iterator[list[Any]]:
    ends = connect(fabric, count, **how)
    try:
        yield ends
    finally:
        for end in ends:
            if not isinstance(end, BaseException):
                end.close()


@pytest.mark.parametrize("one_copy", [True, False], ids=["one copy", "two copies"])
def test_messages_of_many_chunks_arrive_bit_by_bit(one_copy: bool) -> None:
    with connected(ShmFabric(one_copy=one_copy)) as ends:
        nbytes = (70 << 20) + 3
        sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        received = torch.zeros(nbytes + 8, dtype=torch.uint8)
        recv = ends[1].recv(received[4:-4], peer=0)
        assert ends[0].send(sent, peer=1).wait(30) == recv.wait(30) == nbytes
        assert torch.equal(received[4:-4], sent)
        assert not received[:4].any()
        assert not received[-4:].any()


@pytest.mark.parametrize("one_copy", [True, False], ids=["one copy", "two copies"])
def test_links_say_how_bytes_travel(one_copy: bool) -> None:
    with connected(ShmFabric(one_copy=one_copy)) as ends:
        expected = ONE_COPY if one_copy else TWO_COPIES
        assert ends[0].links == ends[1].links == {(0, 1): expected, (1, 0): expected}


@pytest.mark.parametrize("one_copy", [True, False], ids=["one copy", "two copies"])
def test_a_length_that_differs_is_told_at_both_ends(one_copy: bool) -> None:
    with connected(ShmFabric(one_copy=one_copy)) as ends:
        recv = ends[1].recv(torch.zeros(3, dtype=torch.uint8), peer=0)
        send = ends[0].send(torch.zeros(5, dtype=torch.uint8), peer=1)
        for work, peer in ((recv, 0), (send, 1)):
            with pytest.raises(FabricError, match="process 0 sends 5 bytes where process 1 receives 3") as caught:
                work.wait(5)
            assert caught.value.peer == peer


@pytest.mark.parametrize("one_copy", [True, False], ids=["one copy", "two copies"])
def test_a_message_of_no_bytes_arrives_in_its_turn(one_copy: bool) -> None:
    with connected(ShmFabric(one_copy=one_copy)) as ends:
        sizes = (3, 0, 5)
        recvs = [ends[1].recv(torch.zeros(size, dtype=torch.uint8), peer=0) for size in sizes]
        sends = [ends[0].send(torch.ones(size, dtype=torch.uint8), peer=1) for size in sizes]
        assert [work.wait(5) for work in (*recvs, *sends)] == [*sizes, *sizes]


def test_a_wait_takes_no_processor_time() -> None:
    with connected(ShmFabric()) as ends:
        pending = ends[0].recv(torch.zeros(1, dtype=torch.uint8), peer=1)
        used = time.process_time()
        with pytest.raises(FabricError):
            pending.wait(1.0)
        assert time.process_time() - used < 0.3


@pytest.mark.parametrize("one_copy", [True, False], ids=["one copy", "two copies"])
def test_thousands_of_messages_before_the_first_receive(one_copy: bool) -> None:
    with connected(ShmFabric(one_copy=one_copy)) as ends:
        count = 20_000
        sent = torch.arange(count, dtype=torch.int64)
        received = torch.zeros_like(sent)
        sends = [ends[0].send(sent[i : i + 1].view(torch.uint8), peer=1) for i in range(count)]
        recvs = [ends[1].recv(received[i : i + 1].view(torch.uint8), peer=0) for i in range(count)]
        assert sum(work.wait(30) for work in (*sends, *recvs)) == 2 * 8 * count
        assert torch.equal(received, sent)


def test_an_abort_in_the_middle_of_a_message_ends_it_and_writes_no_more() -> None:
    with connected(ShmFabric()) as ends:
        received = torch.zeros(400 << 20, dtype=torch.uint8)
        recv = ends[1].recv(received, peer=0)
        ends[0].send(torch.ones(400 << 20, dtype=torch.uint8), peer=1)
        while not received[0]:
            pass
        ends[1].abort("stop")
        with pytest.raises(FabricError, match="stop"):
            recv.wait(10)
        assert not received[-1]
        received.zero_()
        time.sleep(0.05)
        assert not received.any()


@contextmanager
def link(*, readable: bool = True) -> Iterator[tuple[ShmLink, socket.socket, list[bool]]]:
    """A link, the other end of its socket, and what it said of its room."""
    here, there = socket.socketpair()
    here.setblocking(False)
    said: list[bool] = []
    made = ShmLink(
        1, 0, here, lambda _, events: said.append(bool(events & EPOLLOUT)), 0, readable, True, None, Reader()
    )
    with there:
        yield made, there, said
    made.end(FabricError("the test is over"))


def operation(kind: Any, buffer: torch.Tensor) -> Operation:
    return Operation(kind, 0, Runs.of([buffer]), lambda *_: None)


def test_bytes_of_a_sender_that_has_left_are_never_taken_for_good_ones() -> None:
    """It offered, and hung up: what was read from its memory may be anybody's by then."""
    with link() as (made, there, _):
        made.pid = os.getpid()
        source, into = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        recv = operation("recv", into)
        made.post(recv)
        there.sendall(RECORD.pack(Tag.OFFER, 8, source.data_ptr(), 0))
        made.hear()
        there.close()
        with pytest.raises(Lost):
            made.step()
        assert into.all(), "the memory was read"
        assert not recv.ended.is_set()


def test_a_full_socket_is_waited_for_and_nothing_is_lost() -> None:
    with link() as (made, there, said):
        count = 0
        while not said:
            made.post(operation("send", torch.zeros(1, dtype=torch.uint8)))
            count += 1
            made.step()
        made.post(operation("send", torch.zeros(1, dtype=torch.uint8)))
        heard_bytes = bytearray()
        there.settimeout(0.2)
        while True:
            made.has_room()
            try:
                heard_bytes += there.recv(1 << 20)
            except TimeoutError:
                break
        assert said[-1] is False
        assert len(heard_bytes) == (count + 1) * RECORD.size


@pytest.mark.parametrize(
    "said",
    [
        RECORD.pack(99, 0, 0, 0),
        RECORD.pack(Tag.DONE, 0, 0, 0),
        RECORD.pack(Tag.FREED, 0, 0, 0),
        RECORD.pack(Tag.RING, 0, 0, 0),
    ],
    ids=["an unknown tag", "nothing was sent", "every slot is free", "no descriptor came"],
)
def test_records_that_make_no_sense_end_the_link(said: bytes) -> None:
    with link() as (made, there, _):
        there.sendall(said)
        with pytest.raises(Lost, match="no sense"):
            made.hear()


def test_a_chunk_larger_than_its_receive_writes_nothing() -> None:
    with link(readable=False) as (made, there, _):
        into = torch.zeros(4, dtype=torch.uint8)
        made.post(operation("recv", into[:2]))
        there.sendall(RECORD.pack(Tag.CHUNK, 4, 2, 0))
        made.hear()
        with pytest.raises(Lost, match="no sense"):
            made.step()
        assert not into.any()


def test_a_stranger_is_not_let_in() -> None:
    """It sees the socket's name, as everybody on the host can, and doesn't know the nonce."""
    table = Table()

    def work(index: int) -> Any:
        if index == 2:
            word = msgspec.json.decode(table.get("g/shm/here/0", timeout=10), type=Word)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
                made.connect(f"\0{word.name}")
                made.sendall(_GREETING.pack(b"x" * NONCE_NBYTES, 1))
                stranger.set()
                return made.recv(1)
        if index == 1:
            assert stranger.wait(10)
        return ShmFabric().connect(group="g", members=[0, 1], process=index, store=table, timeout=20)

    stranger = threading.Event()
    first, second, said = threads(3, work)
    assert said == b""
    received = torch.zeros(1, dtype=torch.uint8)
    recv = second.recv(received, peer=0)
    first.send(torch.ones(1, dtype=torch.uint8), peer=1).wait(5)
    assert recv.wait(5) == 1
    first.close()
    second.close()


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "c")], ids=str)
def test_stated_hosts_that_differ_are_refused_by_both_with_the_reason(hosts: tuple[str, str]) -> None:
    table = Table()
    errors = threads(
        2, lambda i: ShmFabric(host=hosts[i]).connect(group="g", members=[0, 1], process=i, store=table, timeout=5)
    )
    for index, error in enumerate(errors):
        assert isinstance(error, FabricError)
        assert error.peer == 1 - index
        assert f"REFIT_HOST is {hosts[0]!r} at process 0 and {hosts[1]!r} at process 1" in str(error)
        assert "use fabric 'mixed'" in str(error)


@pytest.mark.parametrize(("host", "says"), [("a", "REFIT_HOST is 'a' at processes 0 and 1"), ("", "can't open")])
def test_a_host_is_what_can_be_opened_and_not_what_is_said(host: str, says: str) -> None:
    """The other says that it has the same host, or nothing, and its segment isn't there."""
    table = Table()
    table.set("g/shm/here/0", msgspec.json.encode(Word(host, "refit-of-another-kernel", "00" * 16, 0)))
    table.set("g/shm/dialled/here/0", b"[]")
    table.set("g/shm/found/here/0", b"[]")
    with pytest.raises(FabricError, match=says):
        ShmFabric(host=host).connect(group="g", members=[0, 1], process=1, store=table, timeout=5)


def test_the_environment_states_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    monkeypatch.setenv("REFIT_HOST", "rack-7")
    with connected(ShmFabric(), store=table):
        word = msgspec.json.decode(table.get("g/shm/here/1", timeout=1), type=Word)
    assert word.host == "rack-7"


SMALL = """
import sys, threading, torch
sys.path.append({support!r})
from moving_support import connect
from refit_backends.shm import ShmFabric
ends = connect(ShmFabric(one_copy=False, directory=sys.argv[1]), 2)
if any(isinstance(end, BaseException) for end in ends):
    print("connecting:", ends[0])
    raise SystemExit
for src in (0, 1):
    buffer = torch.zeros(8, dtype=torch.uint8)
    recv = ends[1 - src].recv(buffer, peer=src)
    try:
        print("sent:", ends[src].send(torch.ones(8, dtype=torch.uint8), peer=1 - src).wait(10), recv.wait(10))
    except Exception as error:
        print("sending:", error)
for end in ends:
    end.close()
"""


def in_small_directory(path: Path, size: str) -> str:
    """What the script says with a file system of its own, of that size."""
    private = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*private, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system of one's own")
    script = path / "small.py"
    script.write_text(SMALL.format(support=str(Path(__file__).parent)))
    mounted = path / "mounted"
    mounted.mkdir()
    command = f"mount -t tmpfs -o size={size} tmpfs {mounted} && exec {sys.executable} {script} {mounted}"
    result = subprocess.run([*private, "sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_small_directory_is_found_when_connecting(tmp_path: Path) -> None:
    said = in_small_directory(tmp_path, "2m")
    assert "connecting: 4194304 bytes of shared memory may be needed in" in said
    assert "make it larger" in said


def test_a_directory_that_fills_up_is_an_error_before_it_is_written(tmp_path: Path) -> None:
    first, second = in_small_directory(tmp_path, "6m").splitlines()
    assert first == "sent: 8 8"
    assert second.startswith("sending: no room for 4194304 bytes of shared memory in")
    assert "make it larger" in second
