"""The rendezvous as a service: sockets and threads around one `Coordinator`, which alone decides.

1. One thread accepts connections; one a connection proves the token and reads. All that is read goes into one queue.
2. One thread takes from the queue, asks the coordinator, and hands what it answers to a writer thread a connection, so
   that a peer that doesn't read delays nobody.
3. The same thread ticks the coordinator's deadline, sends signs of life, and declares silent peers lost.
4. A fault of that thread's own is told to every peer before the connections close, and is raised in the thread.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Final

from attrs import define, field

from refit_sdk import messages
from refit_sdk.control import Channel
from refit_sdk.coordinator import Coordinator
from refit_sdk.errors import RefitError, RendezvousError
from refit_sdk.messages import Beat, Message, StoreAdd, StoreCheck, StoreDelete, StoreGet, StoreSet, Up
from refit_sdk.rounds import Sent
from refit_sdk.table import Table

FLUSH_SECONDS: Final = 2.0
"""How long closing waits for last words to leave."""

FULL_SECONDS: Final = 0.25
"""How long accepting pauses when this process can't open more descriptors."""

STORE = (StoreSet, StoreGet, StoreAdd, StoreCheck, StoreDelete)


@define(eq=False)
class _Peer:
    """A connection: its channel, what is to be written to it, and when it was last heard."""

    channel: Channel
    heard: float
    outbox: queue.SimpleQueue[Message | None] = field(factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(factory=list)


class Hub:
    """Serves a coordinator on a bound socket until `close`."""

    def __init__(self, listener: socket.socket, *, token: bytes, coordinator: Coordinator, heartbeat: float) -> None:
        self.coordinator = coordinator
        self._listener = listener
        self._token = token
        self._heartbeat = heartbeat
        self._table = Table()
        self._peers: dict[int, _Peer] = {}
        self._greeting: dict[threading.Thread, socket.socket] = {}
        self._leaving: list[threading.Thread] = []
        self._links = count(1)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = True
        self._failed = False
        self._beat_at = self._watch_at = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name=f"refit-hub-{target.__name__.strip('_')}", daemon=True)
            for target in (self._accept, self._serve)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, verb: Callable[[], Sent]) -> None:
        """Run a verb of the coordinator on the serving thread and send what it answers. Its `RefitError` is raised."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                self._deliver(verb())
                done.set_result(None)
            except RefitError as error:
                done.set_exception(error)

        self._events.put(run)
        while not done.done():
            with contextlib.suppress(TimeoutError):
                done.result(timeout=FLUSH_SECONDS)
            if not done.done() and not self._threads[1].is_alive():
                raise RendezvousError("this rendezvous has ended")
        done.result()

    def linger(self, seconds: float) -> None:
        """Stay while ranks that haven't come yet are to hear why joining failed, for at most `seconds`."""
        end = time.monotonic() + seconds
        with contextlib.suppress(RendezvousError):
            while self._untold() and time.monotonic() < end:
                time.sleep(min(0.02, seconds))

    def _untold(self) -> list[str]:
        found: list[str] = []

        def look() -> Sent:
            found.extend(self.coordinator.untold)
            return []

        self.ask(look)
        return found

    def close(self, reason: str, *, normal: bool) -> None:
        """Tell everybody that the session is over, hang up, and end all threads. A second call does nothing."""
        if not self._open:
            return
        with contextlib.suppress(RendezvousError):  # it has ended by a fault of ours, and everybody knows
            self.ask(lambda: self.coordinator.close(reason, normal=normal))
        self._open = False
        self._events.put(lambda: None)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        self._end_greetings()
        peers = list(self._peers.values())
        self._flush(peers)
        for peer in peers:
            self._hang_up(peer)
        for thread in self._leaving:
            thread.join()

    def _end_greetings(self) -> None:
        for thread, sock in list(self._greeting.items()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()
        while not self._events.empty():
            self._events.get()()

    def _hang_up(self, peer: _Peer) -> None:
        peer.channel.close()
        for thread in peer.threads:
            thread.join()
        peer.channel.free()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return
                warnings.warn(f"the rendezvous can't take one more process: {error}; raise ulimit -n", stacklevel=1)
                time.sleep(FULL_SECONDS)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._greet, args=(sock,), name="refit-hub-greet", daemon=True)
            self._greeting[thread] = sock
            thread.start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            self._seat(Channel(sock, token=self._token, server=True))
        except RendezvousError:
            pass  # whoever it was, it is no process of this session
        except OSError as error:
            warnings.warn(f"the rendezvous can't take one more process: {error}; raise ulimit -n", stacklevel=1)
            sock.close()
        finally:
            del self._greeting[threading.current_thread()]

    def _seat(self, channel: Channel) -> None:
        link = next(self._links)
        peer = _Peer(channel, time.monotonic())
        peer.threads = [
            threading.Thread(target=target, args=(link, peer), name=f"refit-hub-{link}", daemon=True)
            for target in (self._write, self._read)
        ]
        self._events.put(lambda: self._enter(link, peer))

    def _enter(self, link: int, peer: _Peer) -> None:
        self._peers[link] = peer
        for thread in peer.threads:
            thread.start()

    def _read(self, link: int, peer: _Peer) -> None:
        cause = "its process is gone (the connection closed)"
        try:
            while True:
                message = messages.decode_up(peer.channel.recv())
                peer.heard = time.monotonic()
                if not isinstance(message, Beat):
                    self._events.put(lambda message=message: self._take(link, message))  # type: ignore[misc]
        except (EOFError, OSError):
            pass
        except RendezvousError as error:
            cause = str(error)
        self._events.put(lambda: self._lose(link, cause))

    def _write(self, link: int, peer: _Peer) -> None:
        while (message := peer.outbox.get()) is not None:
            try:
                peer.channel.send(messages.encode(message))
            except OSError:
                peer.channel.close()  # its reader hears it, and the peer is lost
                return

    def _take(self, link: int, message: Up) -> None:
        if self._failed:
            return
        if isinstance(message, STORE):
            self._deliver(self._table.handle(link, message))
        else:
            self._deliver(self.coordinator.receive(link, message, now=time.monotonic()))

    def _lose(self, link: int, cause: str) -> None:
        peer = self._peers.pop(link, None)
        if peer is None:
            return
        peer.outbox.put(None)
        peer.channel.close()
        if not self._failed:
            self._deliver(self.coordinator.lost(link, cause, now=time.monotonic()))
        thread = threading.Thread(target=self._hang_up, args=(peer,), name="refit-hub-hang-up", daemon=True)
        thread.start()
        self._leaving = [*(leaving for leaving in self._leaving if leaving.is_alive()), thread]

    def _deliver(self, sent: Sent) -> None:
        for link, message in sent:
            if isinstance(message, messages.Form):
                self._table.clear()
            if link in self._peers:
                self._peers[link].outbox.put(message)

    def _serve(self) -> None:
        try:
            while self._open:
                with contextlib.suppress(queue.Empty):
                    self._events.get(timeout=min(0.25, self._heartbeat / 8))()
                now = time.monotonic()
                self._deliver(self.coordinator.tick(now=now))
                if now >= self._watch_at:
                    self._watch_at = now + min(0.25, self._heartbeat / 8)
                    self._watch(now)
        except BaseException as error:
            self._fail(f"the rendezvous failed: {type(error).__name__}: {error}")
            raise

    def _fail(self, reason: str) -> None:
        """A fault of ours: the coordinator can't be trusted any more, and nobody may go on waiting for it."""
        self._failed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        peers = list(self._peers.values())
        for peer in peers:
            peer.outbox.put(messages.Closed(reason=reason, normal=False))
        self._flush(peers)
        for peer in peers:
            peer.channel.close()

    def _flush(self, peers: list[_Peer]) -> None:
        """Let the writers write what they have, and end."""
        for peer in peers:
            peer.outbox.put(None)
        end = time.monotonic() + FLUSH_SECONDS
        for peer in peers:
            peer.threads[0].join(max(0.0, end - time.monotonic()))

    def _watch(self, now: float) -> None:
        for link, peer in list(self._peers.items()):
            if now - peer.heard > self._heartbeat:
                self._lose(link, f"no sign of life for {now - peer.heard:.1f} s")
        if now >= self._beat_at:
            self._beat_at = now + self._heartbeat / 4
            for peer in self._peers.values():
                peer.outbox.put(Beat())
