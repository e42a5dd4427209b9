"""Counting over plain indices of whole tensors, without any of the planner's arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refit_sdk.box import Box
from refit_sdk.dtypes import ITEMSIZE
from refit_sdk.placement import Shard
from refit_sdk.plan import Plan
from refit_sdk.plugins import registry
from refit_sdk.settings import Settings
from refit_sdk.testing.cases import Case, case, catalogue, cut, elements
from refit_sdk.testing.models import Held
from refit_sdk.testing.rig import Played, plan_of
from refit_sdk.transport import Moves, Steps

Masks = dict[str, Any]


def classes_of(plan: Plan) -> set[str]:
    """How often a byte leaves its holder, by the records of the plan's transports; unknown ones have none."""
    names = {family.transport for family in plan.families}
    known = [registry().offer("transport", n).offered for n in names if n in registry().names("transport")]
    return {transport.capabilities.copies for transport in known} if len(known) == len(names) else set()


def crossings(played: Played) -> dict[str, tuple[int, int]]:
    """By engine and domain: bytes that crossed into the domain, as counted, and the unique ones that it lacks."""
    case, domain_of = played.case, played.plan.topology.domain_of
    found = {}
    for engine in case.engines:
        for domain in {domain_of(process) for process in range(len(case.processes))}:
            inside = [p for p in range(len(case.processes)) if domain_of(p) == domain]
            crossed = sum(
                nbytes
                for (name, src, dst), nbytes in played.arrived().items()
                if name == engine and dst in inside and src not in inside
            )
            found[f"domain {domain} for engine {engine}"] = (crossed, _unique(case, engine, inside))
    return found


def leaving(played: Played) -> tuple[int, int]:
    """Bytes that sources sent to targets of other domains, as counted, and the unique ones that each engine lacks.

    What sources gather among themselves, and what goes to a neighbour, is not what leaves.
    """
    case, domain_of = played.case, played.plan.topology.domain_of
    sources = {process for process, (rank, _) in enumerate(case.processes) if rank is not None}
    left = sum(
        nbytes
        for (_, src, dst), nbytes in played.arrived().items()
        if src in sources and dst not in sources and domain_of(src) != domain_of(dst)
    )
    everybody = list(range(len(case.processes)))
    return left, sum(_unique(case, engine, everybody, own=True) for engine in case.engines)


def _unique(case: Case, engine: str, inside: Sequence[int], *, own: bool = False) -> int:
    """Bytes of the elements that some of these processes need for an engine and none of them has (`own`: it hasn't
    itself)."""
    wanted: Masks = {}
    dtypes: dict[str, str] = {}
    held = [elements(case.sources[rank]) for p in inside if (rank := case.processes[p][0]) is not None]
    for process in inside:
        rank, seat = case.processes[process]
        if seat is None or seat[0] != engine:
            continue
        mine = elements(case.sources[rank]) if rank is not None else {}
        for name, (mask, stored) in elements(case.engines[engine][seat[1]]).items():
            lacks = mask & ~mine[name][0] if name in mine else mask
            wanted[name] = wanted.get(name, False) | lacks
            dtypes[name] = stored
    if not own:
        for have in held:
            wanted = {name: mask & ~have[name][0] if name in have else mask for name, mask in wanted.items()}
    return sum(
        int(mask.sum()) * min(ITEMSIZE[dtypes[name]], ITEMSIZE[case.dtypes[name]]) for name, mask in wanted.items()
    )


def misdelivered(moves: Moves, steps: Steps) -> Iterator[str]:
    """What is wrong with an answer: moves and processes that don't get every element once, from who has it."""
    by_move = defaultdict(list)
    for step in np.lexsort((steps.dst, steps.round)).tolist():
        by_move[int(steps.move[step])].append(step)
    for move in range(len(moves)):
        yield from _misdelivered(moves, steps, move, by_move[move])


def _misdelivered(moves: Moves, steps: Steps, move: int, of: list[int]) -> Iterator[str]:
    origin = moves.start[move]
    shape = tuple((moves.stop[move] - origin).tolist())
    holders = moves.holder[moves.holder_start[move] : moves.holder_start[move + 1]].tolist()
    when = {process: np.zeros(shape, np.int64) for process in holders}
    for step in of:
        src, dst, number = int(steps.src[step]), int(steps.dst[step]), int(steps.round[step]) + 1
        box = tuple(slice(a, b) for a, b in zip(steps.start[step] - origin, steps.stop[step] - origin, strict=True))
        if src not in when or (when[src][box] >= number).any():
            yield f"move {move}: {src} sends in round {number - 1} what it has not got"
        there = when.setdefault(dst, np.full(shape, 1 << 30))
        if (there[box] < 1 << 30).any():
            yield f"move {move}: {dst} gets an element twice"
        there[box] = number
    for process in moves.need[moves.need_start[move] : moves.need_start[move + 1]].tolist():
        if process not in when or (when[process] == 1 << 30).any():
            yield f"move {move}: {process} does not get all of it"


def digests(transport: str, ids: Sequence[str]) -> list[str]:
    """The digests of the plans of cases; empty for those that are refused."""
    from refit_sdk.errors import UnsupportedMoveError

    known, found = {case.id: case for case in catalogue()}, []
    for each in ids:
        try:
            found.append(plan_of(known[each], transport).digest)
        except UnsupportedMoveError:
            found.append("")
    return found


def digests_elsewhere(transport: str, ids: Sequence[str]) -> list[str]:
    """The same, of a fresh process whose hashes have another seed."""
    imports = "import json, sys; from refit_sdk.testing.reckoning import digests"
    script = f"{imports}; print(json.dumps(digests(*json.loads(sys.argv[1]))))"
    environ = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    command = [sys.executable, "-c", script, json.dumps([transport, list(ids)])]
    told = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    found: list[str] = json.loads(told.stdout.splitlines()[-1])
    return found


def row_by_row() -> Case:
    """Sources 0 and 1, and an engine of 2 and 3: eight windows, transposed at the targets, so that each is unpacked.

    Half of them are more than any system takes for a peer that doesn't read.
    """
    shape = (1024, 1 << 15)
    held = cut(shape, 2, Shard(1))
    rows = [Box.whole(shape).narrow(0, 512 * rank, 512 * rank + 512) for rank in range(2)]
    wanted = tuple((Held("layers.0.w", shape, box, strides=(1, 512)),) for box in rows)
    return case("row by row", held, wanted, settings=Settings(window_bytes=8 << 20))
