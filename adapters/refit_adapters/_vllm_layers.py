"""Which layers of a vLLM model compute with the parameters that its loader filled: only those may be written in place.

A trace tells where the loader wrote. What runs after it may pack a weight, shuffle it, or keep a copy that is computed
with instead, and nothing in the parameter need show it. So a layer passes only if

1. its live parameter is what the loader filled: the same class, shape, strides and dtype, not replaced, not gone;
2. its method (`quant_method`) is one that is known here, on a backend that is known to keep the loader's layout;
3. what its attention backend, or the model, does after loading is nothing, or is done again (`_vllm_derived`).

A method, an experts' class or an attention backend of another package passes if it says so itself, by a class attribute
`refit_keeps_layout = True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from refit_adapters._vllm_derived import DERIVED
from refit_adapters._vllm_twins import Twin, Twins
from refit_sdk.errors import LayoutError

DECLARATION: Final = "refit_keeps_layout"
"""The class attribute by which a class of another package says that it leaves parameters as the loader filled them."""

_KEEPING_BACKENDS: Final = frozenset({"TRITON", "BATCHED_TRITON"})
_LINEAR: Final = "vllm.model_executor.layers.linear."
_MOE: Final = "vllm.model_executor.layers.fused_moe."
SHOWN: Final = 8


def check(model: torch.nn.Module, twins: Twins) -> None:
    """`LayoutError` that names every parameter that can't be written in place, and why, kind by kind."""
    wrong: dict[str, list[str]] = {}
    for name, reason in _faults(model, twins):
        wrong.setdefault(reason, []).append(name)
    if wrong:
        told = [f"{reason}: {_some(names)}" for reason, names in wrong.items()]
        raise LayoutError(
            "\n  ".join(
                (
                    f"{type(model).__name__} can't be written in place, as it doesn't compute with what was loaded:",
                    *told,
                )
            )
            + "\n  choose a backend that keeps the loader's layout (docs/reference/adapters.md lists them)"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _faults(model: torch.nn.Module, twins: Twins) -> Iterator[tuple[str, str]]:
    for name in twins.gone:
        yield name, "is gone since it was loaded"
    for name, module in twins.made_later:
        if name.rpartition(".")[2] not in DERIVED.get(_name(type(module)), ()):
            yield name, f"was made after loading by {type(module).__name__}, and nothing here renews it"
    methods = {id(place.module): method_fault(place.module) for place in twins.places}
    for place in twins.places:
        reason = _changed(place) or methods[id(place.module)]
        if reason:
            yield place.name, reason
    for path, module in model.named_modules():
        reason = _hook_fault(module, is_model=module is model)
        if reason:
            yield path or type(model).__name__, reason


def _changed(place: Twin) -> str:
    """How a live parameter isn't what the loader filled; nothing if it is."""
    live, twin = place.live, place.twin
    if type(live) is not type(twin):
        return f"is a {type(live).__name__}, and a {type(twin).__name__} was loaded"
    for what, now, then in (
        ("shape", tuple(live.shape), tuple(twin.shape)),
        ("strides", live.stride(), twin.stride()),
        ("dtype", live.dtype, twin.dtype),
    ):
        if now != then:
            return f"has {what} {now}, and was loaded with {then}"
    return ""


def method_fault(module: torch.nn.Module) -> str:
    """Why the method of a layer isn't known to keep the loader's layout; nothing if it is."""
    method = getattr(module, "quant_method", None)
    if method is None or getattr(type(method), DECLARATION, False):
        return ""
    while hasattr(method, "old_quant_method"):
        method = method.old_quant_method
    known = _METHODS.get(_name(type(method)))
    if known is None:
        return f"has the method {type(method).__name__}, which isn't known to keep the loader's layout"
    return known(module, method)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _linear_fault(module: Any, method: Any) -> str:
    """On a CPU, vLLM computes with a packed copy, which its function holds, unless the function takes the weight."""
    if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
        return "is computed with from a packed copy (vLLM's CPU backend)"
    if hasattr(module, "_cpu_unpacked_conv_weight"):
        return "was packed after loading (vLLM's CPU backend)"
    return ""


def _gate_fault(module: Any, method: Any) -> str:
    split = hasattr(module, "_bf16x3_weight")
    return "has a copy split in three (ROCm's router)" if split else _linear_fault(module, method)


def _moe_fault(module: Any, method: Any) -> str:
    if module.moe_config.moe_parallel_config.enable_eplb:
        return "has experts that EPLB moves, which isn't supported"
    backend = method.unquantized_backend.name
    if backend in _KEEPING_BACKENDS:
        return ""
    kernel = getattr(method, "moe_kernel", None)
    experts = type(kernel.fused_experts) if kernel is not None else method.experts_cls
    if getattr(experts, DECLARATION, False):
        return ""
    return f"is laid out anew for the experts' backend {backend} ({getattr(experts, '__name__', experts)})"


_METHODS: Final[Mapping[str, Callable[[Any, Any], str]]] = {
    f"{_LINEAR}UnquantizedLinearMethod": _linear_fault,
    "vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod": _linear_fault,
    f"{_MOE}router.gate_linear._GateLinearMethod": _gate_fault,
    f"{_MOE}unquantized_fused_moe_method.UnquantizedFusedMoEMethod": _moe_fault,
}
"""The methods that are known, and what each may do on some backends."""

_HOOK: Final = "process_weights_after_loading"
_BASE_BACKEND: Final = "vllm.v1.attention.backend"
_KNOWN_HOOKS: Final = frozenset(
    {
        "vllm.model_executor.layers.attention.attention",
        "vllm.model_executor.layers.attention.mla_attention",
        "vllm.model_executor.layers.attention.mm_encoder_attention",
    }
)
"""Modules whose layers do nothing to weights after loading, or what `_vllm_derived` does again."""


def _hook_fault(module: torch.nn.Module, *, is_model: bool) -> str:
    """What a layer does after loading that isn't known; nothing if nothing is."""
    hook = getattr(type(module), _HOOK, None)
    if hook is None or _name(type(module)) in _METHODS or getattr(type(module), DECLARATION, False):
        return ""
    if is_model or hook.__module__ not in _KNOWN_HOOKS:
        return f"does something after loading that isn't known ({hook.__qualname__})"
    impl = getattr(module, "impl", None)
    own = getattr(type(impl), _HOOK, None)
    if own is None or own.__module__ == _BASE_BACKEND or getattr(type(impl), DECLARATION, False):
        return ""
    return f"has an attention backend, {type(impl).__name__}, that makes something of weights after loading"
