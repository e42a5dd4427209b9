"""The demo's rows, as a table, a line, or JSON.

>>> from refit_sdk.demo.rows import Row
>>> row = Row(1, 6.2, 0.05, 0.08, 2_000_000, 5_500_000, 1_000_000, 0, 1_000_000, "", 0.004)
>>> line(row).split(', ')[1:4]
['0.050 s', '0.08 GB/s', '2.00 MB moved (gather-broadcast: 5.50 MB)']
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import attrs
from rich import box
from rich.table import Table

from refit_sdk.demo.rows import Row

_COLUMNS: Final = (
    "version", "loss", "seconds", "GB/s", "MB\nmoved", "MB gather-\nbroadcast", "% new", "bits", "logits\n% off",
)  # fmt: skip

SHOWN: Final = 10
"""Rows that a table shows, so that it fits a terminal while it is live."""


def cells(row: Row) -> tuple[str, ...]:
    """The row's cells, in the order of the table's columns."""
    return (
        str(row.version),
        f"{row.loss:.3f}",
        f"{row.seconds:.3f}",
        f"{row.gb_per_s:.2f}",
        f"{row.bytes_moved / 1e6:.2f}",
        f"{row.bytes_gather_broadcast / 1e6:.2f}",
        f"{100 * row.changed / max(row.elements, 1):.1f}",
        "equal" if row.bit_equal else f"{row.wrong} of {row.elements} WRONG, first in {row.first_wrong}",
        f"{100 * row.logits_error:.2f}" + ("" if row.ok or not row.bit_equal else " WRONG"),
    )


def line(row: Row) -> str:
    """The row as one line of text."""
    version, loss, seconds, rate, moved, usual, new, bits, logits = cells(row)
    return (
        f"version {version}: loss {loss}, {seconds} s, {rate} GB/s, {moved} MB moved (gather-broadcast: {usual} MB), "
        f"{new} % new, bits {bits}, logits {logits} % off"
    )


def table(rows: Sequence[Row], *, title: str, waiting: int = 0) -> Table:
    """The last rows so far, with an empty row for each of the next pushes."""
    made = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="seconds of a push until all have committed; GB/s from the first window on; MB of all ranks; logits "
        "against the trainers' own",
    )
    for column in _COLUMNS:
        made.add_column(column, justify="right")
    for row in rows[-SHOWN:]:
        made.add_row(*cells(row), style=None if row.ok else "bold red")
    for number in range(min(waiting, SHOWN // 2)):
        made.add_row(str(len(rows) + number + 1), *("…" for _ in _COLUMNS[1:]), style="dim")
    return made


def document(rows: Sequence[Row]) -> str:
    """All rows as one JSON object."""
    pushes = [{**attrs.asdict(row), "bit_equal": row.bit_equal, "ok": row.ok} for row in rows]
    return json.dumps({"ok": bool(rows) and all(row.ok for row in rows), "pushes": pushes}, indent=2)


def verdict(rows: Sequence[Row]) -> str:
    """What the run showed, in a sentence."""
    right = sum(row.ok for row in rows)
    if rows and right == len(rows):
        compared = f"{sum(row.elements for row in rows)} target elements compared"
        return f"{right} of {len(rows)} pushes right: {compared}, all bit-equal to the cast source"
    return f"{len(rows) - right} of {len(rows)} pushes did not deliver what the sources had"


def carriers(rows: Sequence[Row]) -> str:
    """What served the links of source rank 0, in a sentence; "" if it has none."""
    served = sorted({name for row in rows for name in row.carried})
    return f"the bytes of source[0] went by {' and '.join(served)}" if served else ""
