"""A directory of safetensors files, believed only after it was checked: which tensors it has, and where they lie.

1. `model.safetensors`, or the files that `model.safetensors.index.json` names, are opened; their headers say what is
   really there. The safetensors library refuses a header or a body that is cut short.
2. An index that names a missing file, a tensor that its file doesn't hold, or a file outside the directory is refused.
3. What is left is, for every tensor, its file, dtype, shape and bytes. Only headers are read.

>>> stored_tensors(Path("/nowhere"))
Traceback (most recent call last):
    ...
refit_sdk.checkpoint.CheckpointError: /nowhere is not a checkpoint that can be read:
  there is no such directory
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from safetensors import SafetensorError, safe_open

from refit_sdk.errors import RefitError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

TORCH_NAMES: Final[Mapping[str, str]] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
"""Torch's names of the dtypes that safetensors names otherwise. Those with less than a byte an element aren't here."""

STORED_NAMES: Final[Mapping[str, str]] = {torch: stored for stored, torch in TORCH_NAMES.items()}
"""Safetensors' names of torch's dtypes."""

_LISTED: Final = 8


class CheckpointError(RefitError):
    """A checkpoint directory that isn't what it says, or can't be written. `problems` holds every one found."""

    def __init__(self, directory: Path, problems: Iterable[str], *, verb: str = "read") -> None:
        self.problems = tuple(problems)
        shown = self.problems[:_LISTED]
        more = (f"and {len(self.problems) - _LISTED} more",) if len(self.problems) > _LISTED else ()
        super().__init__("\n  ".join((f"{directory} is not a checkpoint that can be {verb}:", *shown, *more)))


@frozen
class Stored:
    """Where one tensor lies: its file's name, its shape, its dtype as safetensors writes it, and its bytes there."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a directory, by name. `CheckpointError` with what is wrong; reads headers only."""
    if not directory.is_dir():
        raise CheckpointError(directory, ["there is no such directory"])
    if (directory / SINGLE).exists():
        return _header(directory, SINGLE)
    if not (directory / INDEX).exists():
        raise CheckpointError(directory, [f"it has neither {SINGLE} nor {INDEX}; other formats are not read"])
    return _indexed(directory, _weight_map(directory))


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A file of the directory that must hold a JSON object. `CheckpointError` if it doesn't."""
    try:
        data = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(directory, [f"{name} is missing"]) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(directory, [f"{name} can't be read: {error}"]) from error
    if not isinstance(data, dict):
        raise CheckpointError(directory, [f"{name} must hold an object, found {type(data).__name__}"])
    return data


def _weight_map(directory: Path) -> dict[str, str]:
    stated = read_json(directory, INDEX).get("weight_map")
    if not isinstance(stated, dict) or not all(isinstance(file, str) for file in stated.values()):
        raise CheckpointError(directory, [f"{INDEX} needs a weight_map from tensor names to file names"])
    if outside := sorted({file for file in stated.values() if Path(file).name != file}):
        raise CheckpointError(directory, [f"{INDEX} names {file!r}, not a file of the directory" for file in outside])
    return stated


def _indexed(directory: Path, weight_map: Mapping[str, str]) -> dict[str, Stored]:
    files = sorted(set(weight_map.values()))
    if absent := [file for file in files if not (directory / file).is_file()]:
        raise CheckpointError(directory, [f"{INDEX} names {file}, which is missing" for file in absent])
    headers = {file: _header(directory, file) for file in files}
    if lies := sorted((name, file) for name, file in weight_map.items() if name not in headers[file]):
        raise CheckpointError(
            directory, [f"{INDEX} says {name} is in {file}, which doesn't hold it" for name, file in lies]
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _header(directory: Path, file: str) -> dict[str, Stored]:
    """The library checks a file; where its tensors lie is then read from its header."""
    path = directory / file
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            stated: dict[str, Any] = json.loads(opened.read(length))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(directory, [f"{file} ({size} bytes) is damaged or cut short: {error}"]) from error
    stated.pop("__metadata__", None)
    return {name: _stored(file, told, 8 + length) for name, told in stated.items()}


def _stored(file: str, told: Mapping[str, Any], data: int) -> Stored:
    begin, end = told["data_offsets"]
    return Stored(file, tuple(told["shape"]), told["dtype"], data + begin, data + end)
