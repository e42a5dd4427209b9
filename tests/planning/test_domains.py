"""What transports make of domains and NICs: crossings counted, loads against the least of their class, and `auto`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_support import (
    Where,
    dtypes,
    messages,
    part,
    piece_nbytes,
    plan_of,
    play,
    rows,
    settings,
    storage,
    whole,
    world,
    worlds,
)
from refit_backends.broadcast import Broadcast
from refit_backends.fanout import Fanout

from refit_sdk.box import Box
from refit_sdk.cluster import Speeds
from refit_sdk.dtypes import itemsize, wire_dtype
from refit_sdk.plan import Plan
from refit_sdk.topology import Topology
from refit_sdk.world import Part, World

TRANSPORTS: dict[str, Any] = {"fanout": Fanout(), "broadcast": Broadcast()}


@st.composite
def topologies(draw: st.DrawFn, count: int) -> Topology:
    """Any hosts, domains that needn't be hosts, and NICs."""
    hosts, domains, nics = (draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)) for _ in range(3))
    return Topology([f"h{host}" for host in hosts], domains, nics)


@pytest.mark.parametrize("name", ["reshard", "fanout", "broadcast", "auto"])
def test_every_element_is_written_once_on_any_topology(name: str) -> None:
    @given(worlds(), settings(), st.data())
    def check(sides: World, limits: dict[str, Any], data: st.DataObject) -> None:
        topology = data.draw(topologies(sides.num_processes))
        plan = plan_of(sides, topology=topology, routes=[("*", name)], transports=TRANSPORTS, **limits)
        arrived = play(plan)
        for place, named in storage(sides, "target").items():
            for tensor, where in named.items():
                np.testing.assert_array_equal(arrived[place][tensor], where.astype(int))

    check()


def crossing(plan: Plan) -> Counter[tuple[int, str]]:
    """Bytes that enter each domain from another, by engine, counted from messages."""
    found: Counter[tuple[int, str]] = Counter()
    for process, _, message in messages(plan):
        into = plan.topology.domain[message.peer]
        if plan.topology.domain[process] != into:
            found[into, message.engine] += sum(piece_nbytes(plan.world, piece) for piece in message.pieces)
    return found


def lacking(sides: World, topology: Topology) -> Counter[tuple[int, str]]:
    """Bytes that each domain's ranks of an engine need and no source in it has, each element once; by plain indices."""
    have: dict[int, Where] = {}
    for (process, _), named in storage(sides, "source").items():
        for name, where in named.items():
            mine = have.setdefault(topology.domain[process], {})
            mine[name] = mine.get(name, np.zeros_like(where)) | where
    needed: dict[tuple[int, str], Where] = {}
    for (process, engine), named in storage(sides, "target").items():
        for name, where in named.items():
            mine = needed.setdefault((topology.domain[process], engine), {})
            mine[name] = mine.get(name, np.zeros_like(where)) | where
    source, target = dtypes(sides, "source"), dtypes(sides, "target")
    return Counter(
        {
            (domain, engine): sum(
                int((where & ~have.get(domain, {}).get(name, np.zeros_like(where))).sum())
                * itemsize(wire_dtype(source[name], target[name]))
                for name, where in named.items()
            )
            for (domain, engine), named in needed.items()
        }
    )


@given(worlds(), settings(), st.data())
def test_fanout_crosses_into_a_domain_what_it_lacks_and_once(
    sides: World, limits: dict[str, Any], data: st.DataObject
) -> None:
    drawn = data.draw(topologies(sides.num_processes))
    one_nic = Topology(["x"] * sides.num_processes, drawn.domain)
    plan = plan_of(sides, topology=one_nic, routes=[("*", "fanout")], transports=TRANSPORTS, **limits)
    assert +crossing(plan) == +lacking(sides, one_nic)
    assert plan.totals().load.crossing == sum(lacking(sides, one_nic).values())


LAYERS, EXPERTS, HIDDEN, INNER = 48, 128, 2048, 768
DENSE = {
    "model.layers.{}.self_attn.q_proj.weight": ((4096, HIDDEN), 0),
    "model.layers.{}.self_attn.k_proj.weight": ((512, HIDDEN), 0),
    "model.layers.{}.self_attn.v_proj.weight": ((512, HIDDEN), 0),
    "model.layers.{}.self_attn.o_proj.weight": ((HIDDEN, 4096), 1),
    "model.layers.{}.mlp.gate.weight": ((EXPERTS, HIDDEN), None),
    "model.layers.{}.input_layernorm.weight": ((HIDDEN,), None),
    "model.embed_tokens.weight": ((151936, HIDDEN), 0),
    "lm_head.weight": ((151936, HIDDEN), 0),
}
"""Of Qwen3-30B-A3B: shapes, and the dim that tensor parallelism cuts."""
MIXTURE = {"gate_proj": ((INNER, HIDDEN), 0), "up_proj": ((INNER, HIDDEN), 0), "down_proj": ((HIDDEN, INNER), 1)}


def stack(name: str, shape: tuple[int, ...], dim: int | None, rank: int, size: int, members: Box) -> Part:
    inner = Box.whole(shape)
    if dim is not None:
        step = shape[dim] // size
        inner = inner.narrow(dim, rank * step, (rank + 1) * step)
    return part(name, shape, members.concat(inner))


