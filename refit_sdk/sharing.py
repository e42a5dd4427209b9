"""One reader a host: the processes of a host share one copy of the world, which one of them reads at the rendezvous.

1. Each process opens a door when it joins: a Unix socket without a name in any file system, and a key that only the
   rendezvous is told. The rendezvous names one process a host as the reader, and tells the others its door.
2. The reader asks the rendezvous for the pieces one by one, and looks whether what it has is what was announced. It
   puts it into a memfd that nobody can write any more.
3. Whoever comes to the door with the key and the digest gets the descriptor; who comes early waits. If the reader can't
   read, it closes the door on them.
4. What comes through a door counts only if it has the length and the digest that the rendezvous announced. Else, and
   where nobody opens, a process warns and reads at the rendezvous itself.

Two processes are taken for neighbours if they run on one kernel in one network namespace, and state no different
REFIT_HOST. That's a guess, which only decides who is asked first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

from attrs import define, field

from refit_sdk.control import Client
from refit_sdk.errors import RendezvousError
from refit_sdk.manifest import MAX_WORLD_BYTES, decode_world, digest
from refit_sdk.messages import Door, Form
from refit_sdk.world import World

Ask = Callable[[int], bytes]
"""Where a piece begins → the piece, from the rendezvous."""

KEY_NBYTES: Final = 16
PATIENCE: Final = 1.0
"""Seconds that somebody at the door may take to say the key."""
WAIT: Final = 30.0
"""The most seconds that a process waits for its host's reader."""

_GREETING: Final = struct.Struct(f"{KEY_NBYTES}s32s")


def this_host() -> str:
    """What processes must have in common to find each other's doors; "" where there is no telling.

    >>> this_host() == this_host()
    True
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
    return "/".join((os.environ.get("REFIT_HOST", ""), kernel, network))


class NoDoor(Exception):
    """Why a process doesn't get its world from its host's reader."""


@define(eq=False)
class _Stock:
    """What a reader has: the digest of a world, its descriptor (None: it couldn't be read), and who waits for it."""

    digest: str = ""
    segment: int | None = None
    waiting: list[tuple[str, socket.socket]] = field(factory=list)


class Sharing:
    """A process's part in sharing worlds with those of its host."""

    def __init__(self, *, host: str) -> None:
        """`host` is what neighbours have in common; "" to share with nobody."""
        self._lock = threading.Lock()
        self._stock = _Stock()
        self._listener = _open_door() if host else None
        self._thread: threading.Thread | None = None
        self.door: Door | None = None
        if self._listener is not None:
            name = self._listener.getsockname()[1:].decode()
            self.door = Door(host, name, secrets.token_bytes(KEY_NBYTES))
            self._thread = threading.Thread(target=self._serve, name="refit-door", daemon=True)
            self._thread.start()

    def world(self, form: Form, client: Client, *, deadline: float) -> World:
        """The world that was announced. A reader of this host is waited for at most a quarter of the deadline."""

        def ask(start: int) -> bytes:
            return client.piece(form.epoch, start, timeout=deadline)

        return decode_world(self.read(form, ask, seconds=min(WAIT, deadline / 4)))

    def read(self, form: Form, ask: Ask, *, seconds: float) -> bytes:
        """The world that was announced, from the reader of this host, or from the rendezvous by pieces.

        `RendezvousError` if what the rendezvous gives isn't what it announced.
        """
        if form.door is not None:
            try:
                return fetch(form.door, form, seconds=seconds)
            except NoDoor as why:
                warnings.warn(f"this process reads the world at the rendezvous itself: {why}", stacklevel=2)
                return gather(form, ask)
        world: bytes | None = None
        try:
            world = gather(form, ask)
            return world
        finally:
            self._offer(form.digest, world)

    def _offer(self, name: str, world: bytes | None) -> None:
        """Give a world, or the news that there is none, to those who wait and those who will come."""
        segment = None
        if world is not None and self._listener is not None:
            try:
                segment = _sealed(world)
            except OSError as error:
                warnings.warn(f"the world can't be shared with others of this host: {error}", stacklevel=3)
        with self._lock:
            self._forget()
            self._stock.digest, self._stock.segment = name, segment
            waiting, self._stock.waiting = self._stock.waiting, []
            for wanted, caller in waiting:
                self._answer(wanted, caller)

    def _forget(self) -> None:
        if self._stock.segment is not None:
            os.close(self._stock.segment)
        self._stock.digest, self._stock.segment = "", None

    def _answer(self, wanted: str, caller: socket.socket) -> None:
        """Hand over, or send away, or let wait for a world that isn't here yet. Under the lock."""
        if wanted != self._stock.digest:
            self._stock.waiting.append((wanted, caller))
            return
        with contextlib.suppress(OSError):
            if self._stock.segment is not None:
                socket.send_fds(caller, [b"w"], [self._stock.segment])
        caller.close()

    def _serve(self) -> None:
        assert self._listener is not None
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            wanted = self._hear(caller)
            if wanted is None:
                caller.close()
                continue
            with self._lock:
                self._answer(wanted, caller)

    def _hear(self, caller: socket.socket) -> str | None:
        """The digest that somebody with the key asks for."""
        assert self.door is not None
        try:
            caller.settimeout(PATIENCE)
            key, wanted = _GREETING.unpack(caller.recv(_GREETING.size, socket.MSG_WAITALL))
            return wanted.decode() if hmac.compare_digest(key, self.door.key) else None
        except (OSError, struct.error, UnicodeDecodeError):
            return None

    def close(self) -> None:
        """Shut the door; who waits is sent away. A second call does nothing."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._forget()
            waiting, self._stock.waiting = self._stock.waiting, []
            for _, caller in waiting:
                caller.close()


def _open_door() -> socket.socket | None:
    """A listener, or None where the kernel has no such sockets: then nothing is shared."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0refit-door-{secrets.token_hex(16)}")
        listener.listen(1024)
    except OSError:
        listener.close()
        return None
    return listener


