"""What is each fabric's own; what all must do is in the conformance kit (`FabricRules`). Gloo is in threads here."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import gpu_standins
import msgspec
import pytest
import torch
from moving_support import HandClock, Table, connect, threads
from refit_backends.gloo import GlooFabric
from refit_backends.inproc import InprocFabric
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric
from refit_backends.shm_meeting import Word as HostWord
from refit_backends.tcp import GREETING, NONCE_NBYTES, TcpFabric, Word

from refit_sdk.errors import RendezvousError
from refit_sdk.fabric import Fabric, FabricError, Group

LARGE = torch.ones(32 << 20, dtype=torch.uint8)
"""More than a kernel keeps for a receive that isn't there yet."""

LONG = 3600.0
"""Seconds that no test waits: `threads` fails long before."""


class TwoHosts:
    """Fabric `mixed`, where members of even and of odd number are told that they have a host each."""

    name = "two hosts"

    @classmethod
    def missing(cls) -> str | None:
        return MixedFabric.missing()

    def connect(self, *, process: int, **about: Any) -> Group:
        return MixedFabric(shm=ShmFabric(host=f"h{process % 2}")).connect(process=process, **about)


class TwoHostsByGloo(TwoHosts):
    """The same with gloo between hosts."""

    name = "two hosts, gloo"

    def connect(self, *, process: int, **about: Any) -> Group:
        fabric = MixedFabric(far=GlooFabric(), shm=ShmFabric(host=f"h{process % 2}"))
        return fabric.connect(process=process, **about)


FABRICS: dict[str, Callable[[], Fabric]] = {
    "inproc": InprocFabric,
    "gloo": GlooFabric,
    "tcp": TcpFabric,
    "shm": ShmFabric,
    "shm, two copies": lambda: ShmFabric(one_copy=False),
    "mixed": MixedFabric,
    "two hosts": TwoHosts,
    "two hosts, gloo": TwoHostsByGloo,
    "cuda_ipc (stand-in)": gpu_standins.StandinCudaIpc,
}


@pytest.fixture(params=FABRICS)
def fabric(request: pytest.FixtureRequest) -> Fabric:
    return FABRICS[request.param]()


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_is_usable_here(fabric: Fabric) -> None:
    assert fabric.missing() is None
    assert isinstance(fabric, Fabric)


def test_abort_reaches_living_pairs_past_a_dead_one(fabric: Fabric) -> None:
    ends = connect(fabric, 3)
    ends[1].abort("gone")
    with pytest.raises(FabricError) as caught:
        ends[0].recv(numbers(0), peer=1).wait(5)
    assert caught.value.peer == 1
    pending = ends[0].recv(numbers(0), peer=2)
    ends[0].abort("stop")
    assert [str(error) for error in threads(1, lambda _: pending.wait(LONG))] == ["stop"]


def test_inproc_waits_on_the_tests_own_clock() -> None:
    clock = HandClock()
    ends = connect(InprocFabric(clock=clock), 2)

    def work(index: int) -> str:
        if index:
            clock.until_waiting(1)
            clock.advance(3599)
            clock.until_waiting(2)
            clock.advance(1)
            return ""
        with pytest.raises(FabricError) as caught:
            ends[0].recv(numbers(0), peer=1).wait(3600)
        return str(caught.value)

    assert threads(2, work)[0] == "waited 3600 s for process 1 to send 1 bytes"


def test_inproc_reads_a_send_only_when_its_receive_is_there() -> None:
    ends = connect(InprocFabric(), 2)
    sent, received = numbers(1), numbers(0)
    send = ends[0].send(sent, peer=1)
    sent.fill_(2)
    ends[1].recv(received, peer=0).wait(5)
    assert send.wait(5) == 1
    assert received.tolist() == [2]


def test_inproc_refuses_another_process() -> None:
    table = Table()
    table.add("g/inproc/comers", 1)
    table.set("g/inproc/hub", b"1/77")
    with pytest.raises(FabricError, match=r"hub 1/77 .* not in this process"):
        InprocFabric().connect(group="g", members=[0, 1], process=1, store=table, timeout=1)


PLACED = pytest.mark.parametrize("placed", [GlooFabric, TcpFabric], ids=lambda fabric: fabric.name)


@PLACED
@pytest.mark.parametrize("where", [{"host": "::1"}, {"host": "localhost"}, {"interface": "lo"}], ids=str)
def test_listens_where_it_is_told(placed: Any, where: dict[str, str]) -> None:
    ends = connect(placed(**where), 2)
    received = numbers(0)
    recv = ends[1].recv(received, peer=0)
    ends[0].send(numbers(5), peer=1).wait(5)
    assert recv.wait(5) == 1
    assert received.tolist() == [5]


@PLACED
@pytest.mark.parametrize("where", [{"host": "192.0.2.1"}, {"interface": "nosuch0"}], ids=str)
def test_says_where_it_cannot_listen(placed: Any, where: dict[str, str]) -> None:
    (place,) = where.values()
    with pytest.raises(FabricError, match=rf"can't listen on .*{place}.*give host="):
        placed(**where).connect(group="g", members=[0, 1], process=0, store=Table(), timeout=1)


@PLACED
def test_takes_one_of_host_and_interface(placed: Any) -> None:
    with pytest.raises(FabricError, match="give one of them"):
        placed(host="::1", interface="lo")


@PLACED
def test_tells_all_addresses_when_it_cannot_connect(placed: Any) -> None:
    table = Table()
    fabrics = (placed(host="127.0.0.1"), placed(host="::1"))
    results = threads(2, lambda i: fabrics[i].connect(group="g", members=[0, 1], process=i, store=table, timeout=1))
    errors = [str(result) for result in results if isinstance(result, FabricError)]
    assert any("0 at 127.0.0.1, 1 at ::1" in error for error in errors)
    assert all("1 at ::1" in error or "did not connect to process 0 at 127.0.0.1" in error for error in errors)


