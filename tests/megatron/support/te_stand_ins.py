"""Stand-ins for the leaf classes of TransformerEngine, which needs a GPU: parameters, their marks, a plain forward.

With them installed, Megatron's own wrappers run (`TELayerNormColumnParallelLinear`, `TEGroupedMLP`, …), so parameters
have the names that models in production have. What the leaves do as TransformerEngine does, as seen from outside: a
weight is marked `tensor_model_parallel` with `partition_dim` and a `partition_stride` of 1, whatever its mode; norm
weights carry `sequence_parallel`; each module has an empty extra state. There are no kernels and there's no FP8.

The gated norm of mamba_ssm, a weight, is here too.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VERSION = "2.5.0"


def _marked(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
    return parameter


def _made(shape: tuple[int, ...], dtype: torch.dtype, init: Any) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if init is not None:
        with torch.no_grad():
            init(made)
    return made


class Leaf(nn.Module):
    """What every module of TransformerEngine has."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class Linear(Leaf):
    """`parallel_mode` "column" cuts rows of the weight, "row" its columns."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        tp_group: Any = None,
        init_method: Any = None,
        return_bias: bool = False,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **unused: Any,
    ) -> None:
        super().__init__()
        cut = {"column": (tp_size, 1), "row": (1, tp_size)}.get(parallel_mode or "", (1, 1))
        self.in_features, self.out_features = in_features // cut[1], out_features // cut[0]
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.return_bias, self.use_bias, self.sequence_parallel = return_bias, bias, sequence_parallel
        shape = (self.out_features, self.in_features)
        self.weight = _marked(_made(shape, params_dtype, init_method), 1 if parallel_mode == "row" else 0)
        self.bias = _made(shape[:1], params_dtype, None) if bias else None
        if bias and parallel_mode == "column":
            _marked(self.bias, 0)
        elif bias and parallel_mode == "row":
            self.bias.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor, is_first_microbatch: Any = None) -> Any:
        out = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            torch.distributed.all_reduce(out, group=self.tp_group)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class Norm(Leaf):
    """A norm's weight, by whichever argument its size comes."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        *,
        hidden_size: Any = None,
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(normalized_shape or hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel


class RMSNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight + int(self.zero_centered_gamma), self.eps)


class LayerNorm(Norm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class LayerNormLinear(Linear):
    """A norm and a linear in one module: its weight is `layer_norm_weight`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=self.weight.dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization != "RMSNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=self.weight.dtype))

    def forward(self, x: torch.Tensor, is_first_microbatch: Any = None) -> Any:
        weight = self.layer_norm_weight + int(self.zero_centered_gamma)
        normed = (
            F.rms_norm(x, weight.shape, weight, self.eps)
            if self.layer_norm_bias is None
            else F.layer_norm(x, weight.shape, weight, self.layer_norm_bias, self.eps)
        )
        return super().forward(normed)


class GroupedLinear(Leaf):
    """A weight for each expert: `weight0`, `weight1`, …"""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        init_method: Any = None,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **unused: Any,
    ) -> None:
        super().__init__()
        cut = {"column": (tp_size, 1), "row": (1, tp_size)}.get(parallel_mode or "", (1, 1))
        shape = (out_features // cut[0], in_features // cut[1])
        self.num_gemms, self.use_bias, self.return_bias, self.tp_size = num_gemms, bias, return_bias, tp_size
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}
        for number in range(num_gemms):
            weight = _marked(_made(shape, params_dtype, init_method), 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{number}", weight)
            if bias:
                self.register_parameter(f"bias{number}", _made(shape[:1], params_dtype, None))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass

    def forward(self, x: torch.Tensor, m_splits: Any, is_first_microbatch: Any = None) -> torch.Tensor:
        parts = torch.split(x, [int(rows) for rows in m_splits])
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


class DotProductAttention(Leaf):
    """Causal attention over (sequence, batch, heads, dim)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)


class GatedRMSNorm(nn.Module):
    """mamba_ssm's norm: a weight."""

    def __init__(self, hidden_size: int, *args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this is a stand-in without kernels: it isn't to be run here")


def _blank(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _NoFp8:
    is_fp8_enabled = staticmethod(lambda: False)


PYTORCH = "transformer_engine.pytorch"
MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {n: _blank(n) for n in ("DelayedScaling", "Recipe", "Format")},
    PYTORCH: {
        **{c.__name__: c for c in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)},
        "Fp8Padding": _absent,
        "Fp8Unpadding": _absent,
    },
    f"{PYTORCH}.fp8": {"FP8GlobalStateManager": _NoFp8, "fp8_autocast": _absent, "fp8_model_init": _absent},
    f"{PYTORCH}.distributed": {
        "CudaRNGStatesTracker": _blank("CudaRNGStatesTracker"),
        "checkpoint": _absent,
        "activation_recompute_forward": _absent,
        "is_fp8_activation_recompute_enabled": lambda: False,
    },
    f"{PYTORCH}.ops": {"Sequential": nn.Sequential, "FusibleOperation": nn.Module},
    f"{PYTORCH}.float8_tensor": {"Float8Tensor": _blank("Float8Tensor")},
    f"{PYTORCH}.tensor": {"QuantizedTensor": _blank("QuantizedTensor")},
    "mamba_ssm": {"__version__": "2.3.2"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": _absent,
        "mamba_split_conv1d_scan_combined": _absent,
    },
}  # fmt: skip


def install() -> None:
    """Put the stand-ins where Megatron imports TransformerEngine from; nothing if the real one is loaded."""
    if "transformer_engine" in sys.modules:
        return
    for name, attributes in MODULES.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(attributes)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


install()
