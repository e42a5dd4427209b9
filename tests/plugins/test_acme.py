"""A distribution of its own with a plug-in of every kind: `tests/refit_acme`, installed beside us.

Kinds whose first real user comes later are used here.
"""

import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from refit_acme.live import Weights
from refit_adapters.architectures import names_for

from refit_sdk.box import Box
from refit_sdk.errors import FencedError
from refit_sdk.fabric import FabricError, KeyValue
from refit_sdk.plugins import PROTOCOLS, choose_adapter, registry
from refit_sdk.report import PushReport
from refit_sdk.topology import Topology
from refit_sdk.transport import Moves
from refit_sdk.world import Region


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_every_kind_comes_through_the_public_door(kind: str) -> None:
    offers = [offer for offer in registry().offers_of(kind) if offer.origin.distribution == "refit-acme"]
    assert len(offers) == 1
    assert offers[0].name.startswith("test-only-")
    assert registry().get(kind, offers[0].name) is offers[0].offered


def test_the_transport_brings_every_move_to_everyone_who_needs_it() -> None:
    def ints(*values: Any) -> Any:
        return np.array(values, np.int64)

    moves = Moves(
        start=ints([0], [4]), stop=ints([4], [8]), server=ints(0, 1), need_start=ints(0, 2, 3), need=ints(2, 3, 3),
        holder_start=ints(0, 1, 2), holder=ints(0, 1), itemsize=2,
    )  # fmt: skip
    steps = registry().get("transport", "test-only-direct")().steps(moves, Topology.single(4))
    assert list(zip(steps.move, steps.src, steps.dst, strict=True)) == [(0, 0, 2), (0, 0, 3), (1, 1, 3)]
    assert steps.stop.tolist() == [[4], [4], [8]]


def test_the_adapters_recognise_their_model_alone() -> None:
    model = Weights({"w": torch.zeros(2, 3)})
    for kind in ("source_adapter", "target_adapter"):
        adapter = choose_adapter(registry(), kind, model)(model, rank=0, size=1)
        (fragment,) = adapter.describe()
        assert fragment.view is model.tensors["w"]
        assert fragment.box == Box.whole((2, 3))
        before = adapter.identity()
        model.tensors["w"] = torch.zeros(2, 3)
        assert adapter.identity() != before


def test_a_fenced_target_refuses_to_be_read() -> None:
    target = registry().get("target_adapter", "test-only-weights")(Weights({"w": torch.ones(1)}), rank=0, size=1)
    target.fence("torn")
    target.fence("later")
    with pytest.raises(FencedError, match="torn"):
        target.read("w")
    target.install(version=3)
    target.unfence()
    assert target.read("w").item() == 1


def test_the_fabric_carries_bytes_between_threads() -> None:
    fabric = registry().get("fabric", "test-only-threads")()
    groups = [
        fabric.connect(group="g", members=(0, 1), process=process, store=cast(KeyValue, None), timeout=1.0)
        for process in range(2)
    ]
    buffer = torch.zeros(3, dtype=torch.uint8)
    pending = groups[1].recv(buffer, peer=0)
    sender = threading.Thread(
        target=groups[0].send, args=(torch.tensor([1, 2, 3], dtype=torch.uint8),), kwargs={"peer": 1}
    )
    sender.start()
    assert pending.wait(5.0) == 3
    sender.join()
    assert buffer.tolist() == [1, 2, 3]
    groups[0].abort("over")
    with pytest.raises(FabricError, match="over"):
        groups[0].send(buffer, peer=1)
    for group in groups:
        group.close()


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
