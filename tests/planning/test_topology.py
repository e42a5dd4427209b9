"""Topologies: what processes say, what the sources state over it, and files that say what can't be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from planning_support import plan_of, whole, world

from refit_sdk.cluster import Cluster, Speeds, given, write
from refit_sdk.errors import RefitError
from refit_sdk.settings import Settings, settings_of
from refit_sdk.topology import Topology
from refit_sdk.world import Location, World


def said(**of: tuple[str, str]) -> World:
    """Two sources and an engine of two ranks, which say where they are."""
    sides = world([[whole("w", 4)]] * 2, e=[[whole("w", 4)]] * 2)
    places = [Location(int(process[1:]), *where) for process, where in of.items()]
    return evolve(sides, places=tuple(places))


def test_a_domain_is_a_host_unless_more_is_known() -> None:
    topology = Topology.of(said(p0=("x", ""), p1=("x", ""), p2=("y", "rack"), p3=("z", "rack")))
    assert topology.host == ("x", "x", "y", "z")
    assert topology.domain == (0, 0, 1, 1)
    assert topology.nic == (0, 0, 1, 2)


def test_who_says_nothing_is_on_one_host_with_all_who_say_nothing() -> None:
    assert Topology.of(said()).domain == (0, 0, 0, 0)


def test_what_is_stated_wins_over_what_was_found() -> None:
    stated = {
        "hosts": {"y": ["e[0-1]"]},
        "domains": {"all": ["source[*]", "e[1]"], "no": ["e[*]"]},
        "nics": {"eth0": ["source[0]"], "eth1": ["source[1]"]},
        "speeds": {"nic_bytes_per_s": 7},
    }
    topology = Topology.of(said(p0=("x", ""), p1=("x", ""), p2=("x", ""), p3=("x", "")), given(stated))
    assert topology.host == ("x", "x", "y", "y")
    assert topology.domain == (0, 0, 1, 0)
    assert topology.nic == (0, 1, 2, 2)
    assert topology.speeds.nic_bytes_per_s == 7


def test_a_rank_that_comes_back_on_another_host_makes_another_plan_key() -> None:
    """Not another plan: direct sends don't mind."""
    here, there = said(p0=("x", ""), p3=("x", "")), said(p0=("x", ""), p3=("y", ""))
    one, other = (plan_of(sides, topology=Topology.of(sides)) for sides in (here, there))
    assert one.topology != other.topology
    assert one.digest == other.digest


def test_what_is_written_is_read(tmp_path: Path) -> None:
    stated = Cluster(hosts=(("x", ("source[*]",)),), speeds=Speeds(nic_bytes_per_s=5))
    write(stated, tmp_path / "topology.json")
    assert given(tmp_path / "topology.json") == given(str(tmp_path / "topology.json")) == stated
    assert list(tmp_path.iterdir()) == [tmp_path / "topology.json"]


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        pytest.param([], "is []: give an object with any of domains, hosts, nics, speeds", id="no object"),
        pytest.param({"sites": {}}, "has sites: known are domains, hosts, nics, speeds", id="unknown part"),
        pytest.param({"speeds": {"nic": 1}}, "speeds has nic: known are copy_bytes_per_s", id="unknown speed"),
        pytest.param({"speeds": {"nic_latency_ns": 0}}, "nic_latency_ns=0 is out of range", id="no speed"),
        pytest.param({"speeds": {"nic_latency_ns": 1.5}}, "nic_latency_ns=1.5 is not a whole number", id="a float"),
        pytest.param({"hosts": {"x": ["e0"]}}, "hosts: x: 'e0' names no rank", id="no rank"),
        pytest.param({"hosts": {"x": "e[0]"}}, "put it in a list", id="one string"),
        pytest.param({"hosts": {"x": ["e[0]"], "y": ["e[0]"]}}, "e[0] is in x and in y", id="two places"),
        pytest.param({"hosts": {"x": ["e[0-2]"], "y": ["e[1-3]"]}}, "e[0-2] and e[1-3] is in x and in y", id="overlap"),
        pytest.param(
            {"hosts": {"x": ["e[0]"], "y": ["e[00]"]}}, "e[0] and e[00] is in x and in y", id="one number twice"
        ),
        pytest.param({"hosts": {"x": ["e[3-1]"]}}, "the first of a range comes first, e[1-3]", id="backwards"),
        pytest.param({"hosts": {"": ["e[0]"]}}, "'' is no name of a set", id="no name"),
        pytest.param({"hosts": []}, "hosts is []: give an object from names to lists of ranks", id="no sets"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(tmp_path: Path, content: Any, wrong: str) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RefitError, match=re.escape(wrong)):
        Settings(topology=path)


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_text("{")
    for name in ("topology.json", "absent.json"):
        with pytest.raises(RefitError, match=f"{name} can't be read"):
            given(tmp_path / name)
    with pytest.raises(RefitError, match="topology=3 is a int: pass a path, a dict or a Cluster"):
        given(3)


def test_the_environment_names_a_file_where_no_argument_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Cluster(speeds=Speeds(nic_bytes_per_s=5)), tmp_path / "topology.json")
    monkeypatch.setenv("REFIT_TOPOLOGY", str(tmp_path / "topology.json"))
    for stated in (settings_of(None, window_bytes=64), settings_of(Settings(window_bytes=64))):
        assert stated.topology is not None
        assert (stated.topology.speeds.nic_bytes_per_s, stated.window_bytes) == (5, 64)
    assert settings_of(None, topology={}).topology == Cluster()
