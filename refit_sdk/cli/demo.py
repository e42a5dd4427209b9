"""`refit demo`: trainers and rollouts on this machine, every push checked bit by bit; the exit code says so too.

0: every push was right. 1: one wasn't, or a process failed. 2: refused before anything started. 128 + n: signal n.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from refit_sdk.errors import RefitError

if TYPE_CHECKING:
    from rich.console import Console

    from refit_sdk.demo.rows import Row
    from refit_sdk.demo.run import Options


def demo(
    sources: Annotated[int, typer.Option(help="Trainer processes.")] = 4,
    targets: Annotated[int, typer.Option(help="Generating processes, tensor parallel.")] = 2,
    pushes: Annotated[int, typer.Option(help="Pushes, with an optimizer step before each.")] = 5,
    size: Annotated[str | None, typer.Option(help="tiny, small or medium.", show_default="small")] = None,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Head tied to the embedding.", show_default="tied")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Start from a Hugging Face directory: Llama, Qwen2 or Qwen3.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of first weights and data.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run.")] = 300.0,
    mixed_precision: Annotated[
        bool, typer.Option("--mixed-precision", help="Trainers compute in bfloat16 over float32 masters.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Train in some processes, generate in others, and push the weights across, each element checked."""
    from refit_sdk.demo.processes import CrewError, signals_exit
    from refit_sdk.demo.run import Options

    try:
        options = Options(
            sources=sources,
            targets=targets,
            pushes=pushes,
            size=size,
            tied=tied,
            checkpoint=checkpoint,
            seed=seed,
            timeout=timeout,
            mixed_precision=mixed_precision,
        )
        with signals_exit():
            right = _run(options, as_json=as_json)
    except RefitError as error:
        typer.echo(f"refit demo: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, CrewError) else 2) from error
    raise typer.Exit(0 if right else 1)


def _run(options: Options, *, as_json: bool) -> bool:
    from refit_sdk.demo.run import run_demo
    from refit_sdk.render.demo import document, verdict

    with closing(run_demo(options)) as running:
        rows = list(running if as_json else _shown(running, options))
    typer.echo(document(rows) if as_json else verdict(rows))
    return len(rows) == options.pushes and all(row.ok for row in rows)


def _shown(running: Iterator[Row], options: Options) -> Iterator[Row]:
    from rich.console import Console

    console = Console()
    return _live(running, options, console) if console.is_terminal else _plain(running)


def _plain(running: Iterator[Row]) -> Iterator[Row]:
    from refit_sdk.render.demo import line

    for row in running:
        typer.echo(line(row))
        yield row


def _live(running: Iterator[Row], options: Options, console: Console) -> Iterator[Row]:
    from rich.live import Live

    from refit_sdk.render.demo import table

    title = f"{options.sources} sources (FSDP2) → {options.targets} targets (tensor parallel, bfloat16)"
    rows: list[Row] = []
    with Live(table(rows, title=title, waiting=options.pushes), console=console) as live:
        for row in running:
            rows.append(row)
            live.update(table(rows, title=title, waiting=options.pushes - len(rows)), refresh=True)
            yield row
