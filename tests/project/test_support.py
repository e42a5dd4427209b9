"""The page of what moves over what is what a run of the conformance kit writes today, if every case that can moves."""

from __future__ import annotations

from pathlib import Path

from refit_sdk.errors import UnsupportedMoveError
from refit_sdk.plugins import registry
from refit_sdk.testing.cases import Case, catalogue
from refit_sdk.testing.rig import plan_of
from refit_sdk.testing.support import Row, page

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "support.md").read_text()
PAIRS = next(line for line in TEXT.splitlines() if line.startswith("| cases |")).strip("| ").split(" | ")[1:]


def end(case: Case, transport: str) -> tuple[str, str]:
    """What becomes of a case at planning."""
    try:
        plan_of(case, transport)
    except UnsupportedMoveError as refusal:
        return "refused", refusal.need
    return "moved", ""


def test_the_page_is_current() -> None:
    """If not: run the kit with `--refit-support docs/reference/support.md`."""
    ends = {name: [end(case, name) for case in catalogue()] for name in {pair.split(" over ")[0] for pair in PAIRS}}
    rows = [
        Row(pair, case.group, case.id, *told)
        for pair in PAIRS
        for case, told in zip(catalogue(), ends[pair.split(" over ")[0]], strict=True)
    ]
    assert page(rows) == TEXT


def test_the_page_names_plug_ins_that_are_there() -> None:
    for pair in PAIRS:
        transport, fabric = pair.split(" over ")
        assert transport in registry().names("transport")
        assert fabric in registry().names("fabric")
