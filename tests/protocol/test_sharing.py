"""One reader a host: who reads at the rendezvous, what comes through a door, and what happens when it's wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from refit_sdk.errors import RendezvousError
from refit_sdk.manifest import digest
from refit_sdk.messages import Door, Form
from refit_sdk.sharing import NoDoor, Sharing, fetch, gather, this_host

PATIENCE = 30.0
WORLD = os.urandom(300_000)
PIECE = 1 << 17


def announced(door: Door | None = None, *, world: bytes = WORLD) -> Form:
    return Form(epoch=1, nbytes=len(world), digest=digest(world), door=door, settings="{}", fresh=())


class Rendezvous:
    """Pieces of a world, and how often each was asked for."""

    def __init__(self, world: bytes = WORLD) -> None:
        self.world = world
        self.asked: list[int] = []

    def __call__(self, start: int) -> bytes:
        self.asked.append(start)
        return self.world[start : start + PIECE]


@contextlib.contextmanager
def opened(*, host: str = "here") -> Iterator[Sharing]:
    made = Sharing(host=host)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def impostor(answer: Callable[[socket.socket], None]) -> Iterator[Door]:
    """A door at which something else than a reader answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"refit-test-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen()

        def serve() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.recv(48, socket.MSG_WAITALL)
                answer(caller)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Door("here", name, bytes(16))
        thread.join()


def hand(content: bytes) -> Callable[[socket.socket], None]:
    """Hand over a segment with this content."""

    def answer(caller: socket.socket) -> None:
        segment = os.memfd_create("test")
        os.write(segment, content)
        socket.send_fds(caller, [b"w"], [segment])
        os.close(segment)

    return answer


def hand_pipe(caller: socket.socket) -> None:
    """Hand over something that would be read for ever."""
    ends = os.pipe()
    socket.send_fds(caller, [b"w"], [ends[0]])
    for end in ends:
        os.close(end)


def test_neighbours_get_what_one_of_them_reads() -> None:
    with opened() as reader, contextlib.ExitStack() as stack:
        mates = [stack.enter_context(opened()) for _ in range(7)]
        at, found = Rendezvous(), []
        early = [
            threading.Thread(
                target=lambda mate=mate: found.append(mate.read(announced(reader.door), at, seconds=PATIENCE))
            )
            for mate in mates
        ]
        for thread in early[:4]:
            thread.start()
        assert reader.read(announced(), at, seconds=PATIENCE) == WORLD
        for thread in early[4:]:
            thread.start()
        for thread in early:
            thread.join()
        assert found == [WORLD] * 7
        assert at.asked == [0, PIECE, 2 * PIECE]


