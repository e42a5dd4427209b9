"""Runs every case on this machine's GPU, prints what held, what didn't and what was not run, and bytes per second.

tests/gpu/run.sh [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

LARGE = 1 << 30
"""Bytes of the messages whose speed is measured."""

BEYOND = (1 << 31) + 5
"""Bytes of a message whose size doesn't fit in 31 bits."""


class NotRun(Exception):
    """What a check takes isn't here. The text says what."""


def needed() -> Any:
    """torch, with a device, and our own modules."""
    try:
        import torch
        from refit_backends.nccl import NcclFabric

        assert NcclFabric.name == "nccl"
    except ImportError as error:
        raise NotRun(f"{error}; pip install attrs msgspec pluggy numpy, and a CUDA build of torch") from error
    from refit_backends.cudart import why_no_device

    if why := why_no_device():
        raise NotRun(why)
    return torch


def nccl_place() -> Any:
    """Fabric `nccl` on this device."""
    needed()
    from gpu_ranks import place_of
    from refit_backends.nccl import NcclFabric

    if why := NcclFabric.missing():
        raise NotRun(why)
    return place_of("nccl")


def rate(torch: Any, nbytes: int, do: Callable[[], None]) -> float:
    """GB/s of something, the best of five after one that isn't counted."""
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        do()
        torch.cuda.synchronize()
        found.append(nbytes / (time.perf_counter() - begun) / 1e9)
    return max(found[1:])


def device_copy() -> str:
    """The floor: a copy on the device, by torch."""
    torch = needed()
    one, other = (torch.empty(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2))
    return f"{rate(torch, LARGE, lambda: other.copy_(one)):.1f} GB/s"


def nccl_speed() -> str:
    """A self-send of a gibibyte."""
    place = nccl_place()
    from gpu_cases import alone

    torch, group = needed(), alone(place)
    one, other = place.empty(LARGE), place.empty(LARGE)

    def together() -> None:
        works = [group.recv(other, peer=4), group.send(one, peer=4)]
        for work in works:
            work.wait(30)

    found = rate(torch, LARGE, together)
    group.close()
    return f"{found:.1f} GB/s"


