"""The reference pages say what is there: each hook with its exact signature, each command and option, each variable."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from refit_sdk import hookspecs
from refit_sdk.cli import app
from refit_sdk.plugins import PROTOCOLS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("refit_register_")}
COMMANDS = app.commands


def sections(page: str) -> dict[str, str]:
    """The text under each second-level heading, by the heading without its backquotes."""
    _, *parts = re.split(r"^## ", REFERENCE.joinpath(page).read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0].replace("`", ""): part.partition("\n")[2] for part in parts}


def signature(hook: str) -> str:
    return str(inspect.signature(HOOKS[hook])).replace("'", "")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_there_is_a_hook_for_every_kind() -> None:
    assert set(HOOKS) == {f"refit_register_{kind}s" for kind in PROTOCOLS}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_with_its_signature_and_prose(name: str) -> None:
    text = sections("hooks.md")[f"{name}{signature(name)}"]
    prose = inspect.getdoc(HOOKS[name])
    assert prose is not None
    assert prose.startswith("Called when ")
    assert flat(prose) in flat(text)


def test_no_hook_is_documented_that_is_not_there() -> None:
    documented = [heading.partition("(")[0] for heading in sections("hooks.md") if heading.startswith("refit_")]
    assert sorted(documented) == sorted(HOOKS)


@pytest.mark.parametrize("kind", PROTOCOLS)
def test_every_protocol_is_documented_by_its_members(kind: str) -> None:
    protocol = PROTOCOLS[kind]
    hook = f"refit_register_{kind}s"
    text = sections("hooks.md")[f"{hook}{signature(hook)}"]
    methods = [name for name, member in vars(protocol).items() if not name.startswith("_") and callable(member)]
    assert f"`{protocol.__module__}.{protocol.__name__}`" in text
    assert [name for name in methods if f"`{name}" not in text] == []


def test_every_command_and_option_is_documented() -> None:
    written = sections("cli.md")
    assert sorted(heading for heading in written if heading.startswith("refit ")) == sorted(
        f"refit {c}" for c in COMMANDS
    )
    absent = [
        f"{name} {option}"
        for name, command in COMMANDS.items()
        for parameter in command.params
        for option in parameter.opts
        if f"`{option}" not in written[f"refit {name}"] and option != "--help"
    ]
    assert absent == []


def variables() -> set[str]:
    """Every REFIT_ variable that a string of ours names."""
    found = set()
    for package in ("refit_sdk", "refit_backends", "refit_adapters"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for path in Path(spec.origin).parent.rglob("*.py"):
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            found |= {text for text in constants if isinstance(text, str) and re.fullmatch(r"REFIT_[A-Z_]+", text)}
    return found


def test_every_environment_variable_is_documented() -> None:
    documented = {heading for heading in sections("environment.md") if heading.startswith("REFIT_")}
    assert variables()
    assert documented == variables()
