"""A generating rank of the demo: the decoder tensor-parallel in bfloat16; a receive and a comparison for each version.

Parameters are poisoned with NaN before the first push, so a push that does nothing can't pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from refit_sdk.demo import oracle
from refit_sdk.demo.job import ENGINE, Job
from refit_sdk.demo.model import Decoder, make_decoder
from refit_sdk.demo.rows import Checked
from refit_sdk.demo.train import prompt_logits, torch_group
from refit_sdk.session import RefitSession


def tensor_parallel_plan(num_layers: int) -> dict[str, ParallelStyle]:
    """Which module is cut how: heads and MLP columns by rank, the vocabulary by rows; norms stay whole everywhere."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(num_layers):
        path = f"model.layers.{layer}"
        plan |= {f"{path}.self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= {f"{path}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{path}.self_attn.o_proj": RowwiseParallel(), f"{path}.mlp.down_proj": RowwiseParallel()}
    return plan


def make_target(job: Job, mesh: DeviceMesh) -> Decoder:
    """The tensor-parallel decoder, full of NaN."""
    decoder = make_decoder(job.config, dtype=oracle.DTYPE)
    parallelize_module(decoder, mesh, tensor_parallel_plan(job.config.num_layers))
    decoder.to_empty(device="cpu")
    decoder.tie()
    for parameter in decoder.parameters():
        oracle.local_of(parameter).fill_(torch.nan)
    return decoder.requires_grad_(False)


def check(decoder: Decoder, job: Job, *, version: int) -> Checked:
    """Compare what this rank holds, and what it computes, with the version's truth."""
    verdict = oracle.judge(decoder, directory=job.directory, version=version)
    error = oracle.logits_error(prompt_logits(decoder, job), directory=job.directory, version=version)
    return Checked(version, verdict.elements, verdict.wrong, verdict.changed, verdict.first_wrong, error)


def target_main(job: Job, rank: int, say: Callable[[object], None]) -> None:
    """All of one generating process."""
    say("joining the rollouts")
    with torch_group(job, side="target", rank=rank, size=job.targets):
        decoder = make_target(job, init_device_mesh("cpu", (job.targets,), mesh_dim_names=("tp",)))
        say(f"joining the refit at {job.rendezvous}")
        with RefitSession.target(
            decoder, rendezvous=job.rendezvous, engine=ENGINE, rank=rank, size=job.targets, deadline=job.timeout
        ) as session:
            for version in range(1, job.pushes + 1):
                say(f"receiving version {version}")
                report = session.receive()
                say(f"checking version {report.version}")
                say(check(decoder, job, version=version))
