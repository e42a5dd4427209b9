"""What `refit doctor` says of the vLLM that is installed."""

import json
import subprocess
import sys
from pathlib import Path

from refit_adapters import _vllm_version


def test_the_doctor_says_what_it_understands():
    command = [Path(sys.executable).with_name("refit"), "doctor", "--adapter", "vllm", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["plugins"]
    assert row["usable"]
    assert row["about"].startswith("vLLM 0.32.0 (the version that is tested): engines for weight transfer")
    assert "not there" not in row["about"]


def test_another_version_is_told_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(_vllm_version, "root", lambda: tmp_path)
    said = _vllm_version.missing()
    assert said is not None
    assert said.startswith("vLLM 0.32.0 has no engines for weight transfer, ")
    assert said.endswith("0.28 to 0.32 are supported, 0.32.0 is tested")
