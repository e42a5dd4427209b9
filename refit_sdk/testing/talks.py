"""What members of a group do in the tests of a fabric: bodies, each run in every member, that return what they saw.

What is raised by a fabric is returned as text where it is awaited.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from refit_sdk.fabric import FabricError, Group, flush
from refit_sdk.runs import Runs
from refit_sdk.testing.member import SURE, Member

LARGE = 32 << 20
"""More bytes than anything keeps for a receive that isn't there yet."""
LONG = 3600.0
"""Seconds that nobody waits."""
SOON = 0.3


def told(work: Callable[[], Any]) -> tuple[str, int | None]:
    """What a `FabricError` says, and whom it blames. Anything but one fails the talk."""
    try:
        found = work()
    except FabricError as error:
        return str(error), error.peer
    raise AssertionError(f"no FabricError, but {found!r}")


def in_order(me: Member) -> Any:
    """0 sends three messages to 1."""
    end = me.connect()
    if me.process == 0:
        return [
            work.wait(SURE)
            for work in [end.send(b, peer=1) for b in (me.numbers(1, 2), me.numbers(3, 4), me.numbers(5))]
        ]
    buffers = [me.numbers(0, 0), me.numbers(0, 0), me.numbers(0)]
    counts = [work.wait(SURE) for work in [end.recv(buffer, peer=0) for buffer in buffers]]
    return counts, [buffer.tolist() for buffer in buffers]


def many(me: Member, count: int) -> list[int]:
    """Messages of a thousand lengths, all posted before any is waited for; the receiver's that aren't right."""
    end = me.connect()
    sizes = [1 + 37 * number % 999 for number in range(count)]
    if me.process == 0:
        works = [end.send(me.filled(nbytes, number), peer=1) for number, nbytes in enumerate(sizes)]
        return [number for number, work in enumerate(works) if work.wait(SURE) != sizes[number]]
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=me.device) for nbytes in sizes]
    works = [end.recv(buffer, peer=0) for buffer in buffers]
    return [
        number
        for number, work in enumerate(works)
        if work.wait(SURE) != sizes[number] or not torch.equal(buffers[number], me.filled(sizes[number], number))
    ]


def large(me: Member) -> bool:
    """Both send much to each other at once; whether all of it came, to the last byte."""
    end = me.connect()
    peer = 1 - me.process
    into, out = torch.zeros(LARGE + 3, dtype=torch.uint8, device=me.device), me.filled(LARGE + 3, me.process)
    recv, send = end.recv(into, peer=peer), end.send(out, peer=peer)
    return recv.wait(SURE) == send.wait(SURE) == LARGE + 3 and torch.equal(into, me.filled(LARGE + 3, peer))


def unwaited(me: Member) -> bool:
    """0 sends much twice, and waits for neither before 1 has both; whether they came."""
    end = me.connect()
    if me.process == 0:
        works = [end.send(me.filled(LARGE, seed), peer=1) for seed in range(2)]
        flush(end)
        me.meet("came")
        return [work.wait(SURE) for work in works] == [LARGE, LARGE]
    buffers = [torch.zeros(LARGE, dtype=torch.uint8, device=me.device) for _ in range(2)]
    works = [end.recv(buffer, peer=0) for buffer in buffers]
    flush(end)
    came = [work.wait(SURE) for work in works] == [LARGE, LARGE]
    me.meet("came")
    return came and all(torch.equal(buffer, me.filled(LARGE, seed)) for seed, buffer in enumerate(buffers))


def again(me: Member, turns: int, nbytes: int) -> list[int]:
    """The same buffers, turn after turn, rewritten as soon as the fabric says that it is done; the turns that aren't
    right."""
    end, wrong = me.connect(), []
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=me.device) for _ in range(2)]
    for turn in range(turns):
        buffer = buffers[turn % 2]
        if me.process == 0:
            buffer.fill_(turn % 251)
            end.send(buffer, peer=1).wait(SURE)
            buffer.fill_(255)
        else:
            end.recv(buffer, peer=0).wait(SURE)
            wrong += [] if bool((buffer == turn % 251).all()) else [turn]
            buffer.fill_(254)
    return wrong


