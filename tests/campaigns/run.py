"""Run every campaign in this folder, one after the other: whole, or with `--slice NAME` a seeded slice of each.

A campaign is a script here. Each is given the same arguments, and leaves with 0 if all that it tried was right.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run them all, whatever the first ones say; 1 if any failed."""
    here = Path(__file__)
    scripts = sorted(
        script for script in here.parent.glob("*.py") if script != here and not script.stem.startswith("_")
    )
    failed = [script.name for script in scripts if subprocess.run([sys.executable, script, *arguments]).returncode]
    for name in failed:
        print(f"campaigns: {name} failed")
    print(f"campaigns: {len(scripts) - len(failed)} of {len(scripts)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
