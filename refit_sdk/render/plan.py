"""A plan as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from io import StringIO
from typing import TYPE_CHECKING

import attrs
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from refit_sdk.plan import Plan
    from refit_sdk.summary import Row, Totals


def size(nbytes: int) -> str:
    """Bytes for people, in powers of 1024.

    >>> size(0), size(1536), size(61_000_000_000)
    ('0 B', '1.5 KiB', '56.8 GiB')
    """
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def to_table(plan: Plan) -> Group:
    """The plan as a table, a row a family, and its totals below."""
    table = Table(title=f"plan {plan.digest}", title_justify="left")
    for heading in ("tensor", "shape", "dtype", "transport"):
        table.add_column(heading, overflow="fold")
    for heading in ("tensors", "moves", "bytes", "share", "copied", "busiest sender"):
        table.add_column(heading, justify="right")
    for row in plan.rows():
        table.add_row(*_cells(row))
    return Group(table, _rules(plan), *(Text(line) for line in _totals(plan.totals())), *_reasons(plan))


def _rules(plan: Plan) -> Table:
    """A row a rule and transport."""
    table = Table()
    for heading in ("rule", "transport"):
        table.add_column(heading, overflow="fold")
    for heading in ("tensors", "bytes", "share", "rounds", "links inside", "between", "alone"):
        table.add_column(heading, justify="right")
    for rule in plan.rules():
        inside, between = map(str, rule.links)
        table.add_row(
            rule.pattern, rule.transport, str(rule.tensors), size(rule.nbytes), f"{rule.share:.1%}", str(rule.rounds),
            inside, between, f"{seconds(rule.nanoseconds)} ({rule.slowest})",
        )  # fmt: skip
    return table


def _reasons(plan: Plan) -> list[Text]:
    """Why families that were left open have their transport."""
    return [Text(f"{row.name} goes by {row.transport}: {row.why}") for row in plan.rows() if row.why]


def seconds(nanoseconds: int) -> str:
    """Time for people.

    >>> seconds(1_500_000), seconds(2_000_000_000)
    ('1.5 ms', '2 s')
    """
    return f"{nanoseconds / 1e6:.3g} ms" if nanoseconds < 10**9 else f"{nanoseconds / 1e9:.3g} s"


def _cells(row: Row) -> tuple[str, ...]:
    cast = row.source_dtype == row.target_dtype
    return (
        row.name, "×".join(map(str, row.shape)) or "scalar",
        row.source_dtype if cast else f"{row.source_dtype} → {row.target_dtype}",
        row.transport, str(row.tensors), str(row.moves), size(row.nbytes), f"{row.share:.1%}", size(row.local_nbytes),
        f"{row.busiest} {size(row.busiest_nbytes)}" if row.busiest else "",
    )  # fmt: skip


def _totals(totals: Totals) -> list[str]:
    least, part = totals.bounds, totals.nbytes / max(totals.gather_broadcast_nbytes, 1)
    best = (size(least.egress), size(least.relayed_egress)), (size(least.ingress), size(least.relayed_ingress))
    ends = (
        ("sender", totals.busiest_sender, totals.sent_nbytes, best[0]),
        ("receiver", totals.busiest_receiver, totals.received_nbytes, best[1]),
    )
    card = (
        f"busiest NIC: {size(totals.load.nic_out)} out, at best {size(totals.nic_bounds.egress)}; "
        f"{size(totals.load.nic_in)} in, at best {size(totals.nic_bounds.ingress)}; "
        f"{size(totals.load.crossing)} enter a domain from another"
    )
    return [
        f"{totals.tensors} tensors in {totals.moves} moves and {totals.windows} windows",
        f"{size(totals.nbytes)} between processes, {size(totals.local_nbytes)} copied inside one",
        f"gather-broadcast would move {size(totals.gather_broadcast_nbytes)}; this is {part:.1%} of that",
        *(
            f"busiest {end} {rank or 'none'}: {size(nbytes)}, at best {own} (with relays {relayed})"
            for end, rank, nbytes, (own, relayed) in ends
        ),
        card,
        f"predicted {seconds(totals.predicted_ns)}, NICs alone take {seconds(totals.bound_ns)} at best",
    ]


def to_text(plan: Plan, *, width: int = 160) -> str:
    """The table as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(to_table(plan))
    return out.getvalue().rstrip()


def to_json(plan: Plan) -> str:
    """Rows, totals, routes and tied checks."""
    return json.dumps(
        {
            "digest": plan.digest,
            "routes": [{"pattern": pattern, "transport": transport} for pattern, transport in plan.settings.routes],
            "rules": [attrs.asdict(rule) for rule in plan.rules()],
            "rows": [attrs.asdict(row) for row in plan.rows()],
            "totals": attrs.asdict(plan.totals()),
            "tied": [list(check.names) for check in plan.tied_checks],
        }
    )
