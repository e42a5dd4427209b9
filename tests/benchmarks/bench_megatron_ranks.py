"""What a rank does in `bench_megatron.py`: both ways of refitting, over the same models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import build
import tiny
import torch
import torch.distributed as dist
from refit_adapters.megatron import MegatronAdapter, MegatronModel
from refit_backends.reshard import Reshard

from refit_sdk.manifest import decode, encode, fold
from refit_sdk.plan import make_plan
from refit_sdk.session import RefitSession
from refit_sdk.settings import Settings
from refit_sdk.testing import torch_fill
from refit_sdk.topology import Topology
from refit_sdk.world import Seat, World

__all__ = ["FABRICS", "MOVERS", "PLANNERS", "compare", "describe"]

FABRICS = ("mixed", "gloo")
MOVERS = ("resharder", *FABRICS)
PLANNERS = ("resharder", "refit_sdk", "described already")


def _service() -> Any:
    """The resharder's door for copying, with one batch of gloo sends and receives and no staging."""
    from megatron.core.resharding.copy_services.base import CopyService, RecvOp, SendOp, match_local_ops_by_task_id

    class Batch(CopyService):
        def __init__(self) -> None:
            super().__init__(None)
            self.out: list[Any] = []
            self.into: list[Any] = []
            self.nbytes = 0

        def submit_send(self, src_tensor: Any, dest_rank: int, task_id: Any = None) -> None:
            self.out.append(SendOp(task_id, src_tensor.detach(), dest_rank))

        def submit_recv(self, dest_tensor: Any, src_rank: int, task_id: Any = None) -> None:
            self.into.append(RecvOp(task_id, dest_tensor, src_rank))

        @torch.no_grad()
        def run(self) -> None:
            near = (
                [op for op in self.out if op.dest_rank == self.rank],
                [op for op in self.into if op.src_rank == self.rank],
            )
            for a, b in match_local_ops_by_task_id(*near, "batch", self.rank):
                b.tensor.copy_(a.tensor)
            out = [op for op in self.out if op.dest_rank != self.rank]
            self.nbytes = sum(op.tensor.nbytes for op in out)
            ops = [dist.P2POp(dist.isend, op.tensor, op.dest_rank) for op in out]
            ops += [dist.P2POp(dist.irecv, op.tensor, op.src_rank) for op in self.into if op.src_rank != self.rank]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
            self.out, self.into = [], []

    return Batch()


def _groups(layout: build.Layout, offset: int) -> Any:
    from megatron.core.inference.shards import build_inference_pg_collection

    return build_inference_pg_collection(
        layout.world, tp_size=layout.tp, pp_size=layout.pp, cp_size=1, ep_size=layout.ep,
        expt_tp_size=layout.etp or layout.tp, rank_offset=offset,
    )  # fmt: skip


class _Held:
    """A target that is a Megatron model: what the adapter describes of it."""

    def __init__(self, fragments: Sequence[Any]) -> None:
        self.fragments = list(fragments)

    def refit_fragments(self) -> list[Any]:
        """All of it."""
        return self.fragments


