"""Lets the real megatron-core run on a machine without a GPU. Imported before anything of `megatron`; what it changes:

- `paged_stash`, which asks for triton as it's imported and which no dense or expert layer here runs, is a stand-in
  module. A stand-in for triton itself would make torch believe that it is there.
- `torch.compile` gives back what it is given.
- Where there's no CUDA, its questions have answers of the CPU: the current device is "cpu", a stream is a thing that
  does nothing, `.cuda()` leaves a tensor where it is, nothing is pinned, the tracker of random states has one state.
- `typing.override`, which Megatron-Bridge takes from Python 3.12, is that of typing_extensions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
import typing
import warnings
from typing import Any

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import typing_extensions


class IdleStream:
    """A stand-in for a CUDA stream: whatever is asked of it has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record_stream = _nothing

    def record_event(self, *args: Any, **kwargs: Any) -> IdleStream:
        return self


def _without_compiling(function: Any = None, **options: Any) -> Any:
    return (lambda wrapped: wrapped) if function is None else function


def _paged_stash() -> types.ModuleType:
    module = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    module.GLOBAL_BLOCK_SIZE = 1024
    module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
    return module


def _answer_for_cuda() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.Stream = IdleStream
    torch.cuda.current_stream = lambda *args, **kwargs: IdleStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    plain = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: plain(*args, **kwargs)


def install() -> None:
    """Make all the changes, and import what they're for."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    typing.override = typing_extensions.override
    torch.compile = _without_compiling
    stand_in = _paged_stash()
    sys.modules.setdefault(stand_in.__name__, stand_in)
    if not torch.cuda.is_available():
        _answer_for_cuda()
        from megatron.core.tensor_parallel import random

        random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()


install()