def all_pairs(me: Member) -> list[int]:
    """Everybody sends its number and the peer's to every peer; what arrived."""
    end = me.connect()
    buffers = [me.numbers(99) for _ in me.peers]
    works = [end.recv(buffer, peer=peer) for buffer, peer in zip(buffers, me.peers, strict=True)]
    works += [end.send(me.numbers(10 * me.process + peer), peer=peer) for peer in me.peers]
    assert [work.wait(SURE) for work in works] == [1] * len(works)
    return [int(buffer) for buffer in buffers]


def early(me: Member) -> bool:
    """1 receives before 0 sends, and 0 sends much before 1 receives; whether either was done too soon."""
    end = me.connect()
    peer, soon = 1 - me.process, False
    for sender in (0, 1):
        about = torch.zeros(LARGE, dtype=torch.uint8, device=me.device)
        if (me.process == sender) != (sender == 1):
            done = threading.Event()
            work = (end.send if me.process == sender else end.recv)(about, peer=peer)
            waiting = threading.Thread(target=lambda work=work, done=done: (work.wait(SURE), done.set()), daemon=True)
            waiting.start()
            soon |= done.wait(SOON)
            me.meet(f"posted {sender}")
            waiting.join(SURE)
        else:
            me.meet(f"posted {sender}")
            (end.send if me.process == sender else end.recv)(about, peer=peer).wait(SURE)
    return soon


def lengths(me: Member, size: int) -> Any:
    """0 sends `size` bytes where 1 expects two: both are told, and nothing beyond the buffer is written."""
    end = me.connect()
    if me.process == 0:
        work = end.send(me.filled(size, 1), peer=1)

        def told_at_last() -> None:
            work.wait(SOON)  # a sender may be done before its receiver finds fault; then its next operation is told
            end.recv(me.numbers(0), peer=1).wait(SOON)

        return told(told_at_last)[0]
    buffer = torch.zeros(12, dtype=torch.uint8, device=me.device)
    told(lambda: end.recv(buffer[:2], peer=0).wait(SOON))
    return buffer[2:].tolist()


def swapped(me: Member) -> Any:
    """0 sends three bytes and then two, where 1 expects two and then three: an error, or each whole in its place."""
    end = me.connect()
    buffers = [me.numbers(1, 2, 3), me.numbers(4, 5)] if me.process == 0 else [me.numbers(0, 0), me.numbers(0, 0, 0)]
    try:
        post = end.send if me.process == 0 else end.recv
        works = [post(buffer, peer=1 - me.process) for buffer in buffers]
        return [work.wait(SOON) for work in works], [buffer.tolist() for buffer in buffers]
    except FabricError as error:
        return str(error)


def incomplete(me: Member, expected: tuple[int, ...]) -> str:
    """Connect a group of which some never come."""
    return told(lambda: me.connect(members=expected, timeout=SOON))[0]


def alone(me: Member) -> bool:
    """A group of one, closed twice."""
    end = me.connect(members=[me.process])
    end.close()
    end.close()
    return True


def aborted(me: Member) -> Any:
    """0 aborts, from another thread, while it waits for a receive; what its pending and later operations say."""
    end = me.connect()
    if me.process:
        me.meet("aborted")
        return None
    pending = [end.recv(me.numbers(0), peer=peer) for peer in (1, 2)] + [end.send(me.filled(LARGE, 1), peer=2)]
    other = threading.Thread(target=_abort_twice, args=(end,), daemon=True)
    begun = time.monotonic()
    other.start()
    said = [told(partial(work.wait, LONG))[0] for work in pending]
    seconds = time.monotonic() - begun
    said.append(told(lambda: end.send(me.numbers(1), peer=1).wait(LONG))[0])
    me.meet("aborted")
    return said, seconds


def _abort_twice(end: Group) -> None:
    time.sleep(SOON)  # the other thread is to be waiting by then, which nothing tells
    end.abort("engine e is dropped")
    end.abort("later")


def left(me: Member) -> Any:
    """1 leaves while 0 waits for it, in the middle of much; 0 and 2 go on."""
    end, other = me.connect(), me.connect("other", members=[0, 2]) if me.process != 1 else None
    me.meet("connected")
    if me.process == 1:
        me.leave()
    if me.process == 0:
        into = torch.zeros(LARGE, dtype=torch.uint8, device=me.device)
        said = told(lambda: end.recv(into, peer=1).wait(SURE))
        me.meet("seen", 2)
        assert other is not None
        return said, [each.send(me.numbers(8), peer=2).wait(SURE) for each in (end, other)]
    me.meet("seen", 2)
    found = []
    for each in (end, other):
        buffer = me.numbers(0)
        assert each is not None
        each.recv(buffer, peer=0).wait(SURE)
        found += buffer.tolist()
    return found


