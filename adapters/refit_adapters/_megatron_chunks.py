"""What a Megatron model is made of: its chunks, without their wrappers, each with its config.

1. A model is a module or a sequence of modules, one a virtual pipeline stage. `DistributedDataParallel` and
   `Float16Module` are walked through; wrappers that keep shards of their own are refused.
2. All virtual stages must be there, each once.
3. What the config says decides what is refused: settings under which a tensor is laid out as nothing tells.

Megatron is never imported: its classes are known by their modules' names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from attrs import field, frozen

from refit_adapters._walk import WRAPPER_KEYS, tops
from refit_sdk.errors import LayoutError

_FSDP: Final = "it holds flat buffers that Megatron-FSDP cuts as it likes, and no entry says where a parameter lies"
_FORBIDDEN: Final = {
    "megatron.core.distributed.fsdp.": _FSDP,
    "megatron.core.distributed.torch_fully_sharded": "Megatron cuts and names under it in two ways at once",
}
"""Where the classes of refused wrappers come from, and why."""


@frozen(eq=False)
class Chunk:
    """A model chunk: the innermost module, the DDP wrapper around it if there is one, and Megatron's config."""

    module: Any
    ddp: Any = None
    config: Any = field(kw_only=True)

    @property
    def groups(self) -> Any:
        """Megatron's process groups: the chunk's own, or the job's where it has none; None before there are any."""
        own = getattr(self.module, "pg_collection", None)
        return own if own is not None else _groups_of_the_job()


def _groups_of_the_job() -> Any:
    job = sys.modules.get("megatron.core.parallel_state")
    if job is None or not job.model_parallel_is_initialized():
        return None
    return SimpleNamespace(
        tp=job.get_tensor_model_parallel_group(),
        pp=job.get_pipeline_model_parallel_group(),
        dp_cp=job.get_data_parallel_group(with_context_parallel=True),
    )


def is_megatron(model: Any) -> bool:
    """Whether every module that the model is has a class of Megatron's and describes its shards.

    >>> is_megatron(torch.nn.Linear(1, 1))
    False
    """
    modules = tops(model)
    return modules is not None and all(_is_chunk(_inner(module)[-1]) for module in modules)


def _is_chunk(module: Any) -> bool:
    ours = any(cls.__module__.startswith("megatron.") for cls in type(module).__mro__)
    return ours and callable(getattr(module, "sharded_state_dict", None))


def _inner(module: Any) -> list[Any]:
    """The module, what it wraps, and so on; the model itself comes last."""
    found = [module]
    while (child := _wrapped(found[-1])) is not None:
        found.append(child)
    return found


def _wrapped(module: Any) -> Any:
    children = module._modules
    bare = len(children) == 1 and not module._parameters and not module._buffers
    keys = WRAPPER_KEYS | {"module"} if bare else WRAPPER_KEYS
    return next((children[key] for key in keys if key in children), None)


def chunks_of(model: Any) -> tuple[Chunk, ...]:
    """The chunks of a model. `LayoutError` for wrappers and settings that are refused, and for stages that are missing
    or given twice."""
    modules = tops(model) or ()
    found = tuple(_chunk(module) for module in modules)
    if not found:
        raise LayoutError("the model has no chunk; pass the model, or the list of its virtual pipeline stages")
    _check_stages(found)
    reasons = sorted({reason for chunk in found for reason in refusals(chunk.config)})
    if reasons:
        raise LayoutError("this Megatron model can't be described:\n  " + "\n  ".join(reasons))
    return found


def _chunk(module: Any) -> Chunk:
    ddp = None
    wrappers = _inner(module)
    for wrapper in wrappers:
        origin = f"{type(wrapper).__module__}.{type(wrapper).__name__}"
        for start, reason in _FORBIDDEN.items():
            if origin.startswith(start):
                raise LayoutError(f"{type(wrapper).__name__} is refused: {reason}; train with DistributedDataParallel")
        if hasattr(wrapper, "bucket_groups"):
            ddp = wrapper
    chunk = Chunk(wrappers[-1], ddp, config=getattr(wrappers[-1], "config", None))
    if not _is_chunk(chunk.module) or chunk.config is None:
        raise LayoutError(f"a {type(chunk.module).__name__} isn't a Megatron model: it has no config and no entries")
    if ddp is None:
        _refuse_hidden_ddp(chunk.module)
    return chunk


