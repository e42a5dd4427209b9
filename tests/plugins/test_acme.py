"""A distribution of its own with a plug-in of every kind: `tests/refit_acme`, installed beside us.

Its transport, fabric and adapter are held to the conformance kit (`tests/kit`); the kinds whose first real user comes
later are used here.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refit_adapters.architectures import names_for

from refit_sdk.box import Box
from refit_sdk.plugins import PROTOCOLS, registry
from refit_sdk.report import PushReport
from refit_sdk.topology import Topology
from refit_sdk.transport import Moves
from refit_sdk.world import Region


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_every_kind_comes_through_the_public_door(kind: str) -> None:
    offers = [offer for offer in registry().offers_of(kind) if offer.origin.distribution == "refit-acme"]
    assert len(offers) == 1
    assert offers[0].name.partition("-")[0] in ("acme", "test")
    assert registry().get(kind, offers[0].name) is offers[0].offered


def test_the_transport_serves_one_after_the_other() -> None:
    def ints(*values: Any) -> Any:
        return np.array(values, np.int64)

    moves = Moves(
        start=ints([0], [4]), stop=ints([4], [8]), server=ints(0, 1), need_start=ints(0, 2, 3), need=ints(2, 3, 3),
        holder_start=ints(0, 1, 2), holder=ints(0, 1), itemsize=2,
    )  # fmt: skip
    steps = registry().get("transport", "acme")().steps(moves, Topology.single(4))
    assert list(zip(steps.move, steps.src, steps.dst, steps.round, strict=True)) == [
        (0, 0, 2, 0), (0, 0, 3, 1), (1, 1, 3, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("module", "page"), [
    ("turns", "write-a-transport"), ("lanes", "write-a-fabric"), ("weights", "write-an-adapter"),
])  # fmt: skip
def test_the_how_to_shows_the_plug_in_as_it_is(module: str, page: str) -> None:
    source = inspect.getsource(importlib.import_module(f"refit_acme.{module}"))
    text = (Path(__file__).parents[2] / "docs" / "how-to" / f"{page}.md").read_text()
    assert f'```python title="{module}.py"\n{source}```' in text


def test_the_paper_layout_gives_a_manifest_a_rank() -> None:
    paper = registry().get("paper_layout", "test-only-rows")()
    manifests = list(paper.manifests("rows/2", {"layers.3.w": (5, 2)}, "bfloat16"))
    assert [manifest.parts[0].regions for manifest in manifests] == [
        (Region(Box((3, 0, 0), (4, 2, 2)), "bfloat16"),),
        (Region(Box((3, 2, 0), (4, 5, 2)), "bfloat16"),),
    ]
    assert sum(manifest.nbytes for manifest in manifests) == 20


def test_the_architecture_is_found_by_its_model_type() -> None:
    found = names_for({"model_type": "test-only-bigram"})
    assert found is not None
    assert found.names["embed"] == "table.weight"


def test_the_engine_control_hears_every_verb() -> None:
    engine = registry().get("engine_control", "test-only-logbook")()
    engine.pause(mode="keep")
    engine.update(version=4, info={"size": 2})
    engine.finish(version=4)
    engine.resume()
    engine.fence("torn")
    assert engine.told == ["pause keep", "update 4 ['size']", "finish 4", "resume", "fence torn"]


def test_the_observer_is_told() -> None:
    observer = registry().get("observer", "test-only-last-reports")()
    report = PushReport(version=1, seconds={}, ranks={}, engines={}, windows=0)
    observer.pushed(report)
    assert observer.reports[-1] is report
