"""What `refit doctor` says of the megatron-core that is installed."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_doctor_says_what_it_understands():
    command = [Path(sys.executable).with_name("refit"), "doctor", "--adapter", "megatron", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["plugins"]
    assert row["usable"]
    assert row["about"].startswith("megatron-core 0.19.2 (the version that is tested): singleton shards of layers")
    assert "not there" not in row["about"]
