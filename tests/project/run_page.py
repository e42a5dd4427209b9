"""Run the blocks of one Markdown page, in order, in a folder of their own: `run_page.py PAGE`. What is run is by fence:

- ```python title="train.py"   is written to that file;
- ```python with `>>>` in it   is a doctest;
- ```python                    is executed; it and the doctests of a page share their names;
- ```console                   has its `$ ` lines run by bash, each of which must leave with 0.

Other fences (`bash` for what needs an index or a fresh machine, `toml`, `text`) are not run.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

FENCE = re.compile(r"^```(?P<language>\w+)(?P<rest>[^\n]*)\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
RUN = ("python", "console")


@frozen
class Block:
    """A fenced block: its language, its title if it has one, its text and the line where it begins."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page that are run.

    >>> [block.language for block in blocks("```python\\nx = 1\\n```\\n\\n```toml\\n[a]\\n```\\n")]
    ['python']
    """
    for match in FENCE.finditer(page):
        title = TITLE.search(match["rest"])
        line = page.count("\n", 0, match.start("text")) + 1
        if match["language"] in RUN:
            yield Block(match["language"], title[1] if title else "", match["text"], line)


def run(block: Block, names: dict[str, Any], page: str) -> None:
    """Run one block; raises or leaves with 1 if it isn't right."""
    if block.language == "console":
        commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(commands)], check=True)
    elif block.title:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text)
    elif ">>>" in block.text:
        _run_doctest(block, names, page)
    else:
        exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)


def _run_doctest(block: Block, names: dict[str, Any], page: str) -> None:
    parsed = doctest.DocTestParser().get_doctest(block.text, {}, page, page, block.line - 1)
    parsed.globs = names
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(parsed, clear_globs=False).failed:
        sys.exit(1)


def main(page: Path) -> None:
    """Run a page in an empty folder, with the environment's own commands first in the path.

    There, unlike in a checkout, a program may import the files beside it, as a reader's will.
    """
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ.pop("PYTHONSAFEPATH", None)
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "page"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks(text):
            run(block, names, str(page))
        os.chdir("/")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
