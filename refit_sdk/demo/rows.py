"""What the demo says about each push, as values. No torch.

>>> gather_broadcast_bytes(1000, sources=4, targets=2)
2750
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

LOGITS_TOLERANCE: Final = 0.05
"""How far bfloat16 logits of the target may be from the source's own, as a share of their norm."""


def gather_broadcast_bytes(model_bytes: int, *, sources: int, targets: int) -> int:
    """Bytes that would arrive if one source rank gathered every whole parameter and sent it whole to each target rank.

    Both halves are counted in the wire's dtype, and the gathering rank's own shard not at all.
    """
    return model_bytes - model_bytes // sources + model_bytes * targets


@frozen
class Pushed:
    """A push, as source rank 0 saw it. Seconds are from the call until every target committed; the rate is the
    report's, which leaves out the wait until all are ready.
    """

    version: int
    loss: float
    seconds: float
    gb_per_s: float
    bytes_moved: int
    model_bytes: int
    carried: tuple[str, ...] = ()
    """What served the links of source rank 0."""


@frozen
class Checked:
    """A received version, as one target rank found it."""

    version: int
    elements: int
    wrong: int
    changed: int
    first_wrong: str
    logits_error: float


@frozen
class Row:
    """A push with all that was found about it."""

    version: int
    loss: float
    seconds: float
    gb_per_s: float
    bytes_moved: int
    bytes_gather_broadcast: int
    elements: int
    wrong: int
    changed: int
    first_wrong: str
    logits_error: float
    carried: tuple[str, ...] = ()

    @property
    def bit_equal(self) -> bool:
        """Whether every element of every target has the bits of the cast source."""
        return self.wrong == 0 and self.elements > 0

    @property
    def ok(self) -> bool:
        """Whether the push is right: the bits, and what the target computes with them."""
        return self.bit_equal and self.logits_error <= LOGITS_TOLERANCE


@frozen(eq=False)
class Tally:
    """Collects what ranks say until a version is complete."""

    sources: int
    targets: int
    _pushed: dict[int, Pushed] = field(factory=dict, init=False)
    _checked: dict[int, dict[str, Checked]] = field(factory=dict, init=False)

    def add(self, rank: str, said: Pushed | Checked) -> Row | None:
        """Take one message; the row of its version if that was the last one missing."""
        if isinstance(said, Pushed):
            self._pushed[said.version] = said
        else:
            self._checked.setdefault(said.version, {})[rank] = said
        pushed, checked = self._pushed.get(said.version), self._checked.get(said.version, {})
        return self._row(pushed, checked) if pushed and len(checked) == self.targets else None

    def _row(self, pushed: Pushed, checked: Mapping[str, Checked]) -> Row:
        found = checked.values()
        return Row(
            version=pushed.version,
            loss=pushed.loss,
            seconds=pushed.seconds,
            gb_per_s=pushed.gb_per_s,
            bytes_moved=pushed.bytes_moved,
            bytes_gather_broadcast=gather_broadcast_bytes(
                pushed.model_bytes, sources=self.sources, targets=self.targets
            ),
            elements=sum(part.elements for part in found),
            wrong=sum(part.wrong for part in found),
            changed=sum(part.changed for part in found),
            first_wrong=next((f"{rank} {part.first_wrong}" for rank, part in checked.items() if part.wrong), ""),
            logits_error=max(part.logits_error for part in found),
            carried=pushed.carried,
        )
