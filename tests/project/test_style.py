"""What can be checked of how we write: docstrings, sizes, and words that are not ours to leave behind."""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parents[2]
Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources() -> list[Path]:
    found: list[Path] = []
    for package in ("refit_sdk", "refit_backends", "refit_adapters"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        found += Path(spec.origin).parent.rglob("*.py")
    assert found
    return sorted(found)


SOURCES = sources()


def name(path: Path) -> str:
    return "/".join(path.parts[-2:])


def is_public(node: ast.AST) -> bool:
    return isinstance(node, Def) and not node.name.startswith("_")


def public(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Def]]:
    for node in tree.body:
        if isinstance(node, Def) and is_public(node):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_public_object_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module itself"
    assert [label for label, node in public(tree) if not ast.get_docstring(node)] == []


def test_functions_are_short_and_modules_no_long_rooms() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    lengths = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
    ]
    assert median(lengths) <= 8
    assert quantiles(lengths, n=10)[-1] <= 25
    assert [name(path) for path in SOURCES if len(path.read_text().splitlines()) > 400] == []


UNWANTED = {
    "a note to come back": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a banner": re.compile(r"^\s*#\s*([-=*#~])\1{3,}", re.MULTILINE),
    "a path of one machine": re.compile(r"(?<![\w.\-}/:])/(home|root|Users|mnt|work|data)/\w"),
}


def written() -> list[Path]:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    suffixes = {".py", ".md", ".toml", ".ini", ".txt", ""}
    paths = [ROOT / line for line in listed if line and Path(line).suffix in suffixes]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


@pytest.mark.parametrize("what", UNWANTED)
def test_nothing_unwanted_is_left_in_the_text(what: str) -> None:
    paths = written()
    assert paths
    hits = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in paths
        for text in [path.read_text()]
        for match in UNWANTED[what].finditer(text)
    ]
    assert hits == []
