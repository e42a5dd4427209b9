"""A checkpoint directory to be written: its tensors, how they are cut, and which files they go into. No torch.

1. Each rank of the layout holds a box of each tensor (`refit_sdk.tensor_parallel`); whole, there is one rank.
2. A rank's boxes, in order, fill files up to a size. The header of a safetensors file says where each lies in it.
3. Several files have an index, as Hugging Face's libraries write it; `refit.json` says what was cut.

>>> export = Export(directory="out", tensors={"a": Wanted((4,), "float32"), "b": Wanted((2,), "int8")}, shard_bytes=16)
>>> [(file.path, [held.name for held in file.tensors]) for file in export.files()]
[('model-00001-of-00002.safetensors', ['a']), ('model-00002-of-00002.safetensors', ['b'])]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen, validators

from refit_sdk import __version__
from refit_sdk.box import Box
from refit_sdk.checkpoint import INDEX, SINGLE, STORED_NAMES, TORCH_NAMES, CheckpointError, read_json, stored_tensors
from refit_sdk.dtypes import itemsize
from refit_sdk.errors import LayoutError
from refit_sdk.tensor_parallel import Heads, TensorParallel

RECORD: Final = "refit.json"
"""The file by which an export is known to be ours: what it has, and how it is cut."""

SHARD_BYTES: Final = 5 * 10**9
"""The most bytes of tensors in a file, where no other number is given."""

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
_FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


@frozen
class Wanted:
    """A tensor to be written: its whole shape, and the dtype that it is written in, by torch's name."""

    shape: tuple[int, ...]
    dtype: str


