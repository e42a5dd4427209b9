"""The demo as a user runs it: real processes, every bit compared, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import frozen

from refit_sdk.demo.config import SIZES
from refit_sdk.demo.rows import Row, gather_broadcast_bytes
from refit_sdk.demo.run import Options, run_demo

LIMIT = 120


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "refit_sdk.demo", *map(str, args)]


def demo(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=LIMIT, check=False)


def rows_of(*args: object) -> list[dict[str, Any]]:
    done = demo(*args, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    return list(told["pushes"])


def all_elements(size: str, *, targets: int, tied: bool = True) -> int:
    """Elements on all targets together: norms are on each of them, everything else is cut."""
    import attrs

    shapes = attrs.evolve(SIZES[size], tied=tied).parameter_shapes()
    whole = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    cut = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
    return cut + whole * targets


def test_five_pushes_are_bit_equal_and_told_line_by_line() -> None:
    done = demo("--size", "tiny")
    assert done.returncode == 0, done.stderr
    *lines, carried, last = done.stdout.splitlines()
    assert carried in ("the bytes of source[0] went by shm (one copy)", "the bytes of source[0] went by shm")
    assert [line.split(":")[0] for line in lines] == [f"version {n}" for n in range(1, 6)]
    assert all("bits equal" in line for line in lines)
    compared = 5 * all_elements("tiny", targets=2)
    assert last == f"5 of 5 pushes right: {compared} target elements compared, all bit-equal to the cast source"


def test_untied_and_uneven_counts_of_ranks() -> None:
    rows = rows_of("--size", "tiny", "--untied", "--sources", 3, "--targets", 4, "--pushes", 2, "--mixed-precision")
    assert [row["version"] for row in rows] == [1, 2]
    assert {row["elements"] for row in rows} == {all_elements("tiny", targets=4, tied=False)}
    assert all(row["wrong"] == 0 and row["logits_error"] < 0.05 for row in rows)


def test_every_push_brings_news_and_moves_less_than_gather_broadcast() -> None:
    rows = rows_of("--size", "tiny", "--pushes", 3)
    needed = 2 * all_elements("tiny", targets=2)
    usual = gather_broadcast_bytes(2 * SIZES["tiny"].num_parameters, sources=4, targets=2)
    for row in rows:
        assert row["changed"] > row["elements"] / 2
        assert row["bytes_moved"] == needed
        assert row["bytes_gather_broadcast"] == usual > 2 * needed


@pytest.mark.parametrize(("kind", "shard_size"), [("llama-3.1", "5GB"), ("qwen2", "20KB"), ("qwen3", "20KB")])
def test_from_a_checkpoint(kind: str, shard_size: str, save: Callable[..., Any], tmp_path: Path) -> None:
    save(kind, tmp_path, shard_size=shard_size)
    rows = rows_of("--checkpoint", tmp_path, "--pushes", 2, "--sources", 2)
    assert all(row["bit_equal"] and row["elements"] for row in rows)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--checkpoint", "/nowhere"], "no such directory"),
        (["--targets", "3"], "one of 1, 2, 4"),
        (["--pushes", "0"], "'pushes': 0"),
    ],
)
def test_a_refusal_is_one_message_and_code_2(args: list[str], told: str) -> None:
    done = demo(*args)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Row]]:
    """Runs the demo with a target that is wrong in a named way."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    entries: ModuleType = pytest.importorskip("child_entries")

    def run(name: str) -> list[Row]:
        monkeypatch.setattr("refit_sdk.demo.run._target", getattr(entries, name))
        return list(run_demo(Options(size="tiny", sources=2, targets=2, pushes=1)))

    return run


def test_a_receive_that_does_nothing_is_caught(mutants: Callable[[str], list[Row]]) -> None:
    (row,) = mutants("deaf")
    assert (row.wrong, row.ok) == (row.elements, False)


def test_one_wrong_bit_is_caught_and_named(mutants: Callable[[str], list[Row]]) -> None:
    (row,) = mutants("flipped")
    assert (row.wrong, row.ok) == (1, False)
    assert row.first_wrong == "rollout-0[1] model.layers.1.mlp.down_proj.weight"


def test_two_swapped_tensors_are_caught(mutants: Callable[[str], list[Row]]) -> None:
    (row,) = mutants("swapped")
    assert row.wrong > SIZES["tiny"].hidden_size * SIZES["tiny"].intermediate_size
    assert row.logits_error > 0.05


@frozen
class Held:
    """What the processes of a session hold: themselves, their shared-memory segments and the ports they listen on."""

    pids: frozenset[int]
    segments: frozenset[str]
    ports: frozenset[int]


