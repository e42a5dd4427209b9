"""Tensors that vLLM derives from weights after loading, and how they're made again, at the addresses they have.

Latent attention (MLA) keeps the two halves of `kv_b_proj` apart and transposed. Its own hook makes them anew and copies
them into the tensors that are there, so captured graphs stay valid; that they did stay is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from refit_sdk.errors import RefitError

_MLA: Final = "vllm.model_executor.layers.attention.mla_attention.MLAAttention"

DERIVED: Final[Mapping[str, frozenset[str]]] = {
    _MLA: frozenset({"W_UV", "W_UK_T", "W_UK_T_dcp_qrep"}),
}
"""Class of a layer → the tensors that it derives, which `renew` makes again."""


def renew(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Derive everything again. `RefitError` if a derived tensor came to lie elsewhere, or isn't what it was."""
    for path, module in model.named_modules():
        cls = type(module)
        derived = DERIVED.get(f"{cls.__module__}.{cls.__qualname__}")
        if derived is None:
            continue
        before = {key: _place(module, key) for key in derived}
        hook: Any = module.process_weights_after_loading
        hook(dtype)
        moved = sorted(key for key, place in before.items() if _place(module, key) != place)
        if moved:
            raise RefitError(
                f"{path}: {', '.join(moved)} came to lie elsewhere as vLLM made it again, so graphs that were captured "
                f"would read the old one; start the engine anew"
            )


def _place(module: torch.nn.Module, key: str) -> Any:
    tensor = getattr(module, key, None)
    return None if tensor is None else (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
