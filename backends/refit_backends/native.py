"""Libraries written in C that are there already, or come with a package: found, loaded, never installed.

1. What this process has mapped comes first: torch brings its own, and a second copy beside it would be another version.
2. Then what the system's loader finds by name.
3. Then the folders of packages that bring such libraries (`nvidia/nccl/lib` and the like).
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def mapped(stem: str) -> str | None:
    """Where a library lies that this process has mapped, by the name before its version.

    >>> mapped("libnobodyhasthis")
    """
    found = re.compile(rf"/{re.escape(stem)}(-[0-9a-f]+)?\.so(\.[0-9.]+)?$")
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")]
    return next((path for path in paths if found.search(path)), None)


def candidates(stem: str, versions: tuple[str, ...], packages: tuple[str, ...]) -> Iterator[str]:
    """Paths and names under which a library may be loaded, the best first.

    >>> list(candidates("libnobodyhasthis", ("2",), ("nobody",)))
    ['libnobodyhasthis.so.2']
    """
    if (path := mapped(stem)) is not None:
        yield path
    yield from (f"{stem}.so.{version}" for version in versions)
    for folder in dict.fromkeys(sys.path):
        for package in packages:
            for version in versions:
                path_there = Path(folder, "nvidia", package, "lib", f"{stem}.so.{version}")
                if path_there.is_file():
                    yield str(path_there)


def load(stem: str, versions: tuple[str, ...], packages: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library, or None where there is none that loads."""
    for path in candidates(stem, versions, packages):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def path_of(library: ctypes.CDLL) -> str:
    """Where a loaded library lies, or the name that it was loaded by."""
    name = str(library._name)
    return mapped(Path(name).name.partition(".so")[0]) or name if "/" not in name else name
