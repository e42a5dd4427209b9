"""What `refit doctor` found, as a table for people and as JSON for programs.

>>> from refit_sdk.plugins import Origin
>>> origin = Origin("reshard", "refit_backends.reshard", "refit-sdk", "0.1.0")
>>> found = Finding(kind="transport", name="reshard", origin=origin, usable=True, broken=False, why="")
>>> json.loads(to_json({"python": "3.11.7"}, [found]))["plugins"][0]["usable"]
True
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import attrs
from rich import box
from rich.table import Table
from rich.text import Text

from refit_sdk.plugins import Finding


def to_table(versions: Mapping[str, str], findings: Iterable[Finding]) -> Table:
    """One row a finding: kind, name, usable here or not, where it comes from, and why not and what to install."""
    title = ", ".join(f"{name} {version}" for name, version in versions.items())
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("kind", "name", "here"):
        table.add_column(heading, no_wrap=True)
    table.add_column("from", overflow="fold")
    for finding in findings:
        whence = "\n".join(filter(None, (str(finding.origin), finding.why, finding.about)))
        table.add_row(finding.kind.replace("_", " "), finding.name, _verdict(finding), Text(whence))
    return table


def _verdict(finding: Finding) -> Text:
    if finding.usable:
        return Text("usable", style="green")
    return Text("broken", style="red") if finding.broken else Text("not usable", style="yellow")


def to_json(versions: Mapping[str, str], findings: Iterable[Finding]) -> str:
    """The same as one JSON object: `versions`, and `plugins` with an object a finding."""
    return json.dumps(
        {"versions": dict(versions), "plugins": [attrs.asdict(finding) for finding in findings]}, indent=2
    )
