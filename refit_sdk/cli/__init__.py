"""The `refit` command: one module a command, each a plain function that typer reads its options from.

An error of ours is a message on stderr and exit code 2, Ctrl-C is 130; anything else is a bug and keeps its traceback.

>>> from typer.testing import CliRunner
>>> CliRunner().invoke(app, ["--version"]).output
'refit_sdk 0.1.0\\n'
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from refit_sdk import __version__
from refit_sdk.cli import demo, doctor
from refit_sdk.errors import RefitError


class Commands(TyperGroup):
    """The group of our commands, which says how each of them ends."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn what a user can cause into a message and an exit code."""
        try:
            return super().invoke(ctx)
        except RefitError as error:
            typer.echo(f"refit: {error}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"refit_sdk {__version__}")
        raise typer.Exit


@app.callback()
def refit(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Move a policy's new weights from the ranks that train it to the ranks that generate with it."""


def main() -> None:
    """The entry point of the console script `refit`."""
    app()
