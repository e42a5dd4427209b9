"""A Hugging Face config as plain data, however it is given: a path, a `transformers` config, a mapping.

>>> read({"model_type": "llama", "vocab_size": 8})["vocab_size"]
8
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refit_sdk.errors import LayoutError


def read(given: Any) -> dict[str, Any]:
    """The config's keys and values. A path is a `config.json`, or a directory that has one.

    `LayoutError` for what isn't a config. Of a `transformers` config its properties count too.
    """
    if isinstance(given, (str, os.PathLike)):
        return _from_file(Path(given))
    if isinstance(given, Mapping):
        return dict(given)
    if callable(getattr(given, "to_dict", None)):
        return {**_properties(given), **given.to_dict()}
    raise LayoutError(
        f"hf_config={given!r} is a {type(given).__name__}; give a path to a config.json or to its directory, a "
        f"transformers config, or a mapping"
    )


def _properties(config: Any) -> dict[str, Any]:
    """What a config answers to under another name than its own (`num_hidden_layers` of a pattern)."""
    found = {name: getattr(config, name, None) for name in ("model_type", "num_hidden_layers")}
    return {name: value for name, value in found.items() if value is not None}


def _from_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LayoutError(f"hf_config={str(path)!r}: {file} can't be read as a config: {error}") from error
    if not isinstance(found, dict):
        raise LayoutError(f"hf_config={str(path)!r}: {file} holds a {type(found).__name__}, not an object with keys")
    return found
