"""What has to hold of the fabrics of CUDA memory, each case as one function: `case(place)`.

On a machine with a GPU `checks.py` runs them on it. Elsewhere the tests run them on the stand-in (`gpu_standin.c`),
where device memory is the host's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import frozen
from moving_support import Table

from refit_sdk.fabric import FabricError, Group

LONG = 3600.0
"""Seconds that nothing waits."""


@frozen
class Place:
    """Where cases run: the device of buffers, how to make a fabric, how to keep the device from what comes next for a
    second at least, and how many bytes make a large message there."""

    device: torch.device
    make: Callable[[], Any]
    busy: Callable[[], AbstractContextManager[None]] = nullcontext
    large: int = 400_003

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes that a case overwrites."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def random(self, nbytes: int, seed: int = 1) -> torch.Tensor:
        """Bytes that depend on where they are."""
        chance = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=chance).to(self.device)


def alone(place: Place, name: str = "g", fabric: Any = None) -> Group:
    """A group of one member."""
    made: Group = (fabric or place.make()).connect(group=name, members=[4], process=4, store=Table(), timeout=60)
    return made


def raised(wait: Callable[[], object]) -> FabricError:
    """The error that a wait ends with."""
    try:
        found = wait()
    except FabricError as error:
        return error
    raise AssertionError(f"it ended well, with {found}")


def messages_of_a_window_begin_together(place: Place) -> None:
    """More messages of a pair than one can be done without the other, all posted before any is waited for."""
    group = alone(place)
    sizes = [1, 70_001, 5_000_003, 17, *[4096] * 200]
    sent = [place.random(size, seed) for seed, size in enumerate(sizes)]
    into = [place.empty(size) for size in sizes]
    works = [group.recv(buffer, peer=4) for buffer in into]
    works += [group.send(buffer, peer=4) for buffer in sent]
    assert [work.wait(30) for work in works] == sizes * 2
    assert all(torch.equal(one, other) for one, other in zip(into, sent, strict=True))
    group.close()


def bytes_of_every_dtype_travel_as_they_are(place: Place) -> None:
    """NaNs with a payload, numbers below the normal ones, and dtypes that the library has no word for."""
    group = alone(place)
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.bool,
        torch.complex64,
    ]
    raw = place.random(64_000) & 1
    for dtype in dtypes:
        sent, into = raw.view(dtype), torch.empty(64_000, dtype=torch.uint8, device=place.device).view(dtype)
        works = [group.recv(into.view(torch.uint8), peer=4), group.send(sent.view(torch.uint8), peer=4)]
        assert [work.wait(30) for work in works] == [64_000] * 2
        assert torch.equal(into.view(torch.uint8), raw), dtype
    group.close()


def windows_reuse_their_buffers(place: Place) -> None:
    """A buffer is the next window's as soon as its work has ended."""
    group = alone(place)
    into, out = place.empty(100_000), place.empty(100_000)
    for number in range(20):
        out.fill_(number)
        works = [group.recv(into, peer=4), group.send(out, peer=4)]
        assert [work.wait(30) for work in works] == [100_000] * 2
        out.fill_(255)
        assert bool((into == number).all()), number
    group.close()


def groups_take_turns(place: Place) -> None:
    """Two groups of one device, posted and waited for in crossing orders."""
    fabric = place.make()
    one, two = alone(place, "one", fabric), alone(place, "two", fabric)
    for turn in range(20):
        order = [one, two] if turn % 2 else [two, one]
        sent, into = place.random(10_000, turn), [place.empty(10_000) for _ in order]
        works = [group.recv(buffer, peer=4) for group, buffer in zip(order, into, strict=True)]
        works += [group.send(sent, peer=4) for group in reversed(order)]
        assert [work.wait(30) for work in works] == [10_000] * 4
        assert all(torch.equal(buffer, sent) for buffer in into)
    one.abort("dropped")
    sent, into = place.random(10), place.empty(10)
    works = [two.recv(into, peer=4), two.send(sent, peer=4)]
    assert [work.wait(30) for work in works] == [10, 10]
    one.close()
    two.close()


def a_wait_that_runs_out_ends_the_group(place: Place) -> None:
    """The device doesn't come to it in time: an error that names the peer, and nothing after it."""
    group = alone(place)
    into, sent = place.empty(2), place.empty(2)
    with place.busy():
        works = [group.recv(into, peer=4), group.send(sent, peer=4)]
        error = raised(lambda: works[0].wait(0.2))
    assert "0.2 s for process 4 to send 2 bytes" in str(error), error
    assert error.peer == 4
    assert "0.2 s for process 4" in str(raised(lambda: works[1].wait(LONG)))
    assert "process 4" in str(raised(lambda: group.send(place.empty(1), peer=4)))
    group.close()


def an_abort_ends_what_is_pending(place: Place) -> None:
    """From another thread, while one waits for ever; both say why, at once, and so does what comes later."""
    group = alone(place)
    into, sent = place.empty(2), place.empty(2)
    waits = threading.Event()
    with place.busy(), ThreadPoolExecutor(1) as pool:
        works = [group.recv(into, peer=4), group.send(sent, peer=4)]

        def wait() -> FabricError:
            waits.set()
            return raised(lambda: works[0].wait(LONG))

        waiting = pool.submit(wait)
        assert waits.wait(10)
        time.sleep(0.1)
        begun = time.monotonic()
        group.abort("engine e is dropped")
        assert time.monotonic() - begun < 0.5
        assert str(waiting.result(30)) == "engine e is dropped"
    assert str(raised(lambda: group.recv(place.empty(1), peer=4))) == "engine e is dropped"
    group.close()
    group.close()


def what_was_never_begun_was_not_written(place: Place) -> None:
    """A receive that was only noted when its group was aborted knows that its buffer is as it was."""
    group = alone(place)
    noted = group.recv(place.empty(8), peer=4)
    group.abort("stop")
    assert str(raised(lambda: noted.wait(5))) == "stop"
    assert noted.touched is False  # type: ignore[attr-defined]
    group.close()


def twenty_groups_leave_nothing(place: Place) -> None:
    """Threads and descriptors after twenty groups are those after two."""
    counts = []
    for number in range(20):
        group = alone(place, f"g{number}")
        works = [group.recv(place.empty(8), peer=4), group.send(place.empty(8), peer=4)]
        assert [work.wait(30) for work in works] == [8, 8]
        group.close()
        if number in (1, 19):
            counts.append(held())
    assert counts[1] <= counts[0], counts


def held() -> tuple[int, int]:
    """Descriptors and threads of this process, the least in 0.1 s: a thread that was joined is still leaving."""
    end, found = time.monotonic() + 0.1, []
    while time.monotonic() < end:
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return min(found)


ALONE = (
    messages_of_a_window_begin_together,
    bytes_of_every_dtype_travel_as_they_are,
    windows_reuse_their_buffers,
    groups_take_turns,
    a_wait_that_runs_out_ends_the_group,
    an_abort_ends_what_is_pending,
    what_was_never_begun_was_not_written,
    twenty_groups_leave_nothing,
)
"""Cases of NCCL's group of one member."""
