"""`refit doctor`: every plug-in, where it comes from, whether it can be used here, and if not why and what to install.

It leaves with 1 if a plug-in is broken (it doesn't import, its class doesn't fit, two share a name), or if one that was
asked for by name can't be used here. A plug-in that merely lacks its device or library is no fault of the installation.
"""

from __future__ import annotations

import importlib.metadata
import platform

import click
from click.exceptions import Exit
from rich.console import Console

from refit_sdk import __version__
from refit_sdk.plugins import Finding, Registry, registry
from refit_sdk.render.doctor import to_json, to_table

_KINDS_OF_OPTION = {
    "adapter": ("source_adapter", "target_adapter"),
    "transport": ("transport",),
    "fabric": ("fabric",),
    "engine_control": ("engine_control",),
    "paper_layout": ("paper_layout",),
    "architecture": ("architecture",),
    "observer": ("observer",),
}
_OPTIONS = [click.Option([f"--{option.replace('_', '-')}"], metavar="NAME") for option in _KINDS_OF_OPTION]


@click.command(params=[*_OPTIONS])
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(*, as_json: bool, **asked: str | None) -> None:
    """Show every plug-in, or those asked for by name: where it comes from, usable here or not, why, what to install."""
    wanted = {option: name for option, name in asked.items() if name is not None}
    findings = _asked_for(registry(), wanted) if wanted else registry().findings()
    if as_json:
        click.echo(to_json(_versions(), findings))
    else:
        _print_table(findings)
    if any(not finding.usable if wanted else finding.broken for finding in findings):
        raise Exit(1)


def _print_table(findings: tuple[Finding, ...]) -> None:
    console = Console()
    console.print(to_table(_versions(), findings))
    for name in registry().unmatched:
        console.print(f"REFIT_PLUGINS names {name!r}, which is no plug-in here", highlight=False, markup=False)


def _asked_for(plugins: Registry, wanted: dict[str, str]) -> tuple[Finding, ...]:
    found: list[Finding] = []
    for option, name in wanted.items():
        kinds = _KINDS_OF_OPTION[option]
        matches = [finding for finding in plugins.findings() if finding.kind in kinds and finding.name == name]
        if not matches:
            plugins.offer(kinds[0], name)
        found += matches
    return tuple(found)


def _versions() -> dict[str, str]:
    """Of ourselves, Python and torch, without importing torch."""
    return {
        "refit_sdk": __version__,
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }
