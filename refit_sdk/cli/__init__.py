"""The `refit` command: one module a command, each a function with its options above it.

An error of ours is a message on stderr and exit code 2, Ctrl-C is 130; anything else is a bug and keeps its traceback.

>>> from click.testing import CliRunner
>>> CliRunner().invoke(app, ["--version"]).output
'refit_sdk 0.1.0\\n'
"""

from __future__ import annotations

from typing import Any

import click
from click.exceptions import Exit

from refit_sdk import __version__
from refit_sdk.cli import bench, demo, doctor, push
from refit_sdk.errors import RefitError


class Commands(click.Group):
    """The group of our commands, which says how each of them ends."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; turn what a user can cause into a message and an exit code."""
        try:
            return super().invoke(ctx)
        except RefitError as error:
            click.echo(f"refit: {error}", err=True)
            raise Exit(2) from error
        except KeyboardInterrupt as error:
            raise Exit(130) from error


@click.group(cls=Commands, no_args_is_help=True)
@click.version_option(__version__, message="refit_sdk %(version)s", help="Print the version and leave.")
def app() -> None:
    """Move a policy's new weights from the ranks that train it to the ranks that generate with it."""


app.add_command(doctor.doctor)
app.add_command(demo.demo)
app.add_command(push.push)
app.add_command(bench.bench)


def main() -> None:
    """The entry point of the console script `refit`."""
    app()
