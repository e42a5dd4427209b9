"""A real vLLM in this process, or with workers of its own, on the CPU."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny


def rendezvous() -> str:
    """An address that is free, below the ports that the system hands out."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"


@contextlib.contextmanager
def engine(path: Path, *, workers: bool = False, **options: Any) -> Iterator[Any]:
    """An `LLM`. Without `workers`, engine and worker are in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if workers else "0"
    stated = {
        "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128,
        "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, **options,
    }  # fmt: skip
    llm = LLM(model=str(path), **stated)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generated(llm: Any) -> list[list[int]]:
    """Greedy tokens for each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tiny.LENGTH, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in tiny.PROMPTS]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)]


def worker(llm: Any) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker
