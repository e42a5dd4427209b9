"""Gloo between real processes: torch's own groups stay as they are, nothing leaks, a lost process is told at once."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import moving_cases
from moving_support import heard, started


def test_groups_across_jobs_leave_torchs_registry_as_it_is() -> None:
    with started(moving_cases.registry_is_untouched, 4) as (_, pipes):
        results = [heard(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send("go")
    assert results == [
        (True, [3] * 3, 3.0, "trainer"),
        (True, [4] * 3, 3.0, "trainer"),
        (True, [1] * 3, 3.0, "engine"),
        (True, [2] * 3, 4.0, "none"),
    ]


def test_twenty_cycles_hold_no_more_than_two() -> None:
    with started(moving_cases.twenty_cycles, 3) as (_, pipes):
        for _ in range(20):
            assert [heard(pipe) for pipe in pipes] == ["closed"] * 3
            for pipe in pipes:
                pipe.send("go")
        for pipe in pipes:
            found = heard(pipe)

            assert found[1] == found[19], found


def until_stopped(process: BaseProcess) -> None:
    while "T (stopped)" not in Path(f"/proc/{process.pid}/status").read_text():
        pass


def connected(pipes: list[Connection], how: str) -> None:
    for pipe in pipes:
        pipe.send(how)
    for pipe in pipes:
        assert heard(pipe) == "connected"


def test_a_killed_process_fails_its_engine_at_once_and_no_other() -> None:
    with started(moving_cases.two_engines, 4) as (processes, pipes):
        connected(pipes, "kill")
        pipes[2].send("go")
        processes[2].join(20)
        assert processes[2].exitcode == -signal.SIGKILL
        for index in (0, 1, 3):
            pipes[index].send("go")
        begun = time.monotonic()
        source, sibling, other = (heard(pipes[index]) for index in (0, 1, 3))
        assert time.monotonic() - begun < 40, "nobody may wait for the deadline"
    failed, lost, _, _, _ = source
    assert (failed.keys(), lost) == ({"a"}, {"a": 2})
    assert "process 2" in failed["a"]
    assert sibling[1] == {"a": 0}
    assert other == ({}, {}, {"b": moving_cases.WINDOWS << 18}, {"b"}, True)


def test_a_stopped_process_is_dropped_when_told_or_at_the_deadline() -> None:
    """The source is told by `drop`; the sibling isn't, and its own deadline ends it if the source's leaving doesn't."""
    with started(moving_cases.two_engines, 4) as (processes, pipes):
        connected(pipes, "stop")
        pipes[2].send("go")
        until_stopped(processes[2])
        for index in (0, 1, 3):
            pipes[index].send("go")
        pipes[0].send("rollout a stopped answering")
        source, sibling, other = (heard(pipes[index]) for index in (0, 1, 3))
    assert source[0] == {"a": "rollout a stopped answering"}
    assert sibling[1] == {"a": 0}
    assert other == ({}, {}, {"b": moving_cases.WINDOWS << 18}, {"b"}, True)


def test_a_process_that_dies_while_joining_ends_the_others_in_time() -> None:
    with started(moving_cases.dies_while_joining, 3) as (_, pipes):
        for pipe in pipes[:2]:
            kind, text = heard(pipe)
            assert kind == "FabricError"
            assert "2 at 127.0.0.1" in text
