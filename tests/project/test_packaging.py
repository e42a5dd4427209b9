"""What a distribution promises: typed packages, plug-ins by entry point, and versions that were tested."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINS = re.compile(r"^([\w.-]+)==([\w.]+)$")


@pytest.mark.parametrize("package", ["refit_sdk", "refit_backends", "refit_adapters"])
def test_packages_are_typed(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).with_name("py.typed").is_file()


def test_each_plugin_is_one_module_under_its_own_name() -> None:
    entries = importlib.metadata.distribution("refit-sdk").entry_points.select(group="refit_sdk")
    assert {entry.name for entry in entries} >= {"reshard", "gloo", "inproc", "fsdp", "dtensor"}
    assert all(entry.module.split(".")[-1] == entry.name and not entry.attr for entry in entries)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in ROOT.joinpath("constraints.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [PINS.match(line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if match is None] == []
    return {normal(match[1]): match[2] for match in matches if match}


def test_constraints_are_exact_and_without_build_tags() -> None:
    assert len(pins()) > 50


def test_everything_the_project_names_is_pinned() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())
    groups = [*project["dependency-groups"].values(), project["build-system"]["requires"]]
    groups += [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    named = {
        normal(re.split(r"[^\w-]", line, maxsplit=1)[0]) for group in groups for line in group if isinstance(line, str)
    }
    assert named - pins().keys() == set()


def test_what_is_installed_is_what_the_constraints_say() -> None:
    installed = {
        normal(distribution.metadata["Name"]): distribution.version.partition("+")[0]
        for distribution in importlib.metadata.distributions()
    }
    wanted = pins()
    assert {name: version for name, version in installed.items() if wanted.get(name, version) != version} == {}
