"""Tests against the real megatron-core, collected where it is installed: `tox -e megatron`."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ImportError:
        return False


collect_ignore_glob = [] if has_megatron() else ["*.py"]
if has_megatron():
    sys.path += [str(HERE / "support"), str(HERE.parent / "refit")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-matrix", action="store_true", help="every layout, not a pairwise sample")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")  # theirs are not ours to turn into errors