def held_by(session: int) -> Held:
    pids = frozenset(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if session_of(pid) == session)
    mapped = [line.split()[-1] for pid in pids for line in text(f"/proc/{pid}/maps").splitlines()]
    sockets = {link for pid in pids for link in links(f"/proc/{pid}/fd")}
    listening = [line.split() for line in text("/proc/net/tcp").splitlines()[1:]]
    ports = {int(at[1].split(":")[1], 16) for at in listening if at[3] == "0A" and f"socket:[{at[9]}]" in sockets}
    return Held(pids, frozenset(path for path in mapped if path.startswith("/dev/shm/")), frozenset(ports))


def session_of(pid: int) -> int | None:
    stat = text(f"/proc/{pid}/stat")
    state, _, _, session = stat.rpartition(")")[2].split()[:4] if stat else ("Z", "", "", "0")
    return None if state == "Z" else int(session)


def text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def links(directory: str) -> list[str]:
    found = []
    for name in names(directory):
        with suppress(OSError):
            found.append(os.readlink(f"{directory}/{name}"))
    return found


def names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def start(tmp_path: Path, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """The demo in a session of its own, its files under `tmp_path`; its output ends when the last process has."""
    return subprocess.Popen(
        command("--size", "tiny", "--pushes", 20_000),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def wait_for_end(pid: int) -> None:
    """A process closes its files a moment before it is gone."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([watched], [], [], 5)
    os.close(watched)


def left_behind(held: Held, session: int) -> Held:
    for pid in held.pids:
        wait_for_end(pid)
    after = held_by(session)
    segments = frozenset(path for path in held.segments if Path(path).exists())
    listening = {line.split()[1].split(":")[1] for line in text("/proc/net/tcp").splitlines()[1:] if " 0A " in line}
    return Held(after.pids, segments, frozenset(port for port in held.ports if f"{port:04X}" in listening))


NOTHING = Held(frozenset(), frozenset(), frozenset())
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks into Linux' /proc")


@needs_proc
@pytest.mark.parametrize(
    ("number", "everybody", "code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="ctrl-c"),
        pytest.param(signal.SIGINT, False, 130, id="sigint-to-the-parent"),
        pytest.param(signal.SIGTERM, False, 143, id="sigterm-to-the-parent"),
        pytest.param(signal.SIGKILL, False, -9, id="sigkill-to-the-parent"),
    ],
)
def test_a_signal_leaves_nothing_behind(number: int, everybody: bool, code: int, tmp_path: Path) -> None:
    running = start(tmp_path)
    assert running.stdout
    assert "bits equal" in running.stdout.readline()
    held = held_by(running.pid)
    assert len(held.pids) >= 7
    assert held.ports
    (os.killpg if everybody else os.kill)(running.pid, number)
    _, errors = running.communicate(timeout=LIMIT)
    assert running.returncode == code
    assert left_behind(held, running.pid) == NOTHING
    if number != signal.SIGKILL:
        assert os.listdir(tmp_path) == []
        assert errors == ""


@needs_proc
def test_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    running = start(tmp_path, stdout=terminal)
    os.close(terminal)
    shown = b""
    while b" equal " not in shown:
        shown += os.read(ours, 4096)
    os.killpg(running.pid, signal.SIGINT)
    with suppress(OSError):  # Linux ends a terminal that nobody holds any more with EIO.
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    assert (running.wait(timeout=LIMIT), running.communicate()[1]) == (130, "")
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    assert shown.count(hide) == shown.count(show) == 1
    assert b"broadcast" in shown


@needs_proc
def test_ctrl_c_while_joining_leaves_nothing_behind(tmp_path: Path) -> None:
    running = start(tmp_path)
    until = time.monotonic() + LIMIT
    while len(held_by(running.pid).pids) < 7 and time.monotonic() < until:
        pass
    held = held_by(running.pid)
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=LIMIT)
    assert running.returncode == 130
    assert left_behind(held, running.pid) == NOTHING
    assert os.listdir(tmp_path) == []


@needs_proc
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    running = start(tmp_path)
    assert running.stdout
    running.stdout.readline()
    held = held_by(running.pid)
    victim = max(held.pids)
    os.kill(victim, signal.SIGKILL)
    _, errors = running.communicate(timeout=LIMIT)
    assert running.returncode == 1
    assert re.search(r"(source|rollout-0)\[\d\]: ended with exit code -9 while \w+", errors)
    assert left_behind(held, running.pid) == NOTHING
    assert os.listdir(tmp_path) == []


def test_at_the_timeout_the_run_ends_and_says_where_everybody_was() -> None:
    done = demo("--size", "tiny", "--pushes", 20_000, "--timeout", 6)
    assert done.returncode == 1
    assert "the run took more than 6 seconds" in done.stderr
    assert "still " in done.stderr
    assert len(set(re.findall(r"(?:source|rollout-0)\[\d\]", done.stderr))) == 6
