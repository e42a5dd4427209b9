"""What ranks do in tests: build a model, describe it, hold what was described against the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import tiny
from attrs import frozen
from refit_adapters.megatron import MegatronAdapter, MegatronModel

from refit_sdk.testing import torch_fill


@frozen
class Described:
    """What a rank described: places, as (name, start, stop), and names whose values aren't the judge's."""

    places: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    wrong: tuple[str, ...]


def judged(fragments: Any, checkpoint: tiny.Checkpoint, *, version: int = 1) -> Described:
    """Fragments against a checkpoint: names, shapes, bits."""
    wrong = []
    for each in fragments:
        shape, dtype = checkpoint.tensors.get(each.name, ((), ""))
        right = shape == each.shape and dtype == torch_fill.dtype_name(each.view)
        bits = checkpoint.bits(each.name, each.box.start, each.box.stop, version=version) if right else None
        if bits is None or tiny.differing(torch_fill.read(each.view), bits):
            wrong.append(each.name)
    return Described(tuple((f.name, f.box.start, f.box.stop) for f in fragments), tuple(wrong))


def describe(rank: int, checkpoint: tiny.Checkpoint, layout: build.Layout) -> Described:
    """Build, describe, compare with the other ranks, judge."""
    import torch

    dtype = getattr(torch, checkpoint.tensors["lm_head.weight"][1]) if "lm_head.weight" in checkpoint.tensors else None
    built = build.build(checkpoint.path, layout, dtype=dtype or torch.float32)
    adapter = MegatronAdapter(
        MegatronModel(built.chunks, checkpoint.path, check_replicas=True), rank=rank, size=layout.world
    )
    fragments = adapter.describe()
    adapter.prepare()
    return judged(fragments, checkpoint)


def in_ddp(built: build.Built, **settings: Any) -> list[Any]:
    """The chunks in Megatron's DDP, with the distributed optimizer's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, **settings
    )
    return [DistributedDataParallel(chunk.config, config, chunk, pg_collection=built.groups) for chunk in built.chunks]


def _buffers(wrapped: list[Any]) -> list[Any]:
    groups = [group for ddp in wrapped for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)]
    return [(group, bucket.param_data) for group in groups for bucket in group.buckets]


def make_stale(built: build.Built, wrapped: list[Any], newer: Path) -> None:
    """What an optimizer step leaves: the new version in this rank's own shard of each buffer, the old in the rest."""
    old = [data.clone() for _, data in _buffers(wrapped)]
    built.load(newer)
    for (group, data), before in zip(_buffers(wrapped), old, strict=True):
        rank, size = group.intra_distributed_optimizer_instance_rank, group.intra_distributed_optimizer_instance_size
        each = data.numel() // size
        mine = data[rank * each : (rank + 1) * each].clone()
        data.copy_(before)
        data[rank * each : (rank + 1) * each] = mine
        group.param_gather_dispatched = False


def put_off(rank: int, checkpoint: tiny.Checkpoint, newer: Path, layout: build.Layout) -> dict[str, Any]:
    """A put-off gather: what was described is old before `prepare`, and new after it."""
    built = build.build(checkpoint.path, layout)
    wrapped = in_ddp(built)
    adapter = MegatronAdapter(MegatronModel(wrapped, checkpoint.path), rank=rank, size=layout.world)
    fragments = adapter.describe()
    identity = adapter.identity()
    make_stale(built, wrapped, newer)
    before = len(judged(fragments, checkpoint, version=2).wrong)
    adapter.prepare()
    after = judged(fragments, checkpoint, version=2)
    return {"before": before, "after": after.wrong, "same": adapter.identity() == identity}


def raised(act: Any) -> str:
    """What it raises of ours, as text; nothing if it doesn't."""
    from refit_sdk.errors import RefitError

    try:
        act()
    except RefitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drifting(rank: int, checkpoint: tiny.Checkpoint, layout: build.Layout, where: dict[int, str]) -> str:
    """One element of a parameter of some ranks is changed; what the check of copies says."""
    import torch

    built = build.build(checkpoint.path, layout)
    model = MegatronModel(built.chunks, checkpoint.path, check_replicas=True)
    adapter = MegatronAdapter(model, rank=rank, size=layout.world)
    adapter.describe()
    if rank in where:
        with torch.no_grad():
            dict(built.chunks[0].named_parameters())[where[rank]].view(-1)[0] = 0.5
    return raised(adapter.prepare)