@frozen
class Placed:
    """A region of a tensor in a file, from byte `begin` on."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.box.size * itemsize(self.dtype)


@frozen
class File:
    """A file to be: its path in the directory, its first bytes, what lies in it, and its size."""

    path: str
    header: bytes
    tensors: tuple[Placed, ...]
    nbytes: int


@frozen(kw_only=True)
class Export:
    """A checkpoint directory to be written by a push: which tensors, how they're cut, and what is copied beside them.

    Cut over several ranks, the tensors of rank r are under `rank-r/`; whole, the directory is one that Hugging Face's
    libraries load. `copied` are files that go along as they are.
    """

    directory: Path = field(converter=Path)
    tensors: Mapping[str, Wanted] = field(hash=False)
    layout: TensorParallel = field(factory=lambda: TensorParallel(1))
    shard_bytes: int = field(default=SHARD_BYTES, validator=validators.ge(1))
    copied: tuple[Path, ...] = ()

    def __attrs_post_init__(self) -> None:
        self.layout.check({name: wanted.shape for name, wanted in self.tensors.items()})

    @classmethod
    def like(
        cls,
        checkpoint: Path,
        directory: Path,
        *,
        layout: str = "whole",
        dtype: str | None = None,
        rules: Iterable[tuple[str, str]] = (),
        shard_bytes: int = SHARD_BYTES,
        copy: bool = True,
    ) -> Export:
        """An export of the tensors that another checkpoint has. `dtype`: that of all floating tensors (None: as there).

        `copy`: its config, tokenizer and other small files go along.
        """
        checkpoint = Path(checkpoint)
        stored = stored_tensors(checkpoint)
        if strange := sorted({told.dtype for told in stored.values()} - TORCH_NAMES.keys()):
            raise CheckpointError(checkpoint, [f"its dtype {name} is not one that can be moved" for name in strange])
        has_config = (checkpoint / "config.json").is_file()
        heads = Heads.of(read_json(checkpoint, "config.json") if has_config else {})
        named = {name: Wanted(told.shape, _cast(TORCH_NAMES[told.dtype], dtype)) for name, told in stored.items()}
        return cls(
            directory=Path(directory),
            tensors=named,
            layout=TensorParallel.parse(layout, heads=heads, rules=rules),
            shard_bytes=shard_bytes,
            copied=tuple(_small_files(checkpoint)) if copy else (),
        )

    def files(self) -> tuple[File, ...]:
        """Every file of the checkpoint, in order; all ranks that write it get the same."""
        cut = self.layout.size > 1
        return tuple(
            file for rank in range(self.layout.size) for file in self._files_of(rank, f"rank-{rank}/" if cut else "")
        )

    def _files_of(self, rank: int, folder: str) -> Iterator[File]:
        boxes = {name: self.layout.box(name, wanted.shape, rank=rank) for name, wanted in self.tensors.items()}
        bins = [
            *_bins(
                [(name, box.size * itemsize(self.tensors[name].dtype)) for name, box in boxes.items()], self.shard_bytes
            )
        ]
        for number, names in enumerate(bins, start=1):
            name = SINGLE if len(bins) == 1 else f"model-{number:05}-of-{len(bins):05}.safetensors"
            yield _file(folder + name, {name: (boxes[name], self.tensors[name]) for name in names})


def _cast(stored: str, dtype: str | None) -> str:
    if dtype is not None and dtype not in _FLOATS:
        raise LayoutError(f"dtype {dtype!r} isn't one to cast to; give one of {', '.join(sorted(_FLOATS))}")
    return dtype if dtype is not None and stored in _FLOATS else stored


def _small_files(checkpoint: Path) -> Iterator[Path]:
    """Configs, tokenizers, licences: all but weights, hidden files and folders."""
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith((*_WEIGHTS, RECORD)):
            yield path


def _bins(sizes: Sequence[tuple[str, int]], limit: int) -> Iterator[list[str]]:
    """Names in order, a new bin where the next one would be too much; at least one bin, at least one name in each."""
    names: list[str] = []
    total = 0
    for name, nbytes in sizes:
        if names and total + nbytes > limit:
            yield names
            names, total = [], 0
        names.append(name)
        total += nbytes
    yield names


def _file(path: str, tensors: Mapping[str, tuple[Box, Wanted]]) -> File:
    """Larger elements come first, as in every safetensors file, so that each tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-itemsize(tensors[name][1].dtype), name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, begins = 0, {}
    for name in order:
        box, wanted = tensors[name]
        begins[name], end = at, at + box.size * itemsize(wanted.dtype)
        entries[name] = {"dtype": STORED_NAMES[wanted.dtype], "shape": box.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = (
        Placed(name, tensors[name][1].shape, tensors[name][0], tensors[name][1].dtype, len(header) + begins[name])
        for name in order
    )
    return File(path, header, tuple(placed), len(header) + at)


def texts(files: Sequence[File], *, version: int, ranks: int, copied: Iterable[str]) -> dict[str, str]:
    """Indexes and the record of a checkpoint's files, by path."""
    made: dict[str, Any] = {}
    for folder in sorted({os.path.dirname(file.path) for file in files}):
        inside = [file for file in files if os.path.dirname(file.path) == folder]
        if len(inside) > 1:
            made[os.path.join(folder, INDEX)] = _index(inside)
    listed = sorted({*(file.path for file in files), *made, *copied, RECORD})
    written_by = f"refit_sdk {__version__}"
    made[RECORD] = {
        "written_by": written_by, "version": version, "ranks": ranks, "files": listed, "cut": _cuts(files),
    }  # fmt: skip
    return {path: json.dumps(content, indent=None if path == RECORD else 2) + "\n" for path, content in made.items()}


def _index(files: Sequence[File]) -> dict[str, Any]:
    weight_map = {placed.name: os.path.basename(file.path) for file in files for placed in file.tensors}
    total = sum(placed.nbytes for file in files for placed in file.tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _cuts(files: Sequence[File]) -> dict[str, dict[str, Any]]:
    """Where each region that isn't a whole tensor lies in its tensor, by file."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for placed in file.tensors:
            if placed.box != Box.whole(placed.shape):
                told = {"shape": placed.shape, "start": placed.box.start, "stop": placed.box.stop}
                found.setdefault(file.path, {})[placed.name] = told
    return found
