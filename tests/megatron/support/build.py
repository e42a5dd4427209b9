"""Megatron models as users build them: Megatron-Bridge makes the chunks of a rank and loads a checkpoint into them.

Megatron-Bridge is the oracle here: it cuts and fuses the checkpoint's tensors by code of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import te_stand_ins  # noqa: F401  before anything of megatron

import megatron_cpu  # noqa: F401  isort: skip  before anything of megatron
import torch
from attrs import frozen


@frozen
class Layout:
    """How a model is cut. `vp`: virtual stages a pipeline rank; `first`, `last`: layers of those stages, if uneven."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    dp: int = 1
    first: int | None = None
    last: int | None = None
    local: bool = False
    pad: int | None = None

    @property
    def world(self) -> int:
        """Ranks: enough for the dense cut and for the experts'."""
        expert = self.ep * (self.etp or self.tp)
        dense = self.tp * self.cp
        return self.pp * self.dp * max(dense, expert)

    def __str__(self) -> str:
        stated = {name: getattr(self, name) for name in ("tp", "pp", "vp", "ep", "etp", "cp", "dp", "first", "last")}
        words = [f"{name}{value}" for name, value in stated.items() if value not in (None, 1)]
        return (
            "-".join((*words, *(["local"] if self.local else []), *([f"pad{self.pad}"] if self.pad else []))) or "one"
        )


def start_groups(layout: Layout) -> Any:
    """Megatron's process groups of this layout."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


OFF = (
    "bf16", "fp16", "sequence_parallel", "gradient_accumulation_fusion", "bias_activation_fusion",
    "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "moe_permute_fusion", "persist_layer_norm",
    "cross_entropy_loss_fusion", "moe_shared_expert_overlap",
)  # fmt: skip
"""What needs kernels, or casts."""


def provider_of(bridge: Any, layout: Layout, dtype: torch.dtype) -> Any:
    """The provider of a checkpoint's model, set to a layout and to what a CPU can do."""
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = {
        **dict.fromkeys(OFF, False),
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "context_parallel_size": layout.cp,
        "num_layers_in_first_pipeline_stage": layout.first,
        "num_layers_in_last_pipeline_stage": layout.last,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
    }
    if layout.local:
        settings["transformer_impl"] = "local"
    if layout.pad:
        settings |= {"make_vocab_size_divisible_by": layout.pad, "should_pad_vocab": True}
    for name, value in settings.items():
        setattr(provider, name, value)
    if "q_lora_rank" in vars(provider) and provider.q_lora_rank is None:
        provider.qk_layernorm = False  # Megatron would put a norm before q, which no checkpoint has
    if layout.local and getattr(provider, "multi_latent_attention", False):
        _let_local_attention_take_mla()
        provider.transformer_layer_spec = _local_mla_spec
    provider.finalize()
    return provider


def _local_mla_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's local layers with norms on the latents, which for TransformerEngine's it puts in by itself."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = WrappedTorchNorm
    return spec


def _let_local_attention_take_mla() -> None:
    """Megatron's local attention doesn't know the two sizes that latent attention gives it."""
    from megatron.core.transformer import dot_product_attention as module

    original = module.DotProductAttention.__init__
    if getattr(original, "takes_mla", False):
        return

    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    init.takes_mla = True
    module.DotProductAttention.__init__ = init


@frozen(eq=False)
class Built:
    """A rank's chunks, its groups, and the bridge that loads into them."""

    chunks: list[Any]
    groups: Any
    bridge: Any

    def load(self, folder: Path) -> None:
        """Load another checkpoint of the same architecture."""
        from megatron.bridge import AutoBridge

        AutoBridge.from_hf_pretrained(str(folder), torch_dtype=self.bridge.hf_pretrained.config.dtype).load_hf_weights(
            self.chunks
        )


def build(folder: Path, layout: Layout, *, dtype: torch.dtype = torch.float32, groups: Any = None) -> Built:
    """This rank's chunks of a checkpoint's model, loaded. All ranks of the layout call it."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(folder), torch_dtype=dtype)
    provider = provider_of(bridge, layout, dtype)
    groups = groups or start_groups(layout)
    provider._pg_collection = groups
    place, stages = groups.pp.rank(), layout.vp or 1
    chunks = [
        provider.provide(
            pre_process=place == 0 and stage == 0,
            post_process=place == groups.pp.size() - 1 and stage == stages - 1,
            vp_stage=stage if layout.vp else None,
        )
        for stage in range(stages)
    ]
    bridge.load_hf_weights(chunks)
    return Built(chunks, groups, bridge)
