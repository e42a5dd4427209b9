"""What a session and an engine can be, and what leads from one state to the next: the two tables, as data.

The tables are the rendezvous's. A process that no longer hears the rendezvous after it confirmed knows one state more:
its engine is `in doubt`, and it fences itself.

>>> next_state(SESSION, SessionState.IDLE, "opened")
<SessionState.GATHERING: 'gathering'>
>>> next_state(ENGINE, EngineState.MOVING, "confirmed")
<EngineState.READY: 'ready'>
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar


class SessionState(StrEnum):
    """What the rendezvous is doing."""

    JOINING = "joining"
    FORMING = "forming"
    IDLE = "idle"
    GATHERING = "gathering"
    MOVING = "moving"
    BROKEN = "broken"
    CLOSED = "closed"


class EngineState(StrEnum):
    """What an engine is: `WAITING` for ranks or for the next push, `READY` to serve and receive, `TORN` and fenced."""

    WAITING = "waiting"
    READY = "ready"
    MOVING = "moving"
    TORN = "torn"
    LOST = "lost"
    PAUSED = "paused"


class PushState(StrEnum):
    """What a push left an engine as."""

    UNTOUCHED = "untouched"
    COMPLETE = "complete"
    IN_DOUBT = "in doubt"
    TORN = "torn"


S = TypeVar("S", bound=StrEnum)

SESSION: Final[Mapping[tuple[SessionState, str], SessionState]] = {
    (SessionState.JOINING, "complete"): SessionState.FORMING,
    (SessionState.JOINING, "fault"): SessionState.CLOSED,
    (SessionState.FORMING, "formed"): SessionState.IDLE,
    (SessionState.FORMING, "go"): SessionState.MOVING,
    (SessionState.FORMING, "fault"): SessionState.IDLE,
    (SessionState.FORMING, "source lost"): SessionState.BROKEN,
    (SessionState.IDLE, "opened"): SessionState.GATHERING,
    (SessionState.IDLE, "source lost"): SessionState.BROKEN,
    (SessionState.GATHERING, "changed"): SessionState.FORMING,
    (SessionState.GATHERING, "unchanged"): SessionState.FORMING,
    (SessionState.GATHERING, "fault"): SessionState.IDLE,
    (SessionState.GATHERING, "source lost"): SessionState.BROKEN,
    (SessionState.MOVING, "ended"): SessionState.IDLE,
    (SessionState.MOVING, "ended without a source"): SessionState.BROKEN,
    (SessionState.BROKEN, "opened"): SessionState.GATHERING,
    (SessionState.BROKEN, "source lost"): SessionState.BROKEN,
    **{(state, "closed"): SessionState.CLOSED for state in SessionState},
}

ENGINE: Final[Mapping[tuple[EngineState, str], EngineState]] = {
    (EngineState.WAITING, "formed"): EngineState.READY,
    (EngineState.READY, "formed"): EngineState.READY,
    (EngineState.READY, "go"): EngineState.MOVING,
    (EngineState.READY, "paused"): EngineState.PAUSED,
    (EngineState.PAUSED, "formed"): EngineState.PAUSED,
    (EngineState.PAUSED, "resumed"): EngineState.READY,
    (EngineState.MOVING, "confirmed"): EngineState.READY,
    (EngineState.MOVING, "failed untouched"): EngineState.READY,
    (EngineState.MOVING, "failed"): EngineState.TORN,
    (EngineState.TORN, "formed"): EngineState.TORN,
    (EngineState.TORN, "go"): EngineState.MOVING,
    **{(state, "rank lost"): EngineState.LOST for state in EngineState},
    (EngineState.LOST, "rejoined"): EngineState.WAITING,
}


def next_state(table: Mapping[tuple[S, str], S], state: S, event: str) -> S:
    """The state that an event leads to. An event that the table doesn't have is a fault of ours."""
    assert (state, event) in table, f"{state!r} has no way out for {event!r}"
    return table[state, event]
