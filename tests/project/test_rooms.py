"""Imports point one way, from the shell down to geometry, and each room imports only what it may.

Imports under `if TYPE_CHECKING:` are not counted: they name types, and run nothing.
"""

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from attrs import frozen

ROOMS = {
    "geometry": "errors dtypes box tensor mesh placement layout",
    "planning": "asked cluster settings topology world aliases families transport relays program overlap pieces "
    "coverage cuts balance moves windows summary cost estimate choosing routes plan",
    "moving": "adapter packing fused runs fabric executor binding bits device narrowing",
    "files": "checkpoint tensor_parallel exporting staging",
    "protocol": "fold views manifest messages control membership agreement states push verify report seat participant "
    "coordinator hub raising mover gathering rounds table outcome excuses admission steering confirming columns "
    "sharing stated",
    "doors": "hookspecs interface offers plugins",
    "façades": "whereabouts joining driving session controller",
    "shell": "cli render measuring testing demo",
}
"""The rooms, lowest first, and what is in each: modules and packages of refit_sdk."""

ORDER = {module: level for level, modules in enumerate(ROOMS.values()) for module in modules.split()}
ROOM = {module: room for room, modules in ROOMS.items() for module in modules.split()}
UPWARD = {("plan", "render.plan"), ("plan", "render.drawing"), ("report", "render.report")}
"""Imports that point up all the same: tables and pictures are the shell's, imported when asked for."""

WITH_TORCH = {"moving", "shell"}
PLUGIN_MAY_IMPORT = {"geometry", "planning", "moving", "files", "protocol", "doors"}
OPENS_SESSIONS = {"refit_adapters.vllm_plugin"}
"""Plug-ins of an engine, not of ours: they open a session inside it, as its user would."""


@frozen
class Module:
    """A module of ours: its dotted name, and its imports with whether each runs as the module is imported."""

    name: str
    imports: tuple[tuple[str, bool], ...]

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def part(self) -> str:
        """The module or package of refit_sdk that has a room."""
        return self.name.split(".")[1] if "." in self.name else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree: ast.AST, *, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            yield from ((f"{node.module}.{alias.name}", at_import) for alias in node.names)
        elif not is_type_checking(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, at_import=at_import and not inside)


def modules() -> list[Module]:
    found = []
    for package in ("refit_sdk", "refit_backends", "refit_adapters"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            parts = (package, *path.relative_to(root).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, tuple(imports(ast.parse(path.read_text())))))
    return found


MODULES = modules()
NAMES = {module.name for module in MODULES}
CORE = [module for module in MODULES if module.package == "refit_sdk" and module.part]
PLUGINS = [module for module in MODULES if module.package != "refit_sdk"]


def target(imported: str) -> str:
    """The module that an imported name is in, or is; other packages' names as they are."""
    while imported not in NAMES and "." in imported and imported.startswith("refit_"):
        imported = imported.rpartition(".")[0]
    return imported


def test_every_module_has_one_room() -> None:
    listed = " ".join(ROOMS.values()).split()
    assert len(listed) == len(set(listed))
    assert sorted({module.part for module in CORE} - ORDER.keys()) == []


@pytest.mark.parametrize("module", CORE, ids=lambda module: module.name)
def test_imports_point_one_way(module: Module) -> None:
    upward = [
        imported
        for name, _ in module.imports
        if (imported := target(name)).startswith("refit_sdk.")
        and ORDER.get(imported.split(".")[1], 0) > ORDER.get(module.part, 0)
        and (module.part, imported.removeprefix("refit_sdk.")) not in UPWARD
    ]
    assert upward == []


@pytest.mark.parametrize("exception", UPWARD, ids=str)
def test_exceptions_are_made_inside_functions(exception: tuple[str, str]) -> None:
    part, imported = exception
    (module,) = (module for module in CORE if module.name == f"refit_sdk.{part}")
    assert {at_import for name, at_import in module.imports if target(name) == f"refit_sdk.{imported}"} == {False}


@pytest.mark.parametrize("module", CORE, ids=lambda module: module.name)
def test_the_core_knows_no_plugin(module: Module) -> None:
    assert [name for name, _ in module.imports if name.startswith(("refit_backends", "refit_adapters"))] == []


@pytest.mark.parametrize("module", PLUGINS, ids=lambda module: module.name)
def test_plugins_import_the_core_and_not_each_other(module: Module) -> None:
    other = {"refit_backends": "refit_adapters", "refit_adapters": "refit_backends"}[module.package]
    found = [target(name) for name, _ in module.imports]
    assert [name for name in found if name.startswith(other)] == []
    parts = [name.split(".")[1] for name in found if name.startswith("refit_sdk.")]
    may = PLUGIN_MAY_IMPORT | ({"façades"} if module.name in OPENS_SESSIONS else set())
    assert [part for part in parts if ROOM.get(part) not in may] == []


@pytest.mark.parametrize("module", CORE, ids=lambda module: module.name)
def test_torch_is_for_the_moving_rooms(module: Module) -> None:
    if ROOM.get(module.part) not in WITH_TORCH:
        assert [name for name, _ in module.imports if name.split(".")[0] == "torch"] == []


def test_no_two_modules_need_each_other() -> None:
    graph = {
        module.name: {target(name) for name, at_import in module.imports if at_import and target(name) in NAMES}
        for module in MODULES
    }
    order = list(TopologicalSorter({name: needs - {name} for name, needs in graph.items()}).static_order())
    assert set(order) == NAMES


def base_distributions() -> set[str]:
    """What an installation without extras brings: us, and everything we need, all the way down."""
    found: set[str] = set()
    waiting = ["refit-sdk"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        waiting += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs if "extra ==" not in need]
    return found


def foreign_packages() -> list[str]:
    """Import names that only packages outside a base installation have."""
    base = base_distributions()
    by_name = importlib.metadata.packages_distributions()
    return sorted(
        name for name, owners in by_name.items() if not {re.sub(r"[-_.]+", "-", o).lower() for o in owners} & base
    )


IMPORT_ALL = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {names}:
    importlib.import_module(name)
"""


def test_every_module_imports_where_nothing_but_our_dependencies_is() -> None:
    absent = foreign_packages()
    assert {"pytest", "hypothesis", "transformers", "ml_dtypes"} <= set(absent)
    assert not {"torch", "numpy", "attr", "rich"} & set(absent)
    kit = "refit_sdk.testing"
    names = [name for name in sorted(NAMES) if not name.startswith(kit) and not name.endswith("__main__")]
    script = IMPORT_ALL.format(absent=set(absent), names=names)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_frameworks_are_imported_inside_functions(module: Module) -> None:
    allowed = {*sys.stdlib_module_names, "attrs", "click", "msgspec", "numpy", "pluggy", "rich", "safetensors", "torch"}
    if module.name.startswith("refit_sdk.testing"):
        allowed |= {"pytest", "hypothesis", "ml_dtypes"}
    packages = {name.split(".")[0] for name, at_import in module.imports if at_import}
    assert sorted(package for package in packages - allowed if not package.startswith("refit_")) == []


def test_the_kit_rewrites_assertions_of_its_suites() -> None:
    script = "import refit_sdk.testing, pkgutil; print(len(list(pkgutil.iter_modules(refit_sdk.testing.__path__))))"
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