def _refuse_hidden_ddp(module: Any) -> None:
    """A chunk taken out of a DDP that overlaps its parameter all-gather: what completes that is the wrapper."""
    for hook in module._forward_pre_hooks.values():
        if "DistributedDataParallel" in getattr(hook, "__qualname__", ""):
            raise LayoutError(
                "this chunk was taken out of a DistributedDataParallel that overlaps its parameter all-gather, so "
                "after an optimizer step its values are old until the gather runs; pass the wrapped chunk"
            )


def _check_stages(chunks: Sequence[Chunk]) -> None:
    if len({id(chunk.module) for chunk in chunks}) < len(chunks):
        raise LayoutError(f"a chunk is given twice among {len(chunks)}; pass each virtual pipeline stage once")
    wanted = getattr(chunks[0].config, "virtual_pipeline_model_parallel_size", None) or 1
    stages = [getattr(chunk.module, "vp_stage", None) for chunk in chunks]
    if len(chunks) != wanted:
        raise LayoutError(
            f"{len(chunks)} chunks were given, and Megatron's config says virtual_pipeline_model_parallel_size="
            f"{wanted}; pass the whole list of the rank's model chunks"
        )
    if wanted > 1 and None not in stages and set(stages) != set(range(wanted)):
        raise LayoutError(
            f"the chunks are virtual stages {stages}, not 0 to {wanted - 1}; pass each of the rank's stages once"
        )


def _over_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0)


Rule = tuple[Callable[[Any], bool], str]
REFUSED: Final[Mapping[str, Rule]] = {
    "moe_mlp_glu_interleave_size": (_is_set, "gate and up of an expert lie in blocks that take turns"),
    "moe_shared_expert_glu_interleave_size": (_is_set, "gate and up of a shared expert lie in blocks that take turns"),
    "attention_output_gate": (_is_set, "the query rows have a gate's between them, whose place isn't known"),
    "gtp_weight_remat_size": (_over_one, "weights are cut once more and gathered for each use"),
    "expert_gtp_weight_remat_size": (_over_one, "experts' weights are cut once more and gathered for each use"),
    "fp8_param": (_is_set, "the primary weights are FP8 with scales beside them, and neither is a checkpoint tensor"),
    "fp4_param": (_is_set, "the primary weights are FP4 with scales beside them, and neither is a checkpoint tensor"),
    "heterogeneous_block_specs": (_is_set, "layers have different numbers of heads, and the config states one"),
    "use_mup": (_is_set, "values are scaled by the width, and a checkpoint's aren't"),
}
"""Settings of Megatron's config that are refused: when, and why."""


def refusals(config: Any) -> Iterator[str]:
    """Why a Megatron config is refused, setting by setting; nothing if it isn't.

    >>> from types import SimpleNamespace
    >>> list(refusals(SimpleNamespace(attention_output_gate=True)))
    ["attention_output_gate=True: the query rows have a gate's between them, whose place isn't known"]
    """
    for name, (is_refused, reason) in REFUSED.items():
        value = getattr(config, name, None)
        if is_refused(value):
            yield f"{name}={value!r}: {reason}"
    latent = getattr(config, "multi_latent_attention", False)
    if getattr(config, "rotary_interleaved", False) and not latent:
        yield "rotary_interleaved=True: a head's rows are in another order than a checkpoint's"


def hf_config_of(chunks: Sequence[Chunk]) -> Any:
    """The Hugging Face config that hangs on the model or its config as `hf_config`, or None."""
    owners = [owner for chunk in chunks for owner in (chunk.ddp, chunk.module, chunk.config)]
    return next((owner.hf_config for owner in owners if getattr(owner, "hf_config", None) is not None), None)


def memory_of(chunk: Chunk) -> set[int]:
    """The storages of the chunk's parameters and buffers, by address."""
    tensors = (*chunk.module.parameters(), *chunk.module.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}
