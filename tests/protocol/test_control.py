"""The control channel: who gets in, what a body may be, and that a peer that is silent or stuck is noticed in time."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk import messages
from refit_sdk.control import (
    MAX_BODY,
    OPEN_TOKEN,
    Address,
    Channel,
    Client,
    connect,
    find_token,
    listen,
    parse_rendezvous,
)
from refit_sdk.errors import RendezvousError
from refit_sdk.messages import StoreAdd, StoreCheck, StoreDelete, StoreGet, StoreReply, StoreSet
from refit_sdk.table import Table

LOOPBACK = Address("127.0.0.1", 0)


@contextmanager
def serving(answer: Callable[[socket.socket], None], *, address: Address = LOOPBACK) -> Iterator[Address]:
    """A listener that hands its first connection to `answer`, on a thread."""
    listener = listen(address)
    accepted: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError, RendezvousError):
            accepted.append(listener.accept()[0])
            answer(accepted[0])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address(address.host, listener.getsockname()[1])
    finally:
        listener.close()
        for sock in accepted:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def pair(*, address: Address = LOOPBACK, token: bytes = OPEN_TOKEN) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel: the rendezvous's, and a process's."""
    ends: list[Channel] = []
    there = threading.Event()

    def answer(sock: socket.socket) -> None:
        ends.append(Channel(sock, token=token, server=True))
        there.set()

    with serving(answer, address=address) as at:
        here = connect(at, token=token, seconds=30)
        assert there.wait(30)
        try:
            yield ends[0], here
        finally:
            for end in (here, ends[0]):
                end.close()
                end.free()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://10.0.0.1:29600", "10.0.0.1", 29600),
        ("tcp://node-7:1", "node-7", 1),
        ("tcp://[::1]:29600", "::1", 29600),
        ("tcp://[fe80::1%eth0]:29600", "fe80::1%eth0", 29600),
        ("tcp://[fe80::1%25eth0]:29600", "fe80::1%25eth0", 29600),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_rendezvous(text) == Address(host, port)
    assert str(parse_rendezvous(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "here", "10.0.0.1:29600", "http://h:1", "tcp://h", "tcp://:1", "tcp://h:port", "tcp://h:70000", "tcp://h:1/x",
     "tcp://fe80::1:29500"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(RendezvousError, match="is not an address; it looks like"):
        parse_rendezvous(text)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("node-7", False),
    ],
)
def test_what_only_this_host_reaches(host: str, local: bool) -> None:
    assert Address(host, 1).is_loopback is local


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("REFIT_TOKEN", "REFIT_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    far, near = Address("10.0.0.1", 1), Address("::1", 1)
    assert find_token(None, address=near, insecure=False) == OPEN_TOKEN
    with pytest.raises(RendezvousError, match="no token was given: pass token=, set REFIT_TOKEN or REFIT_TOKEN_FILE"):
        find_token(None, address=far, insecure=False)
    file = tmp_path / "token"
    file.write_text("of the file\n")
    monkeypatch.setenv("REFIT_TOKEN_FILE", str(file))
    assert find_token(None, address=far, insecure=False) == b"of the file"
    monkeypatch.setenv("REFIT_TOKEN", "of the environment")
    assert find_token(None, address=far, insecure=False) == b"of the environment"
    assert find_token("given", address=far, insecure=False) == b"given"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_listener_is_bound_to_its_address_alone(host: str) -> None:
    with listen(Address(host, 0)) as sock:
        assert sock.getsockname()[0] == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bodies_go_both_ways_whole(host: str) -> None:
    with pair(address=Address(host, 0), token=b"secret") as (there, here):
        for body in (b"", b"x", bytes(range(256)) * 4096):
            here.send(body)
            assert there.recv() == body
            there.send(body)
            assert here.recv() == body
        assert here.local_host == host


def test_another_token_is_refused_at_both_ends() -> None:
    refused: list[RendezvousError] = []

    def answer(sock: socket.socket) -> None:
        try:
            Channel(sock, token=b"this", server=True)
        except RendezvousError as error:
            refused.append(error)

    with serving(answer) as at, pytest.raises(RendezvousError, match="the token here is not the token there"):
        connect(at, token=b"that", seconds=30)
    assert "the token here is not the token there" in str(refused[0])


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\x00\x00\x04junk", b"\xff" * 4096, b"\x7f\xff\xff\xff"]
)
def test_whoever_speaks_another_protocol_is_not_taken_for_a_rendezvous(words: bytes) -> None:
    def answer(sock: socket.socket) -> None:
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)

    with serving(answer) as at, pytest.raises(RendezvousError, match=f"{at}, where source rank 0 .* refit's protocol"):
        connect(at, token=OPEN_TOKEN, seconds=30)


