"""The rendezvous as a service: strangers, silent, slow and garbled peers, and that closing leaves nothing."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from refit_sdk import __version__, messages
from refit_sdk import manifest as wire
from refit_sdk.control import MAX_BODY, OPEN_TOKEN, Address, Channel, Client, connect, listen
from refit_sdk.coordinator import Coordinator
from refit_sdk.errors import RendezvousError
from refit_sdk.hub import Hub
from refit_sdk.joining import serve
from refit_sdk.messages import Claim, Hello, Message
from refit_sdk.world import Manifest

PATIENCE = 30.0
EMPTY = wire.encode(Manifest(()))


@contextmanager
def hosting(*, heartbeat: float = 30.0, host: str = "127.0.0.1") -> Iterator[tuple[Hub, Address]]:
    """A rendezvous for one source and the engine `a` of one rank."""
    listener = listen(Address(host, 0))
    at = Address(host, listener.getsockname()[1])
    hub = serve(
        listener, token=OPEN_TOKEN, engines=("a",), deadline=60.0, heartbeat=heartbeat, hosted_by="the controller"
    )
    try:
        yield hub, at
    finally:
        hub.close("the test is over", normal=True)


@contextmanager
def joined(at: Address, *, heartbeat: float = 30.0) -> Iterator[Client]:
    """A process's end of the channel."""
    made = Client(connect(at, token=OPEN_TOKEN, seconds=PATIENCE), heartbeat=heartbeat, urgent=lambda message: None)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def raw(at: Address) -> Iterator[Channel]:
    """A channel without threads: it neither beats nor reads by itself."""
    channel = connect(at, token=OPEN_TOKEN, seconds=PATIENCE)
    try:
        yield channel
    finally:
        channel.close()
        channel.free()


def hello(side: Any = "source", engine: str = "", rank: int = 0, size: int = 1) -> Hello:
    return Hello(
        sdk=__version__,
        claims=(Claim(side, engine, rank, size),),
        manifests=(EMPTY,),
        settings="{}" if side == "source" else None,
        plugins={},
        engines=None,
        pid=os.getpid(),
        host="here",
    )


def hear(client: Client, kind: type[Message]) -> Any:
    """The next message of a kind."""
    while True:
        message = client.next(PATIENCE)
        assert message is not None, f"no {kind.__name__} came"
        if isinstance(message, kind):
            return message


def is_served(at: Address) -> bool:
    """Whether a new process is answered."""
    with joined(at) as client:
        client.send(hello(rank=1, size=2))
        return isinstance(client.next(PATIENCE), (messages.Welcome, messages.Refused))


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "HTTP": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "noise": lambda sock: sock.sendall(bytes(range(256)) * 64),
    "a huge length": lambda sock: sock.sendall(struct.pack("!i", 2**31 - 1)),
    "a huger length": lambda sock: sock.sendall(struct.pack("!iQ", -1, 2**63)),
    "half a header": lambda sock: sock.sendall(b"\x00\x00"),
    "nothing": lambda sock: None,
    "half open": lambda sock: sock.shutdown(socket.SHUT_WR),
    "a reset": lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_gets_in_nobodys_way(what: str) -> None:
    with hosting() as (_, at), socket.create_connection((at.host, at.port)) as sock:
        STRANGERS[what](sock)
        if what == "a reset":
            sock.close()
        assert is_served(at)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_many_connections_that_say_nothing_keep_nobody_out(host: str) -> None:
    with hosting(host=host) as (_, at):
        idle = [socket.create_connection((at.host, at.port)) for _ in range(64)]
        try:
            assert is_served(at)
        finally:
            for sock in idle:
                sock.close()


def test_a_process_with_another_token_is_told_and_keeps_nobody_out() -> None:
    with hosting() as (_, at):
        with pytest.raises(RendezvousError, match="the token here is not the token there"):
            connect(at, token=b"another", seconds=PATIENCE)
        assert is_served(at)


def hear_raw(channel: Channel) -> Message:
    """The next message that isn't a sign of life."""
    while isinstance(message := messages.decode_down(channel.recv()), messages.Beat):
        pass
    return message


GARBLED: dict[str, tuple[Callable[[Channel], None], str]] = {
    "no message": (lambda channel: channel.send(b"junk"), "doesn't fit the schema"),
    "a message of the other direction": (
        lambda channel: channel.send(messages.encode(messages.Formed(epoch=1))),
        "doesn't fit the schema",
    ),
    "over the cap": (
        lambda channel: channel._socket.sendall(struct.pack("!iQ", -1, MAX_BODY + 1)),
        "its process is gone",
    ),
    "half a body": (lambda channel: (channel._socket.sendall(struct.pack("!i", 9) + b"x"), channel.close())[1], "gone"),
    "the end": (lambda channel: channel.close(), "its process is gone"),
}


