"""Where a process says it is, and that all plan with it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from attrs import evolve
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric
from test_world_bytes import world

from refit_sdk import whereabouts as room
from refit_sdk.errors import RendezvousError
from refit_sdk.manifest import decode_world, encode_world
from refit_sdk.whereabouts import whereabouts
from refit_sdk.world import Location


def test_the_host_is_what_shares_memory_unless_one_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFIT_HOST", raising=False)
    found = whereabouts(object()).host
    assert found == whereabouts(ShmFabric()).host
    assert whereabouts(MixedFabric(shm=ShmFabric(host="x"))).host == f"x/{found}"
    monkeypatch.setenv("REFIT_HOST", "y")
    assert whereabouts(ShmFabric()).host == f"y/{found}"
    assert whereabouts(ShmFabric(host="x")).host == f"x/{found}"


def test_the_domain_is_stated_or_unknown_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFIT_DOMAIN", raising=False)
    monkeypatch.setattr(room, "nvlink", lambda: "")
    assert whereabouts(object()).domain == ""
    monkeypatch.setenv("REFIT_DOMAIN", "rack-3")
    assert whereabouts(object()).domain == "rack-3"


class FakeNvml:
    """What a driver says of a GPU's fabric, as NVML's functions say it."""

    def __init__(self, *, state: int = 3, cluster: int = 7, fails: bool = False) -> None:
        self._about = (state, cluster, fails)
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802 - NVML's name
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802 - NVML's name
        assert uuid == b"GPU-1"
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, device: Any, info: Any) -> int:  # noqa: N802 - NVML's name
        state, cluster, fails = self._about
        found = ctypes.cast(info, ctypes.POINTER(room._FabricInfo)).contents
        found.state, found.clique, found.cluster[15] = state, 2, cluster
        return int(fails)


@pytest.mark.parametrize(
    ("library", "found"),
    [
        pytest.param(FakeNvml(), f"nvlink {'00' * 15}07/2", id="in a fabric"),
        pytest.param(FakeNvml(state=2), "", id="not yet"),
        pytest.param(FakeNvml(cluster=0), "", id="of one host"),
        pytest.param(FakeNvml(fails=True), "", id="not supported"),
        pytest.param(object(), "", id="an old driver"),
    ],
)
def test_an_nvlink_fabric_is_named_by_cluster_and_clique(library: Any, found: str) -> None:
    assert room._asked(library, b"GPU-1") == found
    assert getattr(library, "open", 0) == 0


def test_places_are_part_of_the_world_s_bytes() -> None:
    placed = evolve(world(), places=(Location(0, "x"), Location(1, "x", "rack"), Location(2, "y")))
    assert decode_world(encode_world(placed)).places == placed.places
    assert encode_world(placed) == encode_world(evolve(placed, places=placed.places[::-1]))
    assert encode_world(placed) != encode_world(evolve(placed, places=placed.places[:2]))
    with pytest.raises(RendezvousError):
        decode_world(encode_world(evolve(placed, places=(Location(0, "x" * 2000),))))
