"""`refit push`: from one checkpoint directory to another, cut, cast and sharded anew. One process, no GPU.

The directory is the source and the export the target of one colocated session: planned, checked and committed as any
push is. Nothing is copied but through the system's page cache, a window at a time, so memory stays small.

0: written. 2: refused, and nothing changed. 130: broken off, and nothing changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from refit_sdk.exporting import Export
    from refit_sdk.report import PushReport

_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_FOREVER: Final = 1e6
"""Seconds: a push of files waits for nobody but the disk, and Ctrl-C ends it."""


class Size(click.ParamType[int]):
    """A number of bytes, as `5GB`, `512MiB` or `1000000`.

    >>> Size().convert("5GB", None, None), Size().convert("16MiB", None, None)
    (5000000000, 16777216)
    """

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes that a text says."""
        match = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(value).upper())
        if match is None or match[2] not in _UNITS or int(match[1]) < 1:
            self.fail(f"{value!r} is not a size; say 5GB, 512MiB or a number of bytes", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class Cut(click.ParamType[tuple[str, str]]):
    """A rule, `PATTERN=DIM` or `PATTERN=whole`.

    >>> Cut().convert("*.router.weight=whole", None, None)
    ('*.router.weight', 'whole')
    """

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """The pattern, and the dim's number or "whole"."""
        pattern, _, how = str(value).rpartition("=")
        if not pattern or not (how == "whole" or how.isdecimal()):
            self.fail(
                f"{value!r} is not a rule; say 'PATTERN=0', with the dim that is cut, or 'PATTERN=whole'", param, ctx
            )
        return pattern, how


@click.command(context_settings={"show_default": True})
@click.option("--from", "source", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A checkpoint.")
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, metavar="DIR", help="What is written.")
@click.option(
    "--target-layout", "layout", default="whole", help="whole, or tp=N: one folder a rank, rank-0 to rank-(N-1)."
)
@click.option("--cut", "rules", type=Cut(), multiple=True, metavar="PATTERN=DIM", help="How matching tensors are cut.")
@click.option("--dtype", help="Of floating tensors: float32, bfloat16, float16 or float64.  [default: as they are]")
@click.option("--max-shard-size", "shard_bytes", type=Size(), default="5GB", help="Most bytes of a file.")
@click.option("--window-size", "window_bytes", type=Size(), default="4MiB", help="Bytes that are moved at a time.")
@click.option("--copy/--no-copy", default=True, help="Config, tokenizer and other small files go along.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a sentence.")
def push(*, source: Path, target: Path, window_bytes: int, as_json: bool, dtype: str | None, **how: Any) -> None:
    """Write a checkpoint directory anew: cut for other ranks, in another dtype, in files of another size."""
    from refit_sdk.exporting import Export
    from refit_sdk.render.push import document, sentence

    export = Export.like(source, target, dtype=dtype, **how)
    casts = [("*", dtype)] if dtype else []
    with _bar(shown=not as_json) as progress:
        report = reshape(source, export, casts=casts, window_bytes=window_bytes, progress=progress)
    click.echo((document if as_json else sentence)(export, report))


def reshape(
    source: Path,
    export: Export,
    *,
    casts: list[tuple[str, str]],
    window_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> PushReport:
    """Push from a directory to an export, both in this process. `progress` is told of windows: (done, of how many)."""
    from refit_sdk.controller import RefitController
    from refit_sdk.session import RefitSession

    token = secrets.token_hex()
    with (
        RefitController(rendezvous="tcp://127.0.0.1:0", token=token, deadline=_FOREVER) as controller,
        RefitSession.colocated(
            source=source,
            target=export,
            rendezvous=controller.rendezvous,
            rank=0,
            size=1,
            engine="export",
            source_adapter="safetensors",
            target_adapter="safetensors",
            fabric="inproc",
            casts=casts,
            window_bytes=window_bytes,
            token=token,
            deadline=_FOREVER,
        ) as session,
    ):
        session.watch(progress)
        return session.sync(version=1)


@contextmanager
def _bar(*, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("writing", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
