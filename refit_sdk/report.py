"""What a push did: stages in seconds, bytes by rank, and the state of each engine.

>>> report = PushReport(version=17, seconds={"move": 0.3, "install": 0.1, "commit": 0.1}, windows=4,
...                     ranks={"source[0]": Traffic(sent=10**9, arrived=0)},
...                     engines={"rollout-0": EngineReport("complete", 17, "")})
>>> report.gb_per_s
2.0
>>> print(str(report).splitlines()[0])
version 17: 953.7 MiB sent, 0 B arrived, 4 windows, 2.000 GB/s
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

if TYPE_CHECKING:
    from rich.console import Group

STAGES = ("agree", "pack", "move", "unpack", "install", "commit")
"""The stages of a push, in order. `move` is the time from the first window posted to the last one complete; packing and
unpacking go on inside it and are also counted by themselves."""


@frozen
class Traffic:
    """Bytes that a rank sent, and bytes that the fabric's completions say arrived at it."""

    sent: int
    arrived: int


@frozen
class EngineReport:
    """An engine after a push: its state, the version that it serves (None: none yet), the first cause if it failed."""

    state: str
    version: int | None
    cause: str


@frozen
class PushReport:
    """One push as this rank saw it: on a source, `ranks` and `engines` are the whole world's; on a target they are its
    engine's, which goes on as soon as all its own ranks have confirmed.
    """

    version: int
    seconds: Mapping[str, float]
    ranks: Mapping[str, Traffic]
    engines: Mapping[str, EngineReport]
    windows: int

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by all ranks."""
        return sum(traffic.sent for traffic in self.ranks.values())

    @property
    def bytes_arrived(self) -> int:
        """Bytes that arrived at all ranks."""
        return sum(traffic.arrived for traffic in self.ranks.values())

    @property
    def gb_per_s(self) -> float:
        """Bytes sent (at a target: that arrived at its engine) a second, in 10⁹, from this rank's first window posted
        to the outcome. A source's `move` alone would be too short: its sends are complete once they are buffered.
        """
        seconds = sum(self.seconds.get(stage, 0.0) for stage in ("move", "install", "commit"))
        return max(self.bytes_sent, self.bytes_arrived) / seconds / 1e9 if seconds else 0.0

    def to_json(self) -> str:
        """The report as JSON."""
        data: dict[str, Any] = attrs.asdict(self)
        data.update(bytes_sent=self.bytes_sent, bytes_arrived=self.bytes_arrived, gb_per_s=self.gb_per_s)
        return json.dumps(data)

    def __str__(self) -> str:
        from refit_sdk.render.report import to_text

        return to_text(self)

    def __rich__(self) -> Group:
        from refit_sdk.render.report import to_table

        return to_table(self)