def test_a_stranger_who_dials_is_hung_up_on() -> None:
    table, stranger = Table(), threading.Event()

    def work(index: int) -> Any:
        if index == 2:
            word = msgspec.json.decode(table.get("g/tcp/here/0", timeout=10), type=Word)
            with socket.create_connection((word.host, word.port)) as made:
                made.sendall(GREETING.pack(b"x" * NONCE_NBYTES, 1))
                stranger.set()
                return made.recv(1)
        if index == 1:
            assert stranger.wait(10)
        return TcpFabric().connect(group="g", members=[0, 1], process=index, store=table, timeout=20)

    first, second, said = threads(3, work)
    assert said == b""
    received = numbers(0)
    recv = second.recv(received, peer=0)
    first.send(numbers(3), peer=1).wait(5)
    assert recv.wait(5) == 1


def test_bytes_that_nobody_wants_yet_cost_no_processor_time() -> None:
    ends = connect(TcpFabric(), 2)
    ends[0].send(torch.ones(1000, dtype=torch.uint8), peer=1).wait(5)
    used = time.process_time()
    pending = ends[1].send(numbers(1), peer=0)
    with pytest.raises(FabricError):
        ends[0].recv(numbers(0, 0, 0), peer=1).wait(1.0)
    assert pending.wait(5) == 1
    assert time.process_time() - used < 0.3


@pytest.mark.parametrize("wide", [GlooFabric, TcpFabric], ids=lambda fabric: fabric.name)
def test_carries_more_than_two_gib(wide: Any) -> None:
    ends = connect(wide(), 2)
    nbytes = (2 << 30) + 5
    sent = torch.zeros(nbytes, dtype=torch.uint8)
    sent[-5:] = numbers(1, 2, 3, 4, 5)
    received = torch.empty(nbytes, dtype=torch.uint8)
    recv = ends[1].recv(received, peer=0)
    send = ends[0].send(sent, peer=1)
    assert recv.wait(60) == send.wait(60) == nbytes
    assert received[-6:].tolist() == [0, 1, 2, 3, 4, 5]
    assert not received[:-5:4099].any()


@pytest.mark.parametrize("fabric", ["tcp", "shm", "shm, two copies", "two hosts"], indirect=True)
def test_a_receive_knows_whether_its_buffer_may_have_been_written(fabric: Fabric) -> None:
    ends = connect(fabric, 2)
    arrived, pending = ends[0].recv(numbers(0), peer=1), ends[0].recv(numbers(0), peer=1)
    ends[1].send(numbers(1), peer=0).wait(5)
    assert arrived.wait(5) == 1
    ends[0].abort("stop")
    with pytest.raises(FabricError):
        pending.wait(5)
    assert (arrived.touched, pending.touched) == (True, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fabric", ["tcp", "shm", "shm, two copies", "two hosts"], indirect=True)
def test_an_end_that_gave_up_is_heard_of_though_a_child_has_its_sockets(fabric: Fabric) -> None:
    """A child that was forked after connecting has copies of them: what was given up on must not arrive after all."""
    ends = connect(fabric, 2)
    near = getattr(ends[0], "_far", ends[0])
    copies = [os.dup(link.socket.fileno()) for link in near._links.values()]
    try:
        sent = torch.ones(LARGE.numel(), dtype=torch.uint8)
        send = ends[0].send(sent, peer=1)
        ends[0].abort("given up")
        with pytest.raises(FabricError, match="given up"):
            send.wait(5)
        sent.fill_(99)
        (error,) = threads(1, lambda _: ends[1].recv(torch.zeros_like(sent), peer=0).wait(LONG))
        assert isinstance(error, FabricError)
        assert error.peer == 0
    finally:
        for copy in copies:
            os.close(copy)


def test_a_stranger_who_drips_and_one_who_says_nothing_keep_nobody_waiting() -> None:
    table, done, strangers = Table(), threading.Event(), threading.Barrier(3)

    def work(index: int) -> Any:
        if index < 2:
            strangers.wait(20) if index == 1 else None
            made = TcpFabric().connect(group="g", members=[0, 1], process=index, store=table, timeout=20)
            done.set()
            return made
        word = msgspec.json.decode(table.get("g/tcp/here/0", timeout=10), type=Word)
        with socket.create_connection((word.host, word.port)) as made:
            made.sendall(b"x" * (index - 2))
            strangers.wait(20)
            assert done.wait(3), "somebody waits for a stranger"
        return None

    ends = threads(4, work)
    assert not [end for end in ends if isinstance(end, BaseException)], ends


class Ended(Table):
    """A table whose session has ended."""

    def check(self, keys: Any) -> bool:
        raise RendezvousError("the session has ended")


@pytest.mark.parametrize("fabric", [TcpFabric, ShmFabric], ids=lambda fabric: fabric.name)
def test_who_waits_for_a_call_hears_that_the_session_has_ended(fabric: Any) -> None:
    table = Ended()
    about = {"group": "g", "members": [0, 1], "store": table, "timeout": LONG}
    word = Word("127.0.0.1", 1, "00" * 16) if fabric is TcpFabric else HostWord("", "nobody", "00" * 16, 0)
    table.set(f"g/{fabric.name}/here/1", msgspec.json.encode(word))
    table.set("g/shm/dialled/here/1", b"[0]")
    (error,) = threads(1, lambda _: fabric().connect(process=0, **about))
    assert isinstance(error, RendezvousError)
    assert "the session has ended" in str(error)