def unusual(rank: int, checkpoint: tiny.Checkpoint, layout: build.Layout, name: str) -> str:
    """A bad input by name, on real chunks; what is said of it."""
    built = build.build(checkpoint.path, layout)
    chunks, config = BAD[name](built, dict(checkpoint.config), rank)
    number = 0 if name == "two ranks of one number" else rank

    def whole_way() -> None:
        adapter = MegatronAdapter(MegatronModel(chunks, config), rank=number, size=layout.world)
        adapter.describe()
        adapter.prepare()

    return raised(whole_way)


def _extra_parameter(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    import torch

    for layer in built.chunks[0].decoder.layers:
        layer.self_attention.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    built.chunks[0].decoder.layers[0].self_attention.register_parameter("scale", torch.nn.Parameter(torch.zeros(4)))
    return built.chunks, config


def _lost_parameter(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    """Megatron's MLP describes its modules, not parameters of its own."""
    import torch

    built.chunks[0].decoder.layers[0].mlp.register_parameter("scale", torch.nn.Parameter(torch.zeros(4)))
    return built.chunks, config


def _shrunk(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    """The last pipeline stage's model is left out: its rank has the first stage's chunk, of a world of its own."""
    return built.chunks[:1], config


def _without_its_layer(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    if rank == 1:
        del built.chunks[0].decoder.layers[0]
    return built.chunks, config


def _with_anothers_number(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    """The last stage says that its first layer is the first stage's first."""
    if rank == 1:
        built.chunks[0].decoder.layers[0].layer_number = 1
    return built.chunks, config


def _out_of_ddp(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    return [ddp.module for ddp in in_ddp(built)], config


def _quantised(built: build.Built, config: dict[str, Any], rank: int) -> Any:
    """`sharded_state_dict` hands out a copy of one parameter."""
    from dataclasses import replace

    chunk = built.chunks[0]
    real = type(chunk).sharded_state_dict

    def copying(*args: Any, **kwargs: Any) -> Any:
        state = real(chunk, *args, **kwargs)
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        state[name] = replace(state[name], data=state[name].data.clone())
        return state

    chunk.sharded_state_dict = copying
    return built.chunks, config


BAD: dict[str, Any] = {
    "one chunk of two": _shrunk,
    "a chunk twice": lambda built, config, rank: (built.chunks[:1] * 2, config),
    "an unmapped parameter": _extra_parameter,
    "a parameter without an entry": _lost_parameter,
    "another vocabulary": lambda built, config, rank: (built.chunks, {**config, "vocab_size": 4096}),
    "no vocabulary": lambda built, config, rank: (
        built.chunks, {name: value for name, value in config.items() if name != "vocab_size"}
    ),
    "other heads": lambda built, config, rank: (built.chunks, {**config, "num_key_value_heads": 4}),
    "other width of the mlp": lambda built, config, rank: (built.chunks, {**config, "intermediate_size": 96}),
    "tied, says the config": lambda built, config, rank: (built.chunks, {**config, "tie_word_embeddings": True}),
    "an unknown model": lambda built, config, rank: (built.chunks, {**config, "model_type": "quux"}),
    "no config": lambda built, config, rank: (built.chunks, None),
    "a layer nobody has": _without_its_layer,
    "a layer two have": _with_anothers_number,
    "two ranks of one number": lambda built, config, rank: (built.chunks, config),
    "out of ddp": _out_of_ddp,
    "a copy": _quantised,
}  # fmt: skip
"""By name: chunks and config as a user might give them."""


def push(rank: int, told: dict[str, Any]) -> dict[str, Any]:
    """A Megatron rank that pushes two versions; how many names were made after the first push."""
    from refit_adapters import _megatron_entries

    from refit_sdk.session import RefitSession

    layout = told["layout"]
    built = build.build(told["checkpoint"].path, layout)
    chunks = in_ddp(built) if told.get("ddp") else built.chunks
    chunks[0].hf_config = str(told["checkpoint"].path)
    reads = []
    real = _megatron_entries._entries
    _megatron_entries._entries = lambda *args: (reads.append(args[0]), real(*args))[1]
    with RefitSession.source(
        chunks, rendezvous=told["where"], rank=rank, size=layout.world, engines=told["engines"], fabric=told["fabric"],
        deadline=60,
    ) as session:  # fmt: skip
        first = session.push(version=1)
        before = len(reads)
        built.load(told["newer"])
        second = session.push(version=2)
        return {
            "sent": [first.bytes_sent, second.bytes_sent],
            "reads": [before, len(reads)],
            "links": sorted(set(session.links.values())),
        }


def receive(process: int, told: dict[str, Any], rank: int, size: int) -> list[list[str]]:
    """A rank of a fused engine: its faults after each of two pushes."""
    from engine import Engine

    from refit_sdk.session import RefitSession

    held = Engine(told["checkpoint"], rank=rank, size=size)
    found = []
    with RefitSession.target(
        held, rendezvous=told["where"], engine="fused", rank=rank, size=size, fabric=told["fabric"], deadline=60
    ) as session:
        for version in (1, 2):
            report = session.receive()
            assert report.version == version
            found.append(held.faults(version=version))
    return found


def export(process: int, told: dict[str, Any], folder: Path) -> list[list[str]]:
    """A directory that is written by each push: tensors that aren't the judge's, read back by safetensors."""
    from safetensors import safe_open

    from refit_sdk.exporting import Export, Wanted
    from refit_sdk.session import RefitSession

    checkpoint = told["checkpoint"]
    wanted = {name: Wanted(shape, dtype) for name, (shape, dtype) in checkpoint.tensors.items()}
    found = []
    with RefitSession.target(
        Export(directory=folder, tensors=wanted), rendezvous=told["where"], engine="files", rank=0, size=1,
        fabric=told["fabric"], deadline=60,
    ) as session:  # fmt: skip
        for version in (1, 2):
            session.receive()
            wrong = []
            for path in folder.glob("*.safetensors"):
                with safe_open(path, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        bits = checkpoint.bits(name, version=version)
                        wrong += [name] if tiny.differing(torch_fill.read(opened.get_tensor(name)), bits) else []
            found.append(wrong)
    return found


def nbytes(checkpoint: tiny.Checkpoint) -> list[int]:
    """Bytes of each tensor."""
    import math

    return [math.prod(shape) * {"float32": 4, "bfloat16": 2}[dtype] for shape, dtype in checkpoint.tensors.values()]


def rebound(rank: int, checkpoint: tiny.Checkpoint, newer: Path, layout: build.Layout) -> dict[str, Any]:
    """Every parameter gets new storage, with the next version in it: what identity and a second description say."""
    built = build.build(checkpoint.path, layout)
    adapter = MegatronAdapter(MegatronModel(built.chunks, checkpoint.path), rank=rank, size=layout.world)
    adapter.describe()
    before = adapter.identity()
    same = adapter.identity() == before
    for chunk in built.chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.clone()
    changed = adapter.identity() != before
    built.load(newer)
    return {"same": same, "changed": changed, "wrong": judged(adapter.describe(), checkpoint, version=2).wrong}


def groups(rank: int, layout: build.Layout) -> bool:
    """Whether a chunk without groups of its own has the job's."""
    from types import SimpleNamespace

    from refit_adapters._megatron_chunks import Chunk

    bare = Chunk(SimpleNamespace(pg_collection=None), config=None)
    before = bare.groups
    own, found = build.start_groups(layout), bare.groups
    return before is None and all(getattr(own, axis) is getattr(found, axis) for axis in ("tp", "pp", "dp_cp"))


def push_drifted(rank: int, told: dict[str, Any]) -> str:
    """A rank of which one copy has drifted: what its push raises."""
    import torch

    from refit_sdk.session import RefitSession

    layout = told["layout"]
    built = build.build(told["checkpoint"].path, layout)
    model = MegatronModel(built.chunks, told["checkpoint"].path, check_replicas=True)
    with RefitSession.source(
        model, rendezvous=told["where"], rank=rank, size=layout.world, engines=["fused"], deadline=60
    ) as session:
        if rank == 1:
            with torch.no_grad():
                built.chunks[0].decoder.final_layernorm.weight[3] = 0.5  # adding 1 may change nothing
        return raised(lambda: session.push(version=1))


def receive_nothing(process: int, told: dict[str, Any], rank: int, size: int) -> tuple[str, list[str]]:
    """A rank of a fused engine that is to get nothing: what it hears, and storages that aren't as they were."""
    from engine import Engine

    from refit_sdk.session import RefitSession

    held = Engine(told["checkpoint"], rank=rank, size=size)
    before = {name: torch_fill.read(storage) for name, storage in held.storages.items()}
    with RefitSession.target(
        held, rendezvous=told["where"], engine="fused", rank=rank, size=size, deadline=60
    ) as session:
        said = raised(session.receive)
    return said, [name for name, bits in before.items() if tiny.differing(torch_fill.read(held.storages[name]), bits)]
