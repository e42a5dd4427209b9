"""Many ranks join through a real rendezvous: 64 ranks in four processes, as the benchmark has 2,048 in sixteen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_join.py"


def test_the_world_is_read_once_a_host(tmp_path: Path) -> None:
    told = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARK),
        "--case",
        "small",
        "--processes",
        "4",
        "--json",
        str(told),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    (row,) = json.loads(told.read_text())["rows"]
    assert (row["ranks"], row["hosts"], row["state"]) == (64, 8, "idle")
    assert row["reads"] == row["hosts"]
    assert row["served"] == row["world"] * row["hosts"]
    assert row["world"] < 128 << 10
    assert row["largest"] < 64 << 10
