"""What needs no live model: a paper layout, an architecture, an engine control and an observer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from refit_sdk.box import Box
from refit_sdk.hookspecs import hookimpl
from refit_sdk.report import PushReport
from refit_sdk.tensor import TensorSpec, fold_name
from refit_sdk.world import Manifest, Part, Region


class Rows:
    """Layouts written `rows/4`: every tensor cut on its first dim, evenly, over four ranks."""

    name = "test-only-rows"

    def manifests(self, layout: str, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Iterator[Manifest]:
        """One manifest a rank."""
        count = int(layout.removeprefix("rows/"))
        for rank in range(count):
            yield Manifest(tuple(_part(name, shape, dtype, rank, count) for name, shape in shapes.items()))


def _part(name: str, shape: tuple[int, ...], dtype: str, rank: int, count: int) -> Part:
    template, numbers = fold_name(name)
    member = Box(numbers, (number + 1 for number in numbers))
    rows = Box.whole(shape).narrow(0, shape[0] * rank // count, shape[0] * (rank + 1) // count)
    return Part(TensorSpec(template, shape, (member,)), (Region(member.concat(rows), dtype),))


class Logbook:
    """An engine that writes down what it was told."""

    name = "test-only-logbook"

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self, *, mode: str) -> None:
        """Write it down."""
        self.told.append(f"pause {mode}")

    def update(self, *, version: int, info: Mapping[str, Any]) -> None:
        """Write it down."""
        self.told.append(f"update {version} {sorted(info)}")

    def finish(self, *, version: int) -> None:
        """Write it down."""
        self.told.append(f"finish {version}")

    def resume(self) -> None:
        """Write it down."""
        self.told.append("resume")

    def fence(self, reason: str) -> None:
        """Write it down."""
        self.told.append(f"fence {reason}")


class Bigram:
    """Names of a model that is one table."""

    name = "test-only-bigram"
    model_types: ClassVar[tuple[str, ...]] = ("test-only-bigram",)
    names: ClassVar[Mapping[str, str]] = {"embed": "table.weight"}
    sizes: ClassVar[Mapping[str, str]] = {"vocab": "vocab_size", "hidden": "vocab_size"}


class LastReports:
    """Remembers the last reports of this process."""

    name = "test-only-last-reports"
    reports: ClassVar[deque[PushReport]] = deque(maxlen=8)

    def pushed(self, report: PushReport) -> None:
        """Remember it."""
        self.reports.append(report)


@hookimpl
def refit_register_paper_layouts() -> list[type]:
    """The one paper layout."""
    return [Rows]


@hookimpl
def refit_register_architectures() -> list[type]:
    """The one architecture."""
    return [Bigram]


@hookimpl
def refit_register_engine_controls() -> list[type]:
    """The one engine control."""
    return [Logbook]


@hookimpl
def refit_register_observers() -> list[type]:
    """The one observer."""
    return [LastReports]
