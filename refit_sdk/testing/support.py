"""What became of each case with each pair of transport and fabric, and the page that says so.

>>> said = page([Row("a over b", "odd", "one", "moved"), Row("a over b", "odd", "two", "refused", "3 dims")])
>>> said.splitlines()[-3::2]
['| odd | 1 moved, 1 refused |', '- a over b refuses *two*: 3 dims']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import astuple, evolve, frozen

KEY = "refit case"
STATES = ("moved", "refused", "not run here", "failed")

HEAD = """# What moves over what

Written by [the conformance kit](kit.md), with `--refit-support docs/reference/support.md`, from what became of its
cases (quick tier). *Moved* is bit-exact, twice, with every byte counted; *refused* is an `UnsupportedMoveError` at
planning, before any byte moved; *not run here* says what the machine lacked.
"""


@frozen
class Row:
    """A case with a pair (`"reshard over tcp"`), and what became of it."""

    pair: str
    group: str
    case: str
    state: str = ""
    reason: str = ""

    def property(self, state: str, reason: str) -> tuple[str, tuple[str, ...]]:
        """The row with its end, as a property of a test's report."""
        return KEY, astuple(evolve(self, state=state, reason=reason))


def counted(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    """How many cases of each pair came to which end."""
    found: dict[str, Counter[str]] = {row.pair: Counter() for row in rows}
    for row in rows:
        found[row.pair][row.state] += 1
    return found


def page(rows: Sequence[Row]) -> str:
    """The page: a table of groups of cases by pairs, and each case that wasn't moved."""
    pairs, groups = list(dict.fromkeys(row.pair for row in rows)), list(dict.fromkeys(row.group for row in rows))
    lines = [HEAD, f"| cases | {' | '.join(pairs)} |", f"|{'---|' * (len(pairs) + 1)}"]
    for group in groups:
        ends = (Counter(row.state for row in rows if (row.pair, row.group) == (pair, group)) for pair in pairs)
        cells = (", ".join(f"{end[state]} {state}" for state in STATES if end[state]) or "not asked" for end in ends)
        lines.append(f"| {group} | {' | '.join(cells)} |")
    verbs = {"refused": "refuses", "not run here": "did not run", "failed": "failed in"}
    rest = [f"- {row.pair} {verbs[row.state]} *{row.case}*: {row.reason}" for row in rows if row.state in verbs]
    return "\n".join([*lines, *(["", *rest] if rest else []), ""])
