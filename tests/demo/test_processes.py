"""A crew: what children say, how they fail, and that none is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from refit_sdk.demo.processes import Crew, CrewError


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Functions that children can import: they get the parent's `sys.path`."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return pytest.importorskip("child_entries")


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


def test_every_value_arrives_in_its_senders_order(crew: Crew, entries: ModuleType) -> None:
    crew.start("a", entries.count, 3)
    crew.start("b", entries.count, 2)
    heard = list(crew.messages(timeout=30))
    assert [value for name, value in heard if name == "a"] == [(0,), (1,), (2,)]
    assert [value for name, value in heard if name == "b"] == [(0,), (1,)]


def test_an_error_is_told_with_the_rank_and_what_it_was_doing(crew: Crew, entries: ModuleType) -> None:
    crew.start("source[1]", entries.refuse)
    with pytest.raises(CrewError) as caught:
        list(crew.messages(timeout=30))
    told = "while reading the layout: LayoutError: rows 0:4 of a.weight, found 0:3"
    assert caught.value.failures == {"source[1]": told}
    assert f"source[1]: {told}" in str(caught.value)


def test_a_bug_is_told_with_its_traceback(crew: Crew, entries: ModuleType) -> None:
    crew.start("source[0]", entries.crash)
    with pytest.raises(CrewError, match=r"(?s)source\[0\].*Traceback.*ZeroDivisionError: a bug"):
        list(crew.messages(timeout=30))


def test_a_killed_rank_is_named_first(crew: Crew, entries: ModuleType) -> None:
    crew.start("source[0]", entries.refuse)
    crew.start("source[1]", entries.die)
    with pytest.raises(CrewError) as caught:
        list(crew.messages(timeout=30))
    assert next(iter(caught.value.failures)) == "source[1]"
    assert caught.value.failures["source[1]"] == "ended with exit code -9 while pushing version 3"


def test_a_failure_ends_those_that_wait(crew: Crew, entries: ModuleType) -> None:
    crew.start("target", entries.wait_for_ever)
    messages = crew.messages(timeout=30)
    _, (pid,) = next(messages)
    crew.start("source", entries.crash)
    with pytest.raises(CrewError, match="a bug"):
        list(messages)
    crew.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_at_the_timeout_everybody_says_where_they_are(crew: Crew, entries: ModuleType) -> None:
    crew.start("rollout-0[0]", entries.wait_for_ever)
    with pytest.raises(CrewError, match=r"more than 1 seconds\n.*rollout-0\[0\]: still receiving version 7"):
        list(crew.messages(timeout=1))


PARENT = """
import child_entries
from refit_sdk.demo.processes import Crew

with Crew() as crew:
    crew.start("rollout-0[0]", child_entries.wait_for_ever)
    for _, (pid,) in crew.messages(timeout=60):
        print(pid, flush=True)
"""


def test_a_child_that_waits_for_ever_ends_with_its_parent() -> None:
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout
        assert int(parent.stdout.readline())
        parent.kill()
        # The output ends when the last process that holds it has: the parent, its fork server and the child.
        assert parent.communicate(timeout=30) == (b"", None)
