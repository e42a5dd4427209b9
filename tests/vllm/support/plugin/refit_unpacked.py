"""Keeps vLLM's CPU backend from packing weights, as no GPU backend of the same layers does. For tests only.

After loading, vLLM packs weights for the CPU: dense layers and the head for oneDNN, experts for its grouped kernel.
Whoever then writes a parameter writes what nobody computes with, and the adapter refuses such a model, rightly. To run
what happens on a GPU, where these layers compute with the parameters themselves, three things are switched off: oneDNN,
the small-matrix kernel of machines with AMX, and the packing of experts, which then run in plain torch (and honour the
expert map, which the packed kernel doesn't). Their class says that it keeps the loader's layout, as the adapter asks.

It is found through the entry point beside this file, in every process of an engine, and does nothing unless
REFIT_TEST_UNPACKED is 1. The names are private ones of vLLM 0.32.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """The entry point."""
    if os.environ.get("REFIT_TEST_UNPACKED") == "1":
        unpack()


def unpack() -> None:
    """Switch packing off in this process."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: setattr(self, "_use_zentorch", False)
    CPUUnquantizedExperts.apply = _plain_experts
    CPUUnquantizedExperts.refit_keeps_layout = True


def _plain_experts(
    self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
    global_num_experts: int, expert_map: Any, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """Experts one by one: gate and up fused in `w1`, (experts, 2 I, H), and down in `w2`, (experts, H, I)."""
    import torch

    assert getattr(activation, "value", activation) == "silu"
    chosen = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    output.zero_()
    for expert in range(w1.shape[0]):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if token.numel():
            gate, up = (hidden_states[token] @ w1[expert].T).chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
            output.index_add_(0, token, (out * topk_weights[token, place, None]).to(output.dtype))