def rank_of(tp: int, size: int, experts: tuple[int, int] | None) -> list[Part]:
    """A rank of a tensor-parallel group; it has all of these experts, or its part of all."""
    found = []
    for name, (shape, dim) in DENSE.items():
        layers = Box((0,), (LAYERS,)) if "{}" in name else Box((), ())
        found.append(stack(name, shape, dim, tp, size, layers))
    for kind, (shape, dim) in MIXTURE.items():
        a, b = experts or (0, EXPERTS)
        name = f"model.layers.{{}}.mlp.experts.{{}}.{kind}.weight"
        found.append(stack(name, shape, None if experts else dim, tp, size, Box((0, a), (LAYERS, b))))
    return found


@pytest.mark.parametrize("name", ["reshard", "fanout"])
def test_few_trainers_and_many_engines_are_within_3_percent_of_the_least_of_their_class(name: str) -> None:
    """16 sources (TP2 EP4 DP8) on two hosts, eight engines of TP8 on a host each, a NIC a rank."""
    quarter = EXPERTS // 4
    sources = [rank_of(r % 2, 2, ((r // 2) % 4 * quarter, ((r // 2) % 4 + 1) * quarter)) for r in range(16)]
    engines = {f"e{i}": [rank_of(t, 8, None) for t in range(8)] for i in range(8)}
    hosts = [f"h{process // 8}" for process in range(80)]
    topology = Topology(hosts, [process // 8 for process in range(80)], range(80))
    totals = plan_of(world(sources, **engines), topology=topology, routes=[("*", name)], transports=TRANSPORTS).totals()
    assert totals.nic_bounds.egress <= totals.load.nic_out <= 1.03 * totals.nic_bounds.egress
    assert totals.nic_bounds.ingress <= totals.load.nic_in <= 1.03 * totals.nic_bounds.ingress


def replicated() -> World:
    """Two sources with a half each, an engine of four ranks that all want everything."""
    halves = [[part("l.{}.w", (512, 64), Box((0, 256 * r, 0), (4, 256 * r + 256, 64)))] for r in range(2)]
    norm = whole("l.{}.norm", 64, layers=(0, 4))
    return world([[*half, norm] for half in halves], e=[[whole("l.{}.w", 512, 64, layers=(0, 4)), norm]] * 4)


HOSTS = ["x", "x", "y", "y", "z", "z"]


def on(nic_bytes_per_s: int) -> Topology:
    return Topology(HOSTS, [0, 0, 1, 1, 2, 2], speeds=Speeds(nic_bytes_per_s=nic_bytes_per_s, nic_latency_ns=10_000))


def test_the_plan_says_what_each_rule_takes_and_what_nics_must() -> None:
    routes = [("*norm", "broadcast"), ("*", "fanout")]
    plan = plan_of(replicated(), topology=on(125_000_000), routes=routes, transports=TRANSPORTS)
    norm, dense = plan.rules()
    assert (norm.transport, norm.tensors, norm.rounds) == ("broadcast", 4, 3)
    assert (dense.transport, dense.tensors, dense.rounds, dense.links) == ("fanout", 4, 2, (4, 4))
    assert norm.share + dense.share == pytest.approx(1)
    wide = 4 * 512 * 64 * 2
    assert dense.nbytes == 4 * wide
    assert dense.nanoseconds == 2 * wide * 8
    totals = plan.totals()
    assert totals.nic_bounds.ingress == totals.load.nic_in == wide + 4 * 128
    assert totals.predicted_ns > totals.bound_ns
    told = json.loads(plan.to_json())
    assert [rule["transport"] for rule in told["rules"]] == ["broadcast", "fanout"]
    assert "NICs alone take" in str(plan)


def test_auto_takes_what_is_fastest_and_says_why() -> None:
    slow = plan_of(replicated(), topology=on(125_000_000), routes=[("*", "auto")], transports=TRANSPORTS)
    play(slow)
    by = {row.name: (row.transport, row.why) for row in slow.rows()}
    assert by["l.{}.w"][0] == "broadcast"
    assert all(f"{name} " in by["l.{}.w"][1] for name in ("reshard", "fanout", "broadcast"))
    assert by["l.{}.norm"][0] == "reshard"
    alone = plan_of(replicated(), topology=Topology.single(6), routes=[("*", "auto")], transports=TRANSPORTS)
    assert {row.transport for row in alone.rows()} == {"reshard"}
    chosen = plan_of(
        replicated(), topology=on(125_000_000), transports=TRANSPORTS,
        routes=[("*norm", by["l.{}.norm"][0]), ("*", by["l.{}.w"][0])],
    )  # fmt: skip
    assert chosen.totals().predicted_ns == slow.totals().predicted_ns


def test_uneven_needs_are_taken_in_by_ranks_that_do_not_need_them() -> None:
    """Of four ranks of a host with a NIC each, one needs everything: the others take in their share and pass it on."""
    sides = world([[whole("w", 4096, 256)]], e=[[whole("w", 4096, 256)], *([[rows("w", (4096, 256), 0, 8)]] * 3)])
    topology = Topology(["x", *"yyyy"], [0, 1, 1, 1, 1], [0, 1, 2, 3, 4])
    plan = plan_of(sides, topology=topology, routes=[("*", "fanout")], transports=TRANSPORTS)
    play(plan)
    totals = plan.totals()
    assert totals.load.nic_in <= 1.1 * totals.nic_bounds.ingress
    assert totals.nic_bounds.ingress == 4096 * 256 * 2 // 4


def test_windows_of_relays_are_small_and_keep_little() -> None:
    plan = plan_of(
        replicated(), topology=on(125_000_000), routes=[("*", "fanout")], transports=TRANSPORTS, coalesce_bytes=256
    )
    assert plan.num_windows >= 32
    wide = 4 * 512 * 64 * 2
    for process in range(6):
        assert plan.program(process).relays.nbytes <= wide // 4
        assert plan.peak_bytes(process) <= wide // 2
