"""One rank's model of any parallel size, built by vLLM itself in this process: no workers, and no other ranks.

vLLM's parallel state stands on torch's "fake" process group, which connects nobody; four places of vLLM that would talk
to other ranks as a model is built are answered here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class EmptyOnMeta(TorchFunctionMode):
    """Weights come from `torch.empty` and take no memory; tables that are computed stay what they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def rank_of(path: Path, *, tp: int, rank: int, ep: bool = False, meta: bool = False) -> Iterator[Any]:
    """The model of one rank, and vLLM's config. While it's open, this process is that rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with _alone(tp, rank):
        config = EngineArgs(
            model=str(path), dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
            tensor_parallel_size=tp, enable_expert_parallel=ep, distributed_executor_backend="mp",
        ).create_engine_config()  # fmt: skip
        config.parallel_config.rank = rank
        try:
            with set_current_vllm_config(config):
                parallel_state.init_distributed_environment(world_size=tp, rank=rank, local_rank=rank, backend="fake")
                parallel_state.initialize_model_parallel(tp, backend="fake")
                with EmptyOnMeta() if meta else contextlib.nullcontext(), set_default_torch_dtype(torch.bfloat16):
                    model = initialize_model(config)
                yield model, config
        finally:
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _alone(world: int, rank: int) -> Iterator[None]:
    """A fake process group, and vLLM not asking anybody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    name = f"{DeviceCommunicatorBase.__module__}.{DeviceCommunicatorBase.__name__}"
    new_group = dist.new_group
    answers = [
        (type(current_platform), "get_device_communicator_cls", classmethod(lambda cls: name)),
        (MessageQueue, "create_from_process_group", staticmethod(lambda *args, **kwargs: None)),
        (parallel_state, "in_the_same_node_as", lambda group, source_rank=0: [True] * world),
        (registry, "_run_in_subprocess", lambda function: function()),
        (dist, "new_group", lambda ranks=None, *a, backend=None, **k: new_group(ranks, *a, backend="fake", **k)),
    ]
    kept = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in answers if attribute in vars(owner)]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        for owner, attribute, answer in answers:
            setattr(owner, attribute, answer)
        yield
    finally:
        for owner, attribute, answer in kept:
            setattr(owner, attribute, answer)
        if dist.is_initialized():
            dist.destroy_process_group()
