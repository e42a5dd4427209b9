"""`refit bench link`, as a process: what it measures, the file that it writes, and that Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs

from refit_sdk.cluster import Speeds, given

REFIT = str(Path(sys.executable).with_name("refit"))
PATIENCE = 60.0


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [REFIT, "bench", "link", *arguments]
    # Where these tests run in the background, their children would ignore Ctrl-C.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def children(pid: int) -> list[int]:
    """Living processes whose parent this is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_it_measures_this_machine_and_a_peer_and_writes_the_file(tmp_path: Path) -> None:
    where, file = f"tcp://127.0.0.1:{free_port()}", tmp_path / "topology.json"
    with started("--serve", where) as peer, started("--peer", where, "--out", str(file), "--json") as asked:
        stages = (f"the network to {where}", "copies", "shared memory")
        out, told = asked.communicate(timeout=PATIENCE)
        assert asked.returncode == 0, told
        assert told.splitlines() == [f"measuring {what} …" for what in stages]
        found = json.loads(out)
        assert sorted(found["measured"]) == sorted(each.name for each in attrs.fields(Speeds))
        cluster = given(file)
        assert cluster is not None
        assert attrs.asdict(cluster.speeds) == found["speeds"]
        assert min(found["speeds"].values()) > 0
        peer.send_signal(signal.SIGINT)
        peer.communicate(timeout=PATIENCE)
        assert peer.returncode == 130


def test_ctrl_c_ends_it_and_what_it_started(tmp_path: Path) -> None:
    with started("--out", str(tmp_path / "topology.json")) as asked:
        assert asked.stderr is not None
        while "shared memory" not in asked.stderr.readline():
            pass
        end = time.monotonic() + PATIENCE
        while not (below := children(asked.pid)) and time.monotonic() < end:
            pass
        asked.send_signal(signal.SIGINT)
        asked.wait(timeout=PATIENCE)
        assert asked.returncode == 130
        assert [pid for pid in below if os.path.exists(f"/proc/{pid}/exe")] == []
        assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_not_there_is_said_so() -> None:
    with started("--peer", f"tcp://127.0.0.1:{free_port()}") as asked:
        _, told = asked.communicate(timeout=PATIENCE)
        assert asked.returncode == 2
        assert "can't be reached" in told
        assert "run `refit bench link --serve` there" in told
