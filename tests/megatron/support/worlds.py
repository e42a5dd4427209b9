"""Gloo processes that hold a Megatron model together: started from a server that has imported everything once."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import queue
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDERS = [HERE, *(HERE.parents[1] / folder for folder in ("refit", "benchmarks")), HERE.parents[2]]
SECONDS = 120.0
"""How long a test waits for a rank."""


def context() -> Any:
    """Processes that have torch, Megatron and our modules loaded. The server finds ours by PYTHONPATH."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*map(str, FOLDERS), *filter(None, known)]))
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["build", "preloaded", "refit_sdk.session", "refit_sdk.controller"])
    return made


def rendezvous() -> str:
    """An address below the ports that the system hands out: the groups that form meanwhile listen on those."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"


def _rank(number: int, world: int, store: str, body: Callable[..., Any], args: Sequence[Any], results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(SECONDS - 20)
    try:
        if world:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=number, world_size=world, timeout=timedelta(seconds=SECONDS)
            )
        results.put((number, True, body(number, *args)))
    except BaseException as error:  # noqa: BLE001 - a rank's failure is the test's to judge
        results.put((number, False, (type(error).__name__, str(error), traceback.format_exc())))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)


class Failure(AssertionError):
    """A rank raised."""


def outcomes(bodies: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, world: int) -> list[Any]:
    """Run a body in each process, `body(rank, *args)`: what each returned, or (class, text, trace) of what it raised.

    The first `world` of them are a process group of torch's.
    """
    made = context()
    results = made.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        processes = [
            made.Process(target=_rank, args=(n, world if n < world else 0, store, body, args, results), daemon=True)
            for n, (body, args) in enumerate(bodies)
        ]
        for process in processes:
            process.start()
        try:
            heard = _heard(processes, results)
        finally:
            for process in processes:
                process.join(2.0)
                process.kill()
    return [(fine, value) for _, fine, value in sorted(heard, key=lambda each: each[0])]


def _heard(processes: Sequence[Any], results: Any) -> list[Any]:
    """A word of each process. One that ended without a word, or a silence, is a failure that says whose."""
    heard: dict[int, Any] = {}
    quiet = time.monotonic()
    while len(heard) < len(processes):
        try:
            word = results.get(timeout=1.0)
        except queue.Empty:
            silent = [n for n in range(len(processes)) if n not in heard]
            ended = {n: processes[n].exitcode for n in silent if processes[n].exitcode is not None}
            if (ended and time.monotonic() - quiet > 3.0) or time.monotonic() - quiet > SECONDS:
                raise Failure(f"ranks {silent} said nothing; ended, with which code: {ended}") from None
            continue
        heard[word[0]], quiet = word, time.monotonic()
    return list(heard.values())


def results(bodies: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, world: int) -> list[Any]:
    """What each process returned. The first failure is raised, with the trace of its rank."""
    found = outcomes(bodies, world=world)
    traces = [f"rank {number}: {value[2]}" for number, (fine, value) in enumerate(found) if not fine]
    if traces:
        raise Failure("\n".join(traces))
    return [value for _, value in found]


def everywhere(body: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """The same body on all ranks of a world."""
    return results([(body, args)] * world, world=world)
