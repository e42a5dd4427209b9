"""A push's report for people: a line that sums it up, its stages, and its engines."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from refit_sdk.render.plan import size

if TYPE_CHECKING:
    from refit_sdk.report import PushReport


def to_table(report: PushReport) -> Group:
    """The report as a line, and a table that has a row an engine."""
    stages = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in report.seconds.items())
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "state", "version", "cause"):
        table.add_column(heading, overflow="fold")
    for name, engine in report.engines.items():
        served = "none" if engine.version is None else str(engine.version)
        table.add_row(*(Text(cell) for cell in (name, engine.state, served, engine.cause)))
    return Group(Text(_head(report)), Text(stages), *([table] if report.engines else []))


def _head(report: PushReport) -> str:
    sent, arrived = size(report.bytes_sent), size(report.bytes_arrived)
    windows = f"{report.windows} window{'s' * (report.windows != 1)}"
    return f"version {report.version}: {sent} sent, {arrived} arrived, {windows}, {report.gb_per_s:.3f} GB/s"


def to_text(report: PushReport, *, width: int = 160) -> str:
    """The same as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(to_table(report))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
