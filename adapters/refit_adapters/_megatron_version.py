"""What of the installed megatron-core is understood, told without importing it, which takes seconds and may need a GPU.

1. Its version is read from its distribution, or from `package_info.py` where it is a checkout.
2. What the adapter asks of it is looked for in its source, file by file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from refit_adapters._installed import lacking

TESTED: Final = "0.19.2"
"""The version that the tests run."""
OLDEST: Final = (0, 16)

ASKED: Final[Mapping[str, tuple[str, str]]] = {
    "singleton shards of layers": ("transformer/transformer_block.py", "singleton_local_shards"),
    "singleton shards of experts": ("transformer/moe/experts.py", "singleton_local_shards"),
    "parts of Mamba layers": ("ssm/mamba_mixer.py", "_split_tensor_factory"),
    "multi-token prediction": ("transformer/multi_token_prediction.py", "def sharded_state_dict"),
    "latent attention": ("transformer/multi_latent_attention.py", "linear_kv_up_proj"),
    "a parameter all-gather completed on demand": ("distributed/distributed_data_parallel.py", "force_sync"),
}
"""What is asked of Megatron: the file that has it, and a word that it has."""
NEEDED: Final = ("singleton shards of layers", "singleton shards of experts")


def root() -> Path | None:
    """The folder of `megatron.core`, or None where it isn't installed."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ImportError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def version(folder: Path) -> str:
    """The version of megatron-core in a folder; "unknown" if it doesn't say."""
    info = folder / "package_info.py"
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE)) if info.is_file() else {}
    if len(found) == 3:
        return ".".join(found[part] for part in ("MAJOR", "MINOR", "PATCH"))
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def missing() -> str | None:
    """Why the adapter can't be used here, or None."""
    folder = root()
    if folder is None:
        return "megatron-core isn't installed; install megatron-core, or put a checkout of Megatron-LM on the path"
    number = version(folder)
    if re.match(r"\d+\.\d+", number) and tuple(map(int, number.split(".")[:2])) < OLDEST:
        return f"megatron-core {number} is too old; install {'.'.join(map(str, OLDEST))} or later"
    lost = [what for what in lacking(folder, ASKED) if what in NEEDED]
    return f"megatron-core {number} has no {', '.join(lost)}; install {TESTED}" if lost else None


def about() -> str:
    """What of the installed version is understood, in a line."""
    folder = root()
    if folder is None:
        return ""
    number, lost = version(folder), lacking(folder, ASKED)
    understood = ", ".join(what for what in ASKED if what not in lost)
    tested = "the version that is tested" if number == TESTED else f"tested with {TESTED}"
    return f"megatron-core {number} ({tested}): {understood}" + (f"; not there: {', '.join(lost)}" if lost else "")
