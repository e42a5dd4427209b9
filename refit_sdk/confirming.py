"""What a rank does once it has moved, and what it then says of each engine: installed and confirmed, or why not.

1. As many bytes must have arrived as planned. Then the adapter installs; what was described may not move meanwhile.
2. A rank's word has the bytes of each engine by the fabric's completions, and the cause where the engine failed here.

>>> moved = Moved(seconds={}, sent={"a": 8}, arrived={}, failed={}, lost={}, mutated=frozenset())
>>> done_of({"a"}, moved, Install("", None), own="", speaker="source[0]", name=str)
{'a': EngineDone(sent=8, arrived=0, cause='', mutated=False, lost='')}
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from attrs import frozen

from refit_sdk.executor import Moved
from refit_sdk.messages import EngineDone
from refit_sdk.seat import Held


@frozen
class Install:
    """How installing went: a cause if it failed, and the exception where an adapter raised one."""

    cause: str
    error: Exception | None


def install(target: Held, moved: Moved, *, expected: int, version: int) -> Install:
    """Let a target's adapter install, and look at what must hold before this rank confirms. `expected` is in bytes."""
    engine = target.claim.engine
    if engine in moved.failed:
        return Install(moved.failed[engine], None)
    if moved.arrived.get(engine, 0) != expected:
        return Install(f"{moved.arrived.get(engine, 0)} bytes arrived, the plan has {expected}", None)
    try:
        target.install(version=version)
        has_moved = target.has_moved()
    except Exception as error:  # noqa: BLE001 - a hook's error travels to every rank, and is raised here at the end
        return Install(f"install failed: {type(error).__name__}: {error}", error)
    return Install("a tensor that was described was rebound or reshaped during the push" if has_moved else "", None)


def done_of(
    engines: Collection[str],
    moved: Moved,
    installed: Install | None,
    *,
    own: str,
    speaker: str,
    name: Callable[[int], str],
) -> dict[str, EngineDone]:
    """This rank's word of each engine. `own` is the engine that it is a rank of, `name` gives a process's ranks."""
    done = {}
    for engine in sorted(engines):
        install = installed if engine == own else None
        mutated = engine == own and (engine in moved.mutated or (install is not None and install.error is not None))
        cause = install.cause if install is not None else moved.failed.get(engine, "")
        lost = name(moved.lost[engine]) if engine in moved.lost else ""
        text = f"{speaker} {cause}" if lost else cause
        done[engine] = EngineDone(moved.sent.get(engine, 0), moved.arrived.get(engine, 0), text, mutated, lost)
    return done