WRONG: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "other bytes": (hand(WORLD[:-1] + bytes([WORLD[-1] ^ 1])), "gave the world"),
    "another world": (hand(WORLD[::-1]), "gave the world"),
    "too few": (hand(WORLD[:-1]), "gave 299999 bytes where 300000 were announced"),
    "too many": (hand(WORLD + b"x"), "gave 300001 bytes"),
    "nothing in it": (hand(b""), "gave 0 bytes"),
    "no segment": (lambda caller: caller.sendall(b"w"), "has gone, or couldn't read it"),
    "a pipe": (hand_pipe, "bytes where 300000 were announced"),
    "the end: the reader died": (lambda caller: None, "has gone, or couldn't read it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_at_a_door_is_told_and_read_at_the_rendezvous(what: str) -> None:
    answer, says = WRONG[what]
    at, descriptors = Rendezvous(), len(os.listdir("/proc/self/fd"))
    with opened() as mate, impostor(answer) as door, pytest.warns(UserWarning, match=f"itself: .*{says}"):
        assert mate.read(announced(door), at, seconds=PATIENCE) == WORLD
    assert at.asked == [0, PIECE, 2 * PIECE]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_reader_that_says_nothing_is_waited_for_so_long_and_no_longer() -> None:
    silent = threading.Event()
    with impostor(lambda caller: [silent.wait(PATIENCE), None][1]) as door:
        with pytest.raises(NoDoor, match=r"gave nothing in 0\.2 s"):
            fetch(door, announced(), seconds=0.2)
        silent.set()


def test_a_door_that_is_not_there_is_told() -> None:
    with opened() as mate, pytest.warns(UserWarning, match="can't be reached"):
        assert mate.read(announced(Door("here", "refit-no-such-door", bytes(16))), Rendezvous(), seconds=1) == WORLD


def test_who_waits_is_sent_away_when_the_reader_can_t_read() -> None:
    def broken(start: int) -> bytes:
        time.sleep(0.05)
        raise RendezvousError("the rendezvous host is gone")

    with opened() as reader:
        told: list[str] = []

        def wait() -> None:
            try:
                fetch(reader.door, announced(), seconds=PATIENCE)  # type: ignore[arg-type]
            except NoDoor as why:
                told.append(str(why))

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        with pytest.raises(RendezvousError, match="is gone"):
            reader.read(announced(), broken, seconds=PATIENCE)
        late = threading.Thread(target=wait)
        late.start()
        for thread in (*threads, late):
            thread.join()
    assert told == ["the reader of this host has gone, or couldn't read it"] * 4


def test_who_waits_is_sent_away_when_the_reader_closes() -> None:
    with opened() as reader:
        assert reader.door is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as way:
            way.connect(f"\0{reader.door.name}")
            way.sendall(reader.door.key + digest(WORLD).encode())
            reader.close()
            with contextlib.suppress(ConnectionResetError):  # where it closed before it looked who is there
                assert way.recv(1) == b""
    with pytest.raises(NoDoor, match="can't be reached"):
        fetch(reader.door, announced(), seconds=1)


@pytest.mark.parametrize("said", [bytes(48), b"short", b"", b"\xff" * 48], ids=["a key", "short", "none", "noise"])
def test_who_doesn_t_have_the_key_gets_nothing_and_keeps_nobody_out(said: bytes) -> None:
    with opened() as reader:
        reader.read(announced(), Rendezvous(), seconds=1)
        assert reader.door is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(f"\0{reader.door.name}")
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        assert fetch(reader.door, announced(), seconds=PATIENCE) == WORLD


def test_a_new_world_takes_the_place_of_the_old_one() -> None:
    other = bytes(1000)
    with opened() as reader, opened() as mate:
        for world in (WORLD, other, WORLD):
            at = Rendezvous(world)
            reader.read(announced(world=world), at, seconds=1)
            assert mate.read(announced(reader.door, world=world), at, seconds=PATIENCE) == world
            assert at.asked.count(0) == 1


def test_a_shared_world_can_t_be_written() -> None:
    with opened() as reader:
        reader.read(announced(), Rendezvous(), seconds=1)
        segment = reader._stock.segment
        assert segment is not None
        with pytest.raises(PermissionError):
            os.pwrite(segment, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(segment, 0)


PIECES: dict[str, tuple[Callable[[int], bytes], str]] = {
    "a truncated piece, and no more": (lambda start: WORLD[start : start + 1000] if not start else b"", "a piece of 0"),
    "nothing": (lambda start: b"", "a piece of 0 after 0"),
    "more than was announced": (lambda start: WORLD + b"x", "a piece of 300001 after 0"),
    "the same piece again": (lambda start: WORLD[:PIECE][: len(WORLD) - start], "and gave"),
    "another byte": (lambda start: WORLD[start : start + PIECE].replace(WORLD[:4], b"abcd"), "and gave"),
}


@pytest.mark.parametrize("what", PIECES)
def test_pieces_that_don_t_make_the_world_are_refused(what: str) -> None:
    ask, says = PIECES[what]
    with pytest.raises(RendezvousError, match=says):
        gather(announced(), ask)


def test_short_pieces_do() -> None:
    assert gather(announced(), lambda start: WORLD[start : start + 7001]) == WORLD


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 40])
def test_an_absurd_world_is_not_asked_for(nbytes: int) -> None:
    form = Form(epoch=1, nbytes=nbytes, digest="", door=None, settings="", fresh=())
    with pytest.raises(RendezvousError, match="was announced"):
        gather(form, lambda start: pytest.fail("asked"))


def test_without_a_host_there_is_no_door_and_no_thread() -> None:
    threads = threading.active_count()
    with opened(host="") as alone, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (alone.door, threading.active_count()) == (None, threads)
        assert alone.read(announced(), Rendezvous(), seconds=1) == WORLD


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with opened() as reader, opened() as mate:
        reader.read(announced(), Rendezvous(), seconds=1)
        mate.read(announced(reader.door), Rendezvous(), seconds=1)
        reader.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)


def test_stated_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for stated in ("a", "b", "a"):
        monkeypatch.setenv("REFIT_HOST", stated)
        found.append(this_host())
    assert found[0] == found[2] != found[1]


def test_a_host_that_can_t_be_told_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", absent)
    assert this_host() == ""


def test_where_nothing_can_be_sealed_neighbours_read_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError("no room")

    monkeypatch.setattr(os, "memfd_create", full)
    with opened() as reader, opened() as mate:
        at = Rendezvous()
        with pytest.warns(UserWarning, match="can't be shared with others of this host: no room"):
            assert reader.read(announced(), at, seconds=1) == WORLD
        with pytest.warns(UserWarning, match="couldn't read it"):
            assert mate.read(announced(reader.door), at, seconds=PATIENCE) == WORLD
        assert at.asked.count(0) == 2