def compare(
    rank: int, checkpoint: tiny.Checkpoint, source: build.Layout, target: build.Layout, where: list[str], turns: int
) -> dict[str, Any]:
    """All contenders in turns. Seconds are this rank's, between two barriers."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    groups = _groups(source, 0), _groups(target, source.world)
    is_source = rank < source.world
    layout, pgs = (source, groups[0]) if is_source else (target, groups[1])
    chunks = _chunks(checkpoint, layout, pgs)
    number = rank if is_source else rank - source.world
    adapter = MegatronAdapter(MegatronModel(chunks, checkpoint.path), rank=number, size=layout.world)
    fragments = adapter.describe()
    planners = {
        "resharder": lambda: _prepare(chunks, is_source),
        "refit_sdk": lambda: _plan(rank, source, adapter.describe()),
    }
    planners["described already"] = lambda: _plan(rank, source, fragments)
    plan: dict[str, list[float]] = {who: [] for who in PLANNERS}
    for turn in range(turns):
        for who in PLANNERS[turn % 3 :] + PLANNERS[: turn % 3]:
            plan[who].append(_timed(planners[who]))
    if is_source:
        _fill(fragments, checkpoint)
    service, took, wrong = _service(), {who: [] for who in MOVERS}, []
    sessions = [
        _session(chunks, checkpoint, fragments, is_source, layout, number, *at)
        for at in zip(where, FABRICS, strict=True)
    ]
    movers = {"resharder": lambda version: _swap(chunks, is_source, service)}
    for fabric, session in zip(FABRICS, sessions, strict=True):
        movers[fabric] = _pusher(session, is_source)
    for turn in range(turns + 1):
        order = MOVERS[turn % len(MOVERS) :] + MOVERS[: turn % len(MOVERS)]
        for who in order:
            if not is_source:
                _poison(fragments)
            seconds = _timed(lambda who=who, turn=turn: movers[who](turn + 1))
            took[who] += [seconds] if turn else []
            wrong += [] if is_source or turn % 3 else _wrong(fragments, checkpoint, who)
    for session in sessions:
        session.close()
    return {"plan": plan, "refit": took, "wrong": wrong, "mib": service.nbytes / 2**20}


def _chunks(checkpoint: tiny.Checkpoint, layout: build.Layout, groups: Any) -> list[Any]:
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint.path), torch_dtype=torch.bfloat16)
    provider = build.provider_of(bridge, layout, torch.bfloat16)
    provider._pg_collection = groups
    place = groups.pp.rank()
    return [provider.provide(pre_process=place == 0, post_process=place == groups.pp.size() - 1, vp_stage=None)]


def _timed(act: Any) -> float:
    dist.barrier()
    begun = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begun


def _sides(chunks: list[Any], is_source: bool) -> tuple[Any, Any]:
    return (chunks, None) if is_source else (None, chunks)


def _prepare(chunks: list[Any], is_source: bool) -> None:
    from megatron.core.resharding.refit import clear_plan_cache, prepare_swap_model_weights

    clear_plan_cache()
    prepare_swap_model_weights(*_sides(chunks, is_source))


def _swap(chunks: list[Any], is_source: bool, service: Any) -> None:
    from megatron.core.resharding.refit import swap_model_weights

    swap_model_weights(*_sides(chunks, is_source), service)


def _plan(rank: int, source: build.Layout, fragments: Sequence[Any]) -> None:
    """Exchange manifests, plan, and derive this rank's program."""
    mine = encode(fold(fragments))
    bodies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(bodies, mine)
    seats = [
        Seat("source", "", n, n) if n < source.world else Seat("target", "e", n - source.world, n)
        for n in range(len(bodies))
    ]
    world = World(0, tuple(seats), tuple(decode(body) for body in bodies), tuple(range(len(bodies))))
    made = make_plan(
        world, settings=Settings(), transports={"reshard": Reshard()}, topology=Topology.single(len(bodies))
    )
    made.program(rank)


def _session(
    chunks: list[Any], checkpoint: tiny.Checkpoint, fragments: Any, is_source: bool, layout: build.Layout, number: int,
    where: str, fabric: str,
) -> RefitSession:  # fmt: skip
    place = {"rendezvous": where, "rank": number, "size": layout.world, "fabric": fabric, "deadline": 60}
    if is_source:
        return RefitSession.source(MegatronModel(chunks, checkpoint.path), **place)
    return RefitSession.target(_Held(fragments), engine="e", **place)


def _pusher(session: RefitSession, is_source: bool) -> Any:
    return (lambda version: session.push(version=version)) if is_source else (lambda version: session.receive())


def _fill(fragments: Any, checkpoint: tiny.Checkpoint) -> None:
    for each in fragments:
        torch_fill.fill(each.view, checkpoint.bits(each.name, each.box.start, each.box.stop))


def _poison(fragments: Any) -> None:
    for each in fragments:
        each.view.fill_(float("nan"))


def _wrong(fragments: Any, checkpoint: tiny.Checkpoint, who: str) -> list[str]:
    return [
        f"{who}: {each.name}"
        for each in fragments
        if tiny.differing(torch_fill.read(each.view), checkpoint.bits(each.name, each.box.start, each.box.stop))
    ]


def describe(rank: int, checkpoint: tiny.Checkpoint, turns: int) -> dict[str, float]:
    """How long one rank takes to describe itself."""
    from refit_adapters import _megatron_entries

    built = _chunks(checkpoint, build.Layout(), build.start_groups(build.Layout()))
    adapter = MegatronAdapter(MegatronModel(built, checkpoint.path), rank=0, size=1)
    (chunk,) = adapter._chunks
    entries = len(_megatron_entries.entries_of(chunk))
    seconds = statistics.median(_timed(adapter.describe) for _ in range(turns))
    return {
        "entries": entries,
        "seconds": seconds,
        "look": statistics.median(_timed(adapter.identity) for _ in range(turns)),
    }