def _sealed(world: bytes) -> int:
    """A descriptor of these bytes that nobody can change."""
    segment = os.memfd_create("refit-world", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(segment, "wb", closefd=False) as file:
            file.write(world)
        fcntl.fcntl(segment, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(segment)
        raise
    return segment


def gather(form: Form, ask: Ask) -> bytes:
    """The announced world, piece by piece. `RendezvousError` if the pieces don't make it."""
    if not 0 < form.nbytes <= MAX_WORLD_BYTES:
        raise RendezvousError(f"a world of {form.nbytes} bytes was announced; at most {MAX_WORLD_BYTES} are taken")
    world = bytearray()
    while len(world) < form.nbytes:
        piece = ask(len(world))
        if not 0 < len(piece) <= form.nbytes - len(world):
            raise RendezvousError(
                f"the rendezvous announced a world of {form.nbytes} bytes for epoch {form.epoch}, and gave a piece of "
                f"{len(piece)} after {len(world)}: it was cut off, or another epoch has begun"
            )
        world += piece
    found = bytes(world)
    if digest(found) != form.digest:
        raise RendezvousError(
            f"the rendezvous announced the world {form.digest} for epoch {form.epoch} and gave {digest(found)}"
        )
    return found


def fetch(door: Door, form: Form, *, seconds: float) -> bytes:
    """The announced world from the reader of this host. `NoDoor` says why not, whatever comes instead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as way:
        try:
            way.settimeout(max(0.001, seconds))
            way.connect(f"\0{door.name}")
            way.sendall(_GREETING.pack(door.key, form.digest.encode()))
            said, segments, _, _ = socket.recv_fds(way, 1, 1)
        except TimeoutError:
            raise NoDoor(f"the reader of this host gave nothing in {seconds:.1f} s") from None
        except (OSError, ValueError) as error:
            raise NoDoor(f"the reader of this host can't be reached ({error})") from error
    try:
        if not said or not segments:
            raise NoDoor("the reader of this host has gone, or couldn't read it")
        return _content(segments[0], form)
    finally:
        for segment in segments:
            os.close(segment)


def _content(segment: int, form: Form) -> bytes:
    found = os.fstat(segment)
    if not stat.S_ISREG(found.st_mode) or found.st_size != form.nbytes:
        raise NoDoor(f"the reader of this host gave {found.st_size} bytes where {form.nbytes} were announced")
    world = b""
    while len(world) < form.nbytes and (more := os.pread(segment, form.nbytes - len(world), len(world))):
        world += more  # at stated places: all who got the descriptor share one position
    if digest(world) != form.digest:
        raise NoDoor(f"the reader of this host gave the world {digest(world)} where {form.digest} was announced")
    return world