@pytest.mark.parametrize("what", GARBLED)
def test_a_garbled_process_is_lost_and_the_others_hear_why(what: str) -> None:
    garble, cause = GARBLED[what]
    with hosting() as (_, at), joined(at) as other, raw(at) as bad:
        other.send(hello())
        hear(other, messages.Welcome)
        bad.send(messages.encode(hello("target", "a", 0, 2)))
        assert isinstance(hear_raw(bad), messages.Welcome)
        garble(bad)
        fault = hear(other, messages.Fault)
        assert "a[0]" in fault.failures
        assert cause in fault.failures["a[0]"]


def test_a_silent_process_is_lost_within_the_heartbeat_and_a_beating_one_is_not() -> None:
    with hosting(heartbeat=1.0) as (_, at), joined(at, heartbeat=1.0) as other, raw(at) as silent:
        silent.send(messages.encode(hello("target", "a", 0, 2)))
        assert isinstance(hear_raw(silent), messages.Welcome)
        other.send(hello())
        fault = hear(other, messages.Fault)
        assert set(fault.failures) == {"a[0]"}
        assert "no sign of life for 1." in fault.failures["a[0]"]


def test_a_process_that_does_not_read_delays_nobody() -> None:
    with hosting() as (_, at), joined(at) as other, raw(at) as slow:
        other.set("big", bytes(1 << 20))
        assert other.check(["big"])
        for number in range(64):
            slow.send(messages.encode(messages.StoreGet(id=number, key="big")))
        for number in range(50):
            assert other.add("n", 1) == number + 1
        other.send(hello())
        assert isinstance(hear(other, messages.Welcome), messages.Welcome)


def test_words_before_a_hello_are_ignored() -> None:
    with hosting() as (_, at), joined(at) as eager:
        eager.send(messages.Ready(kind="push", manifests=(None,), version=1))
        eager.send(messages.Linked(epoch=1))
        eager.send(messages.Done(push=1, engines={}))
        eager.send(messages.Leave())
        eager.send(hello())
        assert isinstance(eager.next(PATIENCE), messages.Welcome)


def test_closing_tells_everybody_and_leaves_no_thread_and_no_descriptor() -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with hosting() as (hub, at):
        with joined(at) as one, joined(at) as other:
            one.send(hello())
            other.send(hello("target", "a"))
            hear(one, messages.Form)
            hear(other, messages.Form)
            hub.close("done", normal=True)
            for client in (one, other):
                assert hear(client, messages.Closed) == messages.Closed(reason="done", normal=True)
        hub.close("again", normal=False)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
    with pytest.raises(RendezvousError, match="nobody answers"):
        connect(at, token=OPEN_TOKEN, seconds=0.1)


def test_closing_hangs_up_on_who_has_not_said_the_token_yet() -> None:
    threads = threading.active_count()
    with hosting() as (hub, at), socket.create_connection((at.host, at.port)) as sock:
        assert sock.recv(1)  # the challenge: somebody waits for the answer
        hub.close("done", normal=True)
        sock.settimeout(PATIENCE)
        while sock.recv(1024):
            pass
        assert threading.active_count() == threads


def test_a_refusal_of_a_verb_is_raised_where_it_was_asked() -> None:
    with hosting() as (hub, _), pytest.raises(RendezvousError, match="'z' is not known"):
        hub.ask(lambda: hub.coordinator.pause("z"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_ends_the_rendezvous_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Coordinator, link: int, message: Any, *, now: float) -> list[tuple[int, Message]]:
        raise AssertionError("a fault of ours")

    with hosting() as (hub, at), joined(at) as client, joined(at) as other:
        other.send(hello("target", "a"))
        hear(other, messages.Welcome)
        monkeypatch.setattr(Coordinator, "receive", broken)
        client.send(hello())
        told = messages.Closed(reason="the rendezvous failed: AssertionError: a fault of ours", normal=False)
        for each in (client, other):
            assert hear(each, messages.Closed) == told
            with pytest.raises(RendezvousError, match="it closed the connection"):
                each.next(PATIENCE)
        with pytest.raises(RendezvousError, match="nobody answers"):
            connect(at, token=OPEN_TOKEN, seconds=0.1)
        with pytest.raises(RendezvousError, match="this rendezvous has ended"):
            hub.ask(list)
