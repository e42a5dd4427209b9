"""Source processes: each opens a session on a checkpoint directory and pushes, without vLLM."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _body(rank: int, size: int, live: Path, where: str, options: dict[str, Any], pipe: Any) -> None:
    """Push a directory whenever one is asked for, and say what came of it."""
    from refit_sdk.errors import RefitError
    from refit_sdk.session import RefitSession

    try:
        with RefitSession.source(live, rendezvous=where, rank=rank, size=size, deadline=60, **options) as session:
            pipe.send(("joined", None))
            while (asked := pipe.recv()) is not None:
                try:
                    pipe.send(("pushed", dict(session.push(version=asked).seconds)))
                except RefitError as error:
                    pipe.send(("refused", str(error)))
    except BaseException:  # noqa: BLE001 - the test judges it
        pipe.send(("failed", traceback.format_exc()))


class Sources:
    """Processes that push what lies in the directory `live`: `put` lays another checkpoint there."""

    def __init__(self, live: Path, where: str, *, ranks: range, size: int, options: dict[str, Any]) -> None:
        context = mp.get_context("spawn")
        self._pipes = []
        self._processes = []
        for rank in ranks:
            ours, theirs = context.Pipe()
            args = (rank, size, live, where, options, theirs)
            process = context.Process(target=_body, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, version: int) -> None:
        """Have all push."""
        for pipe in self._pipes:
            pipe.send(version)

    def answers(self, word: str) -> list[Any]:
        """What each said; the first failure is raised."""
        found = []
        for pipe in self._pipes:
            if not pipe.poll(100):
                raise AssertionError(f"a source said nothing, not even {word!r}")
            said, what = pipe.recv()
            assert said == word, what
            found.append(what)
        return found

    def end(self) -> None:
        """Stop all."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            process.kill()


def put(checkpoint: Path, live: Path) -> None:
    """Lay a checkpoint into a directory that sources read; each file is replaced at once."""
    live.mkdir(exist_ok=True)
    for file in checkpoint.glob("*.safetensors*"):
        copy = live / f".{file.name}"
        shutil.copyfile(file, copy)
        copy.replace(live / file.name)


@contextlib.contextmanager
def sources(live: Path, where: str, *, size: int = 2, first: int = 0, **options: Any) -> Iterator[Sources]:
    """Processes that push: ranks `first` and on, of `size`."""
    made = Sources(live, where, ranks=range(first, size), size=size, options=options)
    try:
        yield made
    finally:
        made.end()
