"""A Hugging Face directory of safetensors files, believed only after it was checked. No torch.

1. `config.json` gives the shape, and with it the name and shape of every tensor that must be there.
2. `model.safetensors`, or the files that `model.safetensors.index.json` names, are opened; their headers say what is
   really there. The safetensors library refuses a header or a body that is cut short.
3. What is missing, of another shape, of a dtype that isn't a float, or belongs to no layer of the config is one error
   that lists all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from safetensors import SafetensorError, safe_open

from refit_sdk.demo.config import ConfigError, DecoderConfig, from_hugging_face
from refit_sdk.errors import RefitError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"

_DTYPES: Final = frozenset({"F32", "BF16", "F16"})
_DERIVED: Final = ".rotary_emb.inv_freq"
_LISTED: Final = 8


class CheckpointError(RefitError):
    """A checkpoint directory that isn't what it says. `problems` holds every one found."""

    def __init__(self, directory: Path, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        shown = self.problems[:_LISTED]
        more = (f"and {len(self.problems) - _LISTED} more",) if len(self.problems) > _LISTED else ()
        super().__init__("\n  ".join((f"{directory} is not a checkpoint that the demo can start from:", *shown, *more)))


@frozen
class Stored:
    """Where one tensor lies: its file's name, its shape, and its dtype as safetensors writes it."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@frozen
class Checkpoint:
    """A checked directory: the model's shape, and the file of every tensor."""

    directory: Path
    config: DecoderConfig
    tensors: Mapping[str, Stored] = field(hash=False)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.directory / self.tensors[name].file


def open_checkpoint(directory: Path) -> Checkpoint:
    """Check a directory against its own config. `CheckpointError` with everything that is wrong; reads headers only.

    >>> open_checkpoint(Path("/nowhere"))
    Traceback (most recent call last):
    refit_sdk.demo.checkpoint.CheckpointError: /nowhere is not a checkpoint that the demo can start from:
      there is no such directory
    """
    if not directory.is_dir():
        raise CheckpointError(directory, ["there is no such directory"])
    try:
        config = from_hugging_face(_read_json(directory, "config.json"))
    except ConfigError as error:
        raise CheckpointError(directory, [f"config.json: {error}"]) from error
    tensors = _stored_tensors(directory)
    if problems := [*_disagreements(config, tensors)]:
        raise CheckpointError(directory, problems)
    return Checkpoint(directory, config, tensors)


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    try:
        data = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(directory, [f"{name} is missing"]) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(directory, [f"{name} can't be read: {error}"]) from error
    if not isinstance(data, dict):
        raise CheckpointError(directory, [f"{name} must hold an object, found {type(data).__name__}"])
    return data


def _stored_tensors(directory: Path) -> dict[str, Stored]:
    if (directory / SINGLE).exists():
        return _header(directory, SINGLE)
    if not (directory / INDEX).exists():
        raise CheckpointError(directory, [f"it has neither {SINGLE} nor {INDEX}; other formats are not read"])
    return _indexed(directory, _weight_map(directory))


def _weight_map(directory: Path) -> dict[str, str]:
    stated = _read_json(directory, INDEX).get("weight_map")
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
    try:
        with safe_open(directory / file, framework="numpy") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118, not a mapping
            return {name: Stored(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices}
    except (SafetensorError, OSError) as error:
        size = (directory / file).stat().st_size
        raise CheckpointError(directory, [f"{file} ({size} bytes) is damaged or cut short: {error}"]) from error


def _disagreements(config: DecoderConfig, tensors: Mapping[str, Stored]) -> Iterator[str]:
    expected = config.parameter_shapes()
    allowed = expected | ({HEAD: expected[EMBEDDING]} if config.tied else {})
    for name in expected:
        if name not in tensors:
            yield f"{name} is missing; the config asks for shape {expected[name]}"
    for name, stored in tensors.items():
        if name.endswith(_DERIVED):
            continue
        if name not in allowed:
            yield f"{name} belongs to no part of the model that the config describes"
        elif stored.shape != allowed[name]:
            yield f"{name} has shape {stored.shape}, the config asks for {allowed[name]}"
        elif stored.dtype not in _DTYPES:
            yield f"{name} has dtype {stored.dtype}; the demo reads {', '.join(sorted(_DTYPES))}"
