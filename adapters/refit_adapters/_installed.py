"""What an installed framework has, read off its files, so that nothing of it need be imported to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lacking(folder: Path, asked: Mapping[str, tuple[str, str]]) -> list[str]:
    """What is asked for and isn't there. `asked` says for each what a file below `folder` has to have in its text.

    >>> lacking(Path(__file__).parent, {"this": ("_installed.py", "def lacking"), "that": ("no_file.py", "x")})
    ['that']
    """
    return [what for what, (file, word) in asked.items() if not _has(folder / file, word)]


def _has(file: Path, word: str) -> bool:
    return file.is_file() and word in file.read_text(encoding="utf-8", errors="replace")
