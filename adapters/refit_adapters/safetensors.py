"""`safetensors`: a Hugging Face directory, as source (a `pathlib.Path`) and as target (an `Export`).

As source every rank holds all of the checkpoint, memory-mapped, and only what it sends is ever read. As target a rank's
files are memory-mapped too, so what arrives is written where it belongs:

1. `describe` makes the files, beside the directory, and gives views of them.
2. `install` flushes them to the disk. Nothing of the old checkpoint has been touched so far.
3. `unfence`, when every rank has confirmed, puts the new checkpoint in the old one's place. The next push writes anew.

Pages of files are dropped from memory after every window, so that what is read and written doesn't pile up.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import frozen

from refit_sdk.adapter import Fragment, SourceAdapter, TargetAdapter
from refit_sdk.box import Box
from refit_sdk.checkpoint import TORCH_NAMES, CheckpointError, stored_tensors
from refit_sdk.errors import LayoutError
from refit_sdk.exporting import Export, File
from refit_sdk.hookspecs import hookimpl
from refit_sdk.staging import Staging


def _view(mapped: mmap.mmap, dtype: str, shape: Sequence[int], begin: int) -> torch.Tensor:
    """A tensor over the bytes of a mapped file."""
    named: torch.dtype = getattr(torch, dtype)
    count = Box.whole(tuple(shape)).size
    with warnings.catch_warnings():
        # Of a file mapped for reading only, torch warns that a tensor could be written; a source's never is.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=named, count=count, offset=begin).view(tuple(shape))


def _drop_pages(mapped: mmap.mmap) -> None:
    """Take a file's pages out of this process; the system has those that were written, and stores them."""
    mapped.madvise(mmap.MADV_DONTNEED)


class SafetensorsSource:
    """A directory whose tensors are read: `pathlib.Path`."""

    name: ClassVar[str] = "safetensors"

    def __init__(self, model: Path, *, rank: int, size: int) -> None:
        self._directory = model
        self._mapped: list[mmap.mmap] = []

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether the object is a path."""
        return isinstance(model, Path)

    def prepare(self) -> None:
        """Nothing to do: what is in the files is what is sent."""

    def describe(self) -> Sequence[Fragment]:
        """Every tensor of the directory, mapped. `CheckpointError` if the directory lies or a file is cut short."""
        stored = {name: told for name, told in stored_tensors(self._directory).items() if 0 not in told.shape}
        if strange := sorted(name for name, told in stored.items() if told.dtype not in TORCH_NAMES):
            problems = [f"{name} has dtype {stored[name].dtype}, which can't be moved" for name in strange]
            raise CheckpointError(self._directory, problems)
        files = {file: _mapped(self._directory / file) for file in sorted({told.file for told in stored.values()})}
        self._mapped = list(files.values())
        return tuple(
            Fragment(
                name, told.shape, Box.whole(told.shape),
                _view(files[told.file], TORCH_NAMES[told.dtype], told.shape, told.begin),
            )
            for name, told in stored.items()
        )  # fmt: skip

    def identity(self) -> Hashable:
        """Changes when a file is replaced, rewritten or removed."""
        listed = sorted((*self._directory.glob("*.safetensors"), *self._directory.glob("*.index.json")))
        stats = [(path.name, os.stat(path)) for path in listed if path.exists()]
        return tuple((name, told.st_ino, told.st_dev, told.st_size, told.st_mtime_ns) for name, told in stats)

    def trim(self) -> None:
        """Let go of the pages that were read."""
        for mapped in self._mapped:
            _drop_pages(mapped)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


@frozen(eq=False)
class _Open:
    """A file that is being written."""

    file: File
    descriptor: int
    mapped: mmap.mmap


class SafetensorsTarget:
    """A directory that a push writes: an `Export`. Every push makes all of it, so nothing may be frozen."""

    name: ClassVar[str] = "safetensors"
    needs_all: ClassVar[bool] = True

    def __init__(self, model: Export | Path, *, rank: int, size: int) -> None:
        if not isinstance(model, Export):
            raise LayoutError(
                f"{model} can't be written as it is: a target must say which tensors it takes; pass "
                f"refit_sdk.exporting.Export.like(checkpoint, {str(model)!r}), with a checkpoint that has the same ones"
            )
        self._staging = Staging(model, rank=rank, size=size)
        self._open: list[_Open] = []
        self._generation = 0
        self._sealed: int | None = None
        self.fenced: str | None = None
        weakref.finalize(self, _give_up, self._staging, self._open)

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether the object is an `Export`, or a path, of which the error says what to pass."""
        return isinstance(model, Export | Path)

    def describe(self) -> Sequence[Fragment]:
        """This rank's files, made beside the directory, as views. `CheckpointError` if the directory isn't ours."""
        _close(self._open)
        for file, descriptor in self._staging.create():
            self._open.append(_Open(file, descriptor, mmap.mmap(descriptor, file.nbytes)))
        return tuple(
            Fragment(held.name, held.shape, held.box, _view(each.mapped, held.dtype, held.box.shape, held.begin))
            for each in self._open
            for held in each.file.tensors
            if held.nbytes
        )

    def identity(self) -> Hashable:
        """Changes when a checkpoint was published: the next one is written into other files."""
        return self._generation

    def trim(self) -> None:
        """Let go of the pages that were written; the system stores them."""
        for each in self._open:
            _drop_pages(each.mapped)

    def install(self, *, version: int) -> None:
        """Flush this rank's files to the disk."""
        for each in self._open:
            each.mapped.flush()
            self._staging.seal(each.file, each.descriptor)
        self._staging.seal_all(version=version)
        self._sealed = version

    def fence(self, reason: str) -> None:
        """Nothing to keep from serving, as the old checkpoint stays where it is; the reason is kept in `fenced`."""
        self.fenced, self._sealed = reason, None
        self._staging.unseal()

    def unfence(self) -> None:
        """Publish, if a push was installed: on rank 0 the new checkpoint takes the old one's place."""
        version, self._sealed, self.fenced = self._sealed, None, None
        if version is None:
            return
        self._generation += 1
        _close(self._open)
        if self._staging.rank == 0:
            self._staging.publish(version=version)

    def close(self) -> None:
        """Remove what was begun and never published."""
        _give_up(self._staging, self._open)


def _close(opened: list[_Open]) -> None:
    """Give back descriptors; a mapping goes with the last view of it."""
    while opened:
        os.close(opened.pop().descriptor)


def _give_up(staging: Staging, opened: list[_Open]) -> None:
    _close(opened)
    staging.discard()


@hookimpl
def refit_register_source_adapters() -> list[type[SourceAdapter]]:
    """The adapter of this module, for directories that are read."""
    return [SafetensorsSource]


@hookimpl
def refit_register_target_adapters() -> list[type[TargetAdapter]]:
    """The adapter of this module, for directories that are written."""
    return [SafetensorsTarget]