def nccl_beyond() -> str:
    """A self-send of more than 2^31 bytes arrives whole."""
    place = nccl_place()
    from gpu_cases import alone

    torch, group = needed(), alone(place)
    sent = torch.arange(BEYOND // 8 + 1, dtype=torch.int64, device="cuda").view(torch.uint8)[:BEYOND]
    into = place.empty(BEYOND)
    works = [group.recv(into, peer=4), group.send(sent, peer=4)]
    assert [work.wait(60) for work in works] == [BEYOND] * 2
    assert torch.equal(into, sent)
    group.close()
    return f"{BEYOND} bytes"


def nccl_follows_the_callers_stream() -> str:
    """What is sent is what the caller's stream, still busy at the posting, will have made of it."""
    place = nccl_place()
    from gpu_cases import alone

    torch, group = needed(), alone(place)
    sent, into = place.empty(1 << 20), place.empty(1 << 20)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # cycles
        sent.fill_(7)
        works = [group.recv(into, peer=4), group.send(sent, peer=4)]
        for work in works:
            work.wait(30)
        assert bool((into == 7).all())
    group.close()
    return ""


def nccl_without_synchronisation() -> str:
    """torch raises at anything of its own that makes the host wait for the device."""
    place = nccl_place()
    from gpu_cases import alone

    torch, group = needed(), alone(place)
    sent, into = place.random(1 << 20), place.empty(1 << 20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            works = [group.recv(into, peer=4), group.send(sent, peer=4)]
            for work in works:
                work.wait(30)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sent, into)
    group.close()
    return ""


def processes(case: str, where: str, count: int, turns: int, **environment: str) -> list[Any]:
    """What the processes of a case say first."""
    import gpu_ranks
    from moving_support import heard, started

    with started(getattr(gpu_ranks, case), count) as (_, pipes):
        for pipe in pipes:
            pipe.send((where, count, turns, environment))
        said = [heard(pipe) for pipe in pipes]
        if case == "exchanges":
            for pipe in pipes:
                pipe.send("close")
            assert [heard(pipe) for pipe in pipes] == ["closed"] * count
        return said


def cuda_ipc_exchange() -> str:
    """Four processes, all with all; every byte is looked at."""
    needed()
    said = processes("exchanges", "cuda_ipc", 4, 3)
    assert all(word == "done" for word, *_ in said), said
    return f"{sum(rate for _, rate, _ in said) / 1e9:.1f} GB/s of four"


def cuda_ipc_loss() -> str:
    """Of three processes one is killed: both others hear of it, and end."""
    needed()
    import gpu_ranks
    from moving_support import heard, started

    with started(gpu_ranks.exchanges_until_one_dies, 3) as (running, pipes):
        for pipe in pipes:
            pipe.send(("cuda_ipc", 3, 0, {}))
        assert [heard(pipe) for pipe in pipes] == ["connected"] * 3
        running[1].kill()
        told = [heard(pipes[index]) for index in (0, 2)]
        assert all(word == "lost" and peer is not None for word, peer, _ in told), told
        assert [heard(pipes[index]) for index in (0, 2)] == ["closed"] * 2
    return ""


def cuda_ipc_cycles() -> str:
    """Twelve groups, one after the other, of two processes, hold no more than two."""
    needed()
    for left in processes("cycles", "cuda_ipc", 2, 12):
        assert left[-1] <= left[1], left
    return ""


def nccl_two_processes() -> str:
    """Two processes on one device, which NCCL takes from 2.30 on."""
    nccl_place()
    torch = needed()
    from refit_backends.nccl_library import Nccl, written

    version = Nccl.found().version
    if torch.cuda.device_count() < 2 and version < 23000:
        raise NotRun(f"two ranks on one device take NCCL 2.30, this is {written(version)}; or a second device")
    more = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "8"}
    said = processes("exchanges", "nccl", 2, 3, **more)
    assert all(word == "done" for word, *_ in said), said
    return f"{sum(rate for _, rate, _ in said) / 1e9:.1f} GB/s of two"


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """All checks, by name."""
    yield "a copy on the device", device_copy
    yield "nccl: a self-send of 1 GiB", nccl_speed
    yield "nccl: a message beyond 2^31 bytes", nccl_beyond
    yield "nccl: behind the caller's stream", nccl_follows_the_callers_stream
    yield "nccl: the host waits for no device", nccl_without_synchronisation
    try:
        from gpu_cases import ALONE
    except ImportError as error:
        missing = str(error)

        def absent() -> str:
            raise NotRun(missing)

        yield "nccl: the cases of one member", absent
    else:
        for case in ALONE:
            yield f"nccl: {case.__name__.replace('_', ' ')}", lambda case=case: case(nccl_place()) or ""
    yield "cuda_ipc: four processes, all with all", cuda_ipc_exchange
    yield "cuda_ipc: who is killed is missed", cuda_ipc_loss
    yield "cuda_ipc: twelve groups hold no more than two", cuda_ipc_cycles
    yield "nccl: two processes", nccl_two_processes


def about() -> str:
    """What machine this is."""
    with contextlib.suppress(Exception):
        torch = needed()
        from refit_backends.nccl_library import Nccl, written

        name = torch.cuda.get_device_name()
        versions = f"torch {torch.__version__}, NCCL {written(Nccl.found().version)}"
        return f"{name}, {versions}, Python {platform.python_version()}"
    return f"Python {platform.python_version()}"


def one(check: Callable[[], str]) -> tuple[str, str]:
    """How a check ended, and what there is to say of it."""
    try:
        return "held", check()
    except NotRun as error:
        return "not run", str(error)
    except Exception:  # noqa: BLE001  shown whole
        return "FAILED", traceback.format_exc()


def main() -> int:
    """Run all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    told = parser.parse_args()
    print(f"{about()}, {time.strftime('%Y-%m-%d %H:%M')}\n", flush=True)
    results = []
    for name, check in cases():
        begun = time.perf_counter()
        how, words = one(check)
        seconds = round(time.perf_counter() - begun, 1)
        results.append({"check": name, "outcome": how, "words": words, "seconds": seconds})
        print(f"{how:8} {name:64} {seconds:6.1f} s  {words}", flush=True)
    outcomes = [result["outcome"] for result in results]
    counts = ", ".join(f"{outcomes.count(how)} {how}" for how in ("held", "FAILED", "not run"))
    print(f"\n{counts}")
    if told.json:
        with open(told.json, "w", encoding="utf-8") as file:
            json.dump({"about": about(), "results": results}, file, indent=1)
    if "FAILED" in outcomes:
        return 1
    return 0 if "held" in outcomes else 3


if __name__ == "__main__":
    sys.exit(main())