def silent(me: Member) -> Any:
    """1 stops while 0 waits for it: 0's wait runs out, which ends the group at 0; another group of 0 goes on."""
    end, other = me.connect(), me.connect("other", members=[0, 2]) if me.process != 1 else None
    me.meet("connected")
    if me.process == 1:
        me.fall_silent()
    received = me.numbers(0)
    if me.process == 2:
        assert other is not None
        other.recv(received, peer=0).wait(SURE)
        return received.tolist()
    assert other is not None
    late, more = end.recv(me.numbers(0, 0), peer=1), end.recv(me.numbers(0), peer=2)
    said = told(lambda: late.wait(SOON))
    after = [told(lambda: more.wait(LONG))[0], told(lambda: end.recv(me.numbers(0), peer=2).wait(LONG))[0]]
    other.send(me.numbers(6), peer=2).wait(SURE)
    me.table.set("seen", b"")
    return said, after


def apart(me: Member) -> list[int]:
    """One of two groups is aborted; what arrives over the other."""
    one, two = me.connect("one"), me.connect("two")
    me.meet("connected")
    if me.process == 0:
        one.abort("dropped")
        return [two.send(me.numbers(6), peer=1).wait(SURE)]
    received = me.numbers(0)
    two.recv(received, peer=0).wait(SURE)
    return received.tolist()


def at_once(me: Member, count: int) -> int:
    """Groups of all members, connected at once by a thread each; how many carry bytes."""
    found: list[int] = []

    def one(number: int) -> None:
        end, received = me.connect(f"g{number}"), me.numbers(0)
        recv = end.recv(received, peer=1 - me.process)
        end.send(me.numbers(number), peer=1 - me.process).wait(SURE)
        recv.wait(SURE)
        found.extend(received.tolist())

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SURE)
    return len(set(found))


def cycles(me: Member, count: int) -> list[tuple[int, int]]:
    """Connect, move, close; the open files and threads of this process after each cycle."""
    found = []
    for number in range(count):
        end, received = me.connect(f"c{number}"), me.numbers(0)
        recv = end.recv(received, peer=1 - me.process)
        end.send(me.numbers(1), peer=1 - me.process).wait(SURE)
        recv.wait(SURE)
        me.meet(f"moved {number}")
        end.close()
        me.meet(f"closed {number}")
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        me.meet(f"counted {number}")
    return found


def _scattered(seed: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Storage, and views of it of every kind of run, with bytes between that aren't in them."""
    chance = torch.Generator().manual_seed(seed)
    shapes = ((300, 410), (7, 3, 50, 70), (1 << 16,), (200, 200), (5,))
    storage = [torch.randint(0, 256, s, dtype=torch.uint8, generator=chance).to(device) for s in shapes]
    a, b, c, d, e = storage
    return storage, [a[:, 3:409], b[1:6, :, 2:49:3, 5:69], c[17:-3], d[:199].t(), e[2:3]]


def scattered(me: Member) -> Any:
    """Messages gathered from views and scattered to views, if the group does that; whether nothing else was written."""
    end = me.connect()
    me.meet("connected")
    if not getattr(end, "scatters", False):
        return None
    _, sent = _scattered(1, me.device)
    if me.process == 0:
        works = [end.send(Runs.of(part), peer=1) for part in (sent[:3], sent[3:], sent)]  # type: ignore[arg-type]
        return [work.wait(SURE) for work in works]
    storage, views = _scattered(2, me.device)
    expected, wanted = _scattered(2, me.device)
    for view, new in zip(wanted, sent, strict=True):
        view.copy_(new)
    flat = torch.zeros(sum(view.numel() for view in sent), dtype=torch.uint8, device=me.device)
    works = [end.recv(Runs.of(part), peer=0) for part in (views[:3], views[3:])]  # type: ignore[arg-type]
    counts = [work.wait(SURE) for work in [*works, end.recv(flat, peer=0)]]
    right = all(torch.equal(a, b) for a, b in zip(storage, expected, strict=True))
    return counts, right and torch.equal(flat, torch.cat([view.reshape(-1) for view in sent]))
