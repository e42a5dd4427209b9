"""A trainer rank of the demo: FSDP2 around the decoder, an optimizer step, a push; again for each version.

1. The model is made on the meta device, sharded, and filled parameter by parameter: from the checkpoint, or by a
   generator seeded with the parameter's name, so that every number of ranks starts from the same model.
2. Each step learns a seeded permutation of the vocabulary on random tokens; every rank has its own batch.
3. What the targets must then hold is gathered and written by `oracle`, before the push.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from refit_sdk.checkpoint import CheckpointError
from refit_sdk.demo import oracle
from refit_sdk.demo.checkpoint import EMBEDDING, HEAD, Checkpoint
from refit_sdk.demo.job import Job, use_loopback
from refit_sdk.demo.model import Decoder, make_decoder
from refit_sdk.demo.rows import Pushed
from refit_sdk.report import PushReport
from refit_sdk.session import RefitSession

LEARNING_RATE = 3e-3
BATCH = 2


@contextmanager
def torch_group(job: Job, *, side: str, rank: int, size: int) -> Iterator[None]:
    """This side's own default process group, as a trainer or an engine has one; refit_sdk never touches it."""
    use_loopback()
    torch.set_num_threads(1)
    store = dist.FileStore(str(job.directory / f"{side}.store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=job.timeout))
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_decoder(decoder: Decoder, mesh: DeviceMesh, *, mixed_precision: bool) -> None:
    """FSDP2, one group a layer and one for the rest; masters stay float32."""
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = lower if mixed_precision else MixedPrecisionPolicy()
    for layer in decoder.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)


def fill(decoder: nn.Module, value_of: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Give every parameter its share of `value_of(name, whole shape)`. No communication."""
    for name, parameter in decoder.named_parameters():
        whole = value_of(name, tuple(parameter.shape)).float()
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                share = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(share)
            else:
                parameter.copy_(whole)


def seeded_values(seed: int) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Initial values that depend on the seed and the parameter's name only: ones for norms, normal for the rest."""

    def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    return value_of


def stored_values(checkpoint: Checkpoint) -> Callable[[str, tuple[int, ...]], Tensor]:
    """The checkpoint's own values. `CheckpointError` if it says its head is tied and stores another one."""
    doubled = checkpoint.config.tied and HEAD in checkpoint.tensors
    if doubled and not torch.equal(_stored(checkpoint, HEAD).float(), _stored(checkpoint, EMBEDDING).float()):
        problem = f"the config ties {HEAD} to {EMBEDDING}, but their stored values differ"
        raise CheckpointError(checkpoint.directory, [problem])
    return lambda name, shape: _stored(checkpoint, name)


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    with safe_open(checkpoint.file_of(name), framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def make_source(job: Job, mesh: DeviceMesh) -> Decoder:
    """The sharded decoder, with its first values."""
    decoder = make_decoder(job.config)
    shard_decoder(decoder, mesh, mixed_precision=job.mixed_precision)
    decoder.to_empty(device="cpu")
    decoder.tie()
    fill(decoder, stored_values(job.checkpoint) if job.checkpoint else seeded_values(job.seed))
    return decoder


def random_tokens(job: Job, *, batch: int, stream: str) -> Tensor:
    """(batch, num_tokens) of token numbers that depend on the seed and the stream's name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{job.seed}:{stream}".encode()))
    return torch.randint(job.config.vocab_size, (batch, job.num_tokens), generator=generator)


def train_step(decoder: Decoder, optimizer: torch.optim.Optimizer, job: Job, *, rank: int, version: int) -> float:
    """One step; the mean loss over all ranks."""
    tokens = random_tokens(job, batch=BATCH, stream=f"batch {version} of rank {rank}")
    order = torch.randperm(job.config.vocab_size, generator=torch.Generator().manual_seed(job.seed))
    loss = F.cross_entropy(decoder(tokens).flatten(0, 1).float(), order[tokens].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


@torch.no_grad()
def prompt_logits(decoder: Decoder, job: Job) -> Tensor:
    """Logits on the prompt that both sides know."""
    logits: Tensor = decoder(random_tokens(job, batch=1, stream="prompt"))
    return logits


def write_truth(decoder: Decoder, job: Job, *, rank: int, version: int) -> None:
    """Write what the targets must hold after this version's push."""
    logits = prompt_logits(decoder, job)
    assert isinstance(decoder, FSDPModule)
    decoder.reshard()
    tensors = oracle.gather_expectation(decoder, keep=rank == 0)
    if rank == 0:
        oracle.write_expectation(tensors, logits, directory=job.directory, version=version)


def source_main(job: Job, rank: int, say: Callable[[object], None]) -> None:
    """All of one trainer process."""
    say("joining the trainers")
    with torch_group(job, side="source", rank=rank, size=job.sources):
        mesh = init_device_mesh("cpu", (job.sources,), mesh_dim_names=("fsdp",))
        decoder = make_source(job, mesh)
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=LEARNING_RATE)
        say(f"joining the refit at {job.rendezvous}")
        with RefitSession.source(
            decoder, rendezvous=job.rendezvous, rank=rank, size=job.sources, deadline=job.timeout
        ) as session:
            for version in range(1, job.pushes + 1):
                say(f"training version {version}")
                loss = train_step(decoder, optimizer, job, rank=rank, version=version)
                write_truth(decoder, job, rank=rank, version=version)
                say(f"pushing version {version}")
                pushed = _push(session, job, version=version, loss=loss)
                if rank == 0:
                    say(pushed)
                    # A target that received this version has finished checking the one before it.
                    oracle.expectation_path(job.directory, version - 2).unlink(missing_ok=True)


def _push(session: RefitSession, job: Job, *, version: int, loss: float) -> Pushed:
    start = time.perf_counter()
    report = session.push(version=version)
    seconds = time.perf_counter() - start
    assert isinstance(report, PushReport)
    model_bytes = job.config.num_parameters * oracle.DTYPE.itemsize
    carried = tuple(sorted(set(session.links.values())))
    return Pushed(version, loss, seconds, report.gb_per_s, report.bytes_sent, model_bytes, carried)
