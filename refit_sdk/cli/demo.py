"""`refit demo`: trainers and rollouts on this machine, every push checked bit by bit; the exit code says so too.

0: every push was right. 1: one wasn't, or a process failed. 2: refused before anything started. 128 + n: signal n.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from refit_sdk.errors import RefitError

if TYPE_CHECKING:
    from rich.console import Console

    from refit_sdk.demo.rows import Row
    from refit_sdk.demo.run import Options


@click.command(context_settings={"show_default": True})
@click.option("--sources", type=int, default=4, help="Trainer processes.")
@click.option("--targets", type=int, default=2, help="Generating processes, tensor parallel.")
@click.option("--pushes", type=int, default=5, help="Pushes, with an optimizer step before each.")
@click.option("--size", show_default="small", help="tiny, small or medium.")
@click.option("--tied/--untied", default=None, show_default="tied", help="Head tied to the embedding.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Start from a Hugging Face directory: Llama, Qwen2 or Qwen3.",
)
@click.option("--seed", type=int, default=0, help="Of first weights and data.")
@click.option("--timeout", type=float, default=300.0, help="Seconds for the whole run.")
@click.option("--mixed-precision", is_flag=True, help="Trainers compute in bfloat16 over float32 masters.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def demo(*, as_json: bool, **asked: Any) -> None:
    """Train in some processes, generate in others, and push the weights across, each element checked."""
    from refit_sdk.demo.processes import CrewError, signals_exit
    from refit_sdk.demo.run import Options

    try:
        options = Options(**asked)
        with signals_exit():
            right = _run(options, as_json=as_json)
    except RefitError as error:
        click.echo(f"refit demo: {error}", err=True)
        raise Exit(1 if isinstance(error, CrewError) else 2) from error
    raise Exit(0 if right else 1)


def _run(options: Options, *, as_json: bool) -> bool:
    from refit_sdk.demo.run import run_demo
    from refit_sdk.render.demo import carriers, document, verdict

    with closing(run_demo(options)) as running:
        rows = list(running if as_json else _shown(running, options))
    if not as_json and (told := carriers(rows)):
        click.echo(told)
    click.echo(document(rows) if as_json else verdict(rows))
    return len(rows) == options.pushes and all(row.ok for row in rows)


def _shown(running: Iterator[Row], options: Options) -> Iterator[Row]:
    from rich.console import Console

    console = Console()
    return _live(running, options, console) if console.is_terminal else _plain(running)


def _plain(running: Iterator[Row]) -> Iterator[Row]:
    from refit_sdk.render.demo import line

    for row in running:
        click.echo(line(row))
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
