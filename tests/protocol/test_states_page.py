"""The page of the states is that of the tables in the code. Run as a script, it writes them into the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import pytest

from refit_sdk.states import ENGINE, SESSION, EngineState, PushState, SessionState

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "states.md"
TABLES = {"session": SESSION, "engine": ENGINE}
STATES: dict[str, type[StrEnum]] = {"session": SessionState, "engine": EngineState, "push": PushState}


def table(transitions: Mapping[tuple[StrEnum, str], StrEnum]) -> str:
    """The transitions as Markdown: a row a state and event, events that lead the same way together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in transitions.items():
        rows.setdefault((str(state), str(after)), []).append(event)
    order = {str(state): number for number, state in enumerate(type(next(iter(transitions))[0]))}
    lines = [
        f"| {state} | {', '.join(sorted(events))} | {after} |"
        for (state, after), events in sorted(rows.items(), key=lambda row: (order[row[0][0]], order[row[0][1]]))
    ]
    return "\n".join(["| in | on | to |", "|---|---|---|", *lines])


def marked(name: str) -> re.Pattern[str]:
    """The part of the page that a table is in."""
    return re.compile(rf"(?<=<!-- {name}: from the code -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table_of_the_code(name: str) -> None:
    (found,) = marked(name).findall(PAGE.read_text())
    assert found == table(TABLES[name])


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_explained(name: str) -> None:
    written = PAGE.read_text()
    assert [str(state) for state in STATES[name] if f"\n| `{state}` |" not in written] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_event_is_explained(name: str) -> None:
    written = PAGE.read_text()
    assert [event for _, event in TABLES[name] if f"\n| *{event}* |" not in written] == []


if __name__ == "__main__":
    text = PAGE.read_text()
    for each, transitions in TABLES.items():
        text = marked(each).sub(lambda _, t=transitions: table(t), text)  # type: ignore[misc]
    PAGE.write_text(text)
