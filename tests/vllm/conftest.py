"""Tests against the real vLLM, on the CPU, collected where it is installed: `tox -e vllm`."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent

os.environ.update(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


collect_ignore_glob = [] if has_vllm() else ["*.py"]
if has_vllm():
    sys.path += [str(HERE / "support"), str(HERE / "support" / "plugin")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")  # theirs are not ours to turn into errors
    warnings.simplefilter("default")  # nor are those that come as the process ends
