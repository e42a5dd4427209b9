"""The page of faults names tests that exist, and plug-ins that do."""

import os
import re
import subprocess
import sys
from pathlib import Path

from refit_sdk.plugins import registry

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reference" / "faults.md").read_text()
ROWS = [re.split(r" \| ", line.strip("| ")) for line in TEXT.splitlines() if "::" in line]
KINDS = ("source_adapter", "target_adapter", "transport", "fabric")


def missing(names: set[str], root: Path) -> list[str]:
    """Those that pytest doesn't find."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(names)]
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environ)
    unknown = re.findall(r"^ERROR: not found: (.*)$", result.stderr, re.MULTILINE)
    assert bool(result.returncode) == bool(unknown), result.stdout + result.stderr
    return unknown


def test_every_row_has_a_test_that_exists() -> None:
    assert ROWS
    assert [row for row in ROWS if len(row) != 4] == []
    assert missing({name for row in ROWS for name in re.findall(r"`(tests/[^`]+)`", row[2])}, ROOT) == []


def test_a_test_that_is_not_there_is_missed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_b(): pass\n")
    assert missing({"test_a.py::test_b"}, tmp_path) == []
    assert "test_a.py::test_c" in "".join(missing({"test_a.py::test_b", "test_a.py::test_c"}, tmp_path))


def test_every_plugin_that_a_row_names_is_there() -> None:
    known = {name for kind in KINDS for name in registry().names(kind)}
    assert {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[3])} <= known
