"""A Hugging Face directory of safetensors files whose tensors are those that its own config asks for. No torch.

1. `config.json` gives the shape, and with it the name and shape of every tensor that must be there.
2. `refit_sdk.checkpoint` says what is really there.
3. What is missing, of another shape, of a dtype that isn't a float, or belongs to no layer of the config is one error
   that lists all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import field, frozen

from refit_sdk.checkpoint import CheckpointError, Stored, read_json, stored_tensors
from refit_sdk.demo.config import ConfigError, DecoderConfig, from_hugging_face

HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"

_DTYPES: Final = frozenset({"F32", "BF16", "F16"})
_DERIVED: Final = ".rotary_emb.inv_freq"


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
    refit_sdk.checkpoint.CheckpointError: /nowhere is not a checkpoint that can be read:
      there is no such directory
    """
    if not directory.is_dir():
        raise CheckpointError(directory, ["there is no such directory"])
    try:
        config = from_hugging_face(read_json(directory, "config.json"))
    except ConfigError as error:
        raise CheckpointError(directory, [f"config.json: {error}"]) from error
    tensors = stored_tensors(directory)
    if problems := [*_disagreements(config, tensors)]:
        raise CheckpointError(directory, problems)
    return Checkpoint(directory, config, tensors)


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
