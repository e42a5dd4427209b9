"""Writing a checkpoint so that a crash at any moment leaves the old one, or the new one, whole. No torch.

For a directory `D`, all on one filesystem:

1. A rank writes its files under `D.writing`, at their full size from the start, so that a full disk shows at once.
2. When all its bytes are there, it flushes them to the disk and moves the files to `D.partial`, with its seal.
3. When every rank has confirmed, rank 0 looks whether all files and seals are there, adds indexes, `refit.json` and
   what is copied, flushes, and exchanges `D.partial` and `D` in one step. At `D.partial` then is the old one: it goes.

Where the filesystem can't exchange two directories, `D` is moved to `D.previous` first; a crash just then leaves `D`
missing and both others whole, and the next export, or `mv`, puts it back. A `D` with files that no export of ours wrote
is never replaced.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from refit_sdk.checkpoint import CheckpointError
from refit_sdk.exporting import RECORD, Export, File, texts

_EXCHANGE: Final = 2
_HERE: Final = -100
"""Of `renameat2`: exchange, and paths from the working directory."""

_TRIES: Final = 100


class Staging:
    """What one of `size` ranks writes of a checkpoint: every `size`-th file. The steps are the module's."""

    def __init__(self, export: Export, *, rank: int, size: int) -> None:
        self.export = export
        self.rank = rank
        self._size = size
        self._all = export.files()
        self.files = self._all[rank::size]
        beside = export.directory
        self._writing = beside.with_name(f"{beside.name}.writing")
        self._partial = beside.with_name(f"{beside.name}.partial")
        self._previous = beside.with_name(f"{beside.name}.previous")

    def create(self) -> Iterator[tuple[File, int]]:
        """Make this rank's files, at full size and with their headers; the descriptors are the caller's to close."""
        if self.rank == 0:
            self._recover()
            self._check_replaceable()
        for file in self.files:
            with self._told_as_ours("written"):
                descriptor = _created(self._temporary(file), file)
            yield file, descriptor

    def seal(self, file: File, descriptor: int) -> None:
        """All bytes of a file are there: flush it and move it to the others."""
        os.fsync(descriptor)
        path = self._partial / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._temporary(file), path)

    def seal_all(self, *, version: int) -> None:
        """All files of this rank are sealed, and hold this version."""
        self._partial.mkdir(parents=True, exist_ok=True)
        self._seal(self.rank).write_text(str(version))

    def unseal(self) -> None:
        """What this rank sealed before is not to be published."""
        self._seal(self.rank).unlink(missing_ok=True)

    def publish(self, *, version: int) -> None:
        """Rank 0, when all have confirmed: put the new checkpoint in the old one's place."""
        self._check_complete(version)
        with self._told_as_ours("published"):
            self._complete(version)
            self._swap()

    def _complete(self, version: int) -> None:
        """Add what goes along, remove what doesn't, and flush it all."""
        copied = [path.name for path in self.export.copied]
        added = texts(self._all, version=version, ranks=self.export.layout.size, copied=copied)
        for name, text in added.items():
            (self._partial / name).write_text(text, encoding="utf-8")
        for path in self.export.copied:
            shutil.copyfile(path, self._partial / path.name)
        for name in _tree(self._partial) - added.keys() - {*copied, *(file.path for file in self._all)}:
            (self._partial / name).unlink()
        for name in _tree(self._writing) - {file.path for file in self._all}:
            # Of a run that ended early. Other ranks' own names are all in the list, and they may be leaving meanwhile.
            (self._writing / name).unlink(missing_ok=True)
        _flush_tree(self._partial)
        self._check_replaceable()

    def discard(self) -> None:
        """Remove what this rank has begun to write, and has not sealed."""
        for file in self.files:
            self._temporary(file).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another rank that leaves may be faster
            for name in os.listdir(self._writing):
                if name.startswith("rank-"):
                    _remove_if_empty(self._writing / name)
        _remove_if_empty(self._writing)

    @contextmanager
    def _told_as_ours(self, verb: str) -> Iterator[None]:
        """What the system refuses is an error of ours, with the directory's name."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(self.export.directory, [str(error)], verb=verb) from error

    def _temporary(self, file: File) -> Path:
        return self._writing / file.path

    def _seal(self, rank: int) -> Path:
        return self._partial / f".sealed-{rank}"

    def _check_complete(self, version: int) -> None:
        problems = []
        for rank in range(self._size):
            seal = self._seal(rank)
            if not seal.is_file() or seal.read_text() != str(version):
                problems.append(f"{seal} isn't there for version {version}; do all ranks see the same filesystem?")
        for file in self._all:
            path = self._partial / file.path
            if not path.is_file() or path.stat().st_size != file.nbytes:
                problems.append(f"{path} isn't there with its {file.nbytes} bytes")
        if problems:
            raise CheckpointError(self.export.directory, problems, verb="published")

    def _check_replaceable(self) -> None:
        directory = self.export.directory
        if not os.path.lexists(directory):
            return
        if directory.is_symlink() or not directory.is_dir():
            raise CheckpointError(directory, ["it's there, and not a directory"], verb="replaced")
        if foreign := sorted(_tree(directory) - _recorded(directory)):
            told = f"it has {', '.join(foreign[:4])}{', …' if len(foreign) > 4 else ''}, which no export wrote"
            raise CheckpointError(
                directory, [f"{told}; give a directory that isn't there, or is empty"], verb="replaced"
            )

    def _recover(self) -> None:
        if not self.export.directory.exists() and self._previous.is_dir():
            os.rename(self._previous, self.export.directory)

    def _swap(self) -> None:
        directory = self.export.directory
        if not directory.exists():
            os.rename(self._partial, directory)
        elif exchange(self._partial, directory):
            _flush_folder(directory.parent)
            shutil.rmtree(self._partial)
        else:
            shutil.rmtree(self._previous, ignore_errors=True)
            os.rename(directory, self._previous)
            os.rename(self._partial, directory)
        _flush_folder(directory.parent)
        shutil.rmtree(self._previous, ignore_errors=True)


def _created(path: Path, file: File) -> int:
    """A descriptor of a new file of its full size, which has its header."""
    descriptor = _opened(path)
    try:
        os.posix_fallocate(descriptor, 0, file.nbytes)
        os.pwrite(descriptor, file.header, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(path: Path) -> int:
    """A descriptor of a new file. Ranks that leave remove folders that are empty: then the folder is made again."""
    for _ in range(_TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, f"its folder was removed {_TRIES} times while it was made", str(path))


def _recorded(directory: Path) -> set[str]:
    """The files that the export which wrote a directory says it wrote; none if it says nothing."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        return {str(name) for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _tree(folder: Path) -> set[str]:
    """All files of a folder, by their paths in it. A folder inside that somebody removes meanwhile has none."""
    found = set()
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found |= {os.path.relpath(os.path.join(place, name), folder) for name in (*files, *links)}
    return found


def _flush_tree(folder: Path) -> None:
    """Flush every file and folder, the innermost folders first, so that what was named is there after a crash."""
    for name in sorted(_tree(folder)):
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _flush_folder(inner)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; False where the system or the filesystem can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