def test_a_rendezvous_that_accepts_and_says_nothing_is_given_up() -> None:
    def answer(sock: socket.socket) -> None:
        while sock.recv(1024):
            pass

    with serving(answer) as at, pytest.raises(RendezvousError, match=r"the other end said nothing for 0\.\d s"):
        connect(at, token=OPEN_TOKEN, seconds=0.5)


def test_nobody_there() -> None:
    with listen(LOOPBACK) as sock:
        at = Address("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(
        RendezvousError, match=r"nobody answers at tcp://127.0.0.1:\d+ after 0.2 s .*start source rank 0"
    ):
        connect(at, token=OPEN_TOKEN, seconds=0.2)


def test_a_rendezvous_that_comes_later_is_found() -> None:
    with listen(LOOPBACK) as sock:
        at = Address("127.0.0.1", sock.getsockname()[1])
    found: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(connect(at, token=OPEN_TOKEN, seconds=30)))
    thread.start()
    with serving(lambda sock: found.put(Channel(sock, token=OPEN_TOKEN, server=True)), address=at):
        both = [found.get(timeout=30) for _ in range(2)]
        thread.join(30)
    for channel in both:
        channel.close()
        channel.free()


def test_a_body_over_the_cap_is_refused_before_it_is_read() -> None:
    with pair() as (there, here):
        here._socket.sendall(struct.pack("!i", -1) + struct.pack("!Q", MAX_BODY + 1))
        with pytest.raises(OSError, match="bad message length"):
            there.recv()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        b"\x80",
        messages.encode(messages.Welcome(late=False, hosted_by="x", heartbeat=1, deadline=1)),
        messages._encoder.encode({"type": "Linked"}),
        messages._encoder.encode({"type": "Linked", "epoch": "1"}),
        messages._encoder.encode({"type": "Linked", "epoch": True}),
        messages._encoder.encode({"type": "Linked", "epoch": 1, "more": 2}),
        messages._encoder.encode({"type": "Reduce", "epoch": 1}),
        messages._encoder.encode({"type": "StoreSet", "key": b"\xff", "value": b""}),
        b"\x82\xa4type\xa8StoreSet\xa3key\xa2\xff\xff",
        messages.encode(messages.Leave(reason="x" * 200))[:-50],
    ],
)
def test_a_body_that_does_not_fit_the_schema_is_an_error(body: bytes) -> None:
    with pytest.raises(RendezvousError, match="doesn't fit the schema"):
        messages.decode_up(body)


@given(st.binary(max_size=200))
def test_no_body_does_anything_but_decode_or_be_refused(body: bytes) -> None:
    for decode in (messages.decode_up, messages.decode_down):
        with contextlib.suppress(RendezvousError):
            assert isinstance(decode(body), messages.Message)


@contextmanager
def client(here: Channel, *, heartbeat: float, urgent: Callable[[Any], None] = lambda m: None) -> Iterator[Client]:
    made = Client(here, heartbeat=heartbeat, urgent=urgent)
    try:
        yield made
    finally:
        made.close()


def test_a_rendezvous_that_falls_silent_is_lost() -> None:
    told: list[Any] = []
    with pair() as (_, here), client(here, heartbeat=0.4, urgent=told.append) as made:
        with pytest.raises(RendezvousError, match=r"the rendezvous host is gone: no sign of life for 0\.\d s"):
            made.next(None)
        with pytest.raises(RendezvousError, match="no sign of life"):
            made.get("key", timeout=30)
        with pytest.raises(RendezvousError, match="no sign of life"):
            made.send(messages.Beat())
    assert [type(message) for message in told] == [messages.Closed]


def test_a_rendezvous_that_takes_no_more_does_not_hold_a_sender_for_ever() -> None:
    def fill(made: Client) -> None:
        for _ in range(64):
            made.set("key", bytes(1 << 24))

    with pair() as (_, here), client(here, heartbeat=0.5) as made, pytest.raises(RendezvousError, match="no sign"):
        fill(made)


def test_a_beating_rendezvous_is_alive_however_long_nothing_is_said() -> None:
    with pair() as (there, here), client(here, heartbeat=2.0) as made:
        for _ in range(3):
            there.send(messages.encode(messages.Beat()))
            assert made.next(0.1) is None
        there.send(messages.encode(messages.Link(epoch=3)))
        assert made.next(30) == messages.Link(epoch=3)


def test_what_came_before_the_end_is_heard_first() -> None:
    with pair() as (there, here), client(here, heartbeat=30) as made:
        there.send(messages.encode(messages.Link(epoch=3)))
        there.close()
        assert made.next(30) == messages.Link(epoch=3)
        with pytest.raises(RendezvousError, match="it closed the connection"):
            made.next(30)


def test_a_body_of_another_schema_ends_the_channel() -> None:
    with pair() as (there, here), client(here, heartbeat=30) as made:
        there.send(messages.encode(messages.Leave()))
        with pytest.raises(RendezvousError, match="doesn't fit the schema"):
            made.next(30)


def test_closing_wakes_who_waits_and_ends_the_threads() -> None:
    before = threading.active_count()
    with pair() as (_, here), client(here, heartbeat=30) as made:
        woken: list[BaseException] = []

        def wait() -> None:
            try:
                made.next(None)
            except RendezvousError as error:
                woken.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        made.close()
        thread.join(30)
        assert str(woken[0]) == "this session is closed"
    assert threading.active_count() == before


def test_a_key_that_nobody_sets_is_named() -> None:
    unset = pytest.raises(RendezvousError, match=r"'3/a/here/1' was not set within 0.1 s")
    with pair() as (_, here), client(here, heartbeat=30) as made, unset:
        made.get("3/a/here/1", timeout=0.1)


def test_the_table_and_the_wire_agree() -> None:
    table = Table()
    with pair() as (there, here), client(here, heartbeat=30) as made:
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    request = messages.decode_up(there.recv())
                except (EOFError, OSError):
                    return
                if not isinstance(request, messages.Beat):
                    for _, answer in table.handle(1, request):  # type: ignore[arg-type]
                        there.send(messages.encode(answer))

        thread = threading.Thread(target=serve)
        thread.start()
        made.set("k", b"v")
        assert made.get("k", timeout=30) == b"v"
        assert (made.add("n", 2), made.add("n", 3)) == (2, 5)
        assert (made.check(["k", "n"]), made.check(["k", "x"])) == (True, False)
        assert (made.delete("k"), made.delete("k"), made.check(["k"])) == (True, False, False)
        stop.set()
        here.close()
        thread.join(30)


def test_a_question_is_answered_when_the_key_is_set_and_only_once() -> None:
    table = Table()
    assert table.handle(1, StoreGet(id=7, key="k")) == []
    assert table.handle(2, StoreGet(id=8, key="k")) == []
    assert table.handle(3, StoreSet(key="k", value=b"v")) == [
        (1, StoreReply(id=7, value=b"v")),
        (2, StoreReply(id=8, value=b"v")),
    ]
    assert table.handle(3, StoreSet(key="k", value=b"w")) == []
    assert table.handle(1, StoreGet(id=9, key="k")) == [(1, StoreReply(id=9, value=b"w"))]


def test_answers_fit_the_schema() -> None:
    table = Table()
    table.handle(1, StoreSet(key="k", value=b"v"))
    asked = [
        StoreCheck(id=1, keys=("k",)),
        StoreCheck(id=2, keys=("x",)),
        StoreDelete(id=3, key="k"),
        StoreDelete(id=4, key="k"),
        StoreAdd(id=5, key="n", amount=2),
    ]
    answers = [answer for request in asked for _, answer in table.handle(1, request)]
    assert [messages.decode_down(messages.encode(answer)) for answer in answers] == answers
    assert [answer.number for answer in answers] == [1, 0, 1, 0, 2]  # type: ignore[attr-defined]


def test_a_counter_on_top_of_a_word_begins_anew() -> None:
    table = Table()
    table.handle(1, StoreSet(key="k", value=b"a word"))
    assert table.handle(1, StoreAdd(id=1, key="k", amount=3)) == [(1, StoreReply(id=1, number=3))]
