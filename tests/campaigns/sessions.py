"""Sessions opened and ended in every way, on real processes: nothing of them may be left.

1. A session: two sources and two targets on one host, or on two that are stated, over one of the ways to move bytes.
2. It ends: closed, closed with a reason, or one of its ranks, or all at once, killed at a random moment: while they
   join, between pushes, or in a push.
3. Survivors are told to go, and all processes must end. Then: no process, no socket that they listened on, no segment
   that anybody has mapped, and no new file in /dev/shm.

    python tests/campaigns/sessions.py                 # fifty sessions
    python tests/campaigns/sessions.py --slice ci      # a few, always the same
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "refit"))

from nodes import Cast, Place, cast, columns, rows  # noqa: E402

from refit_sdk.testing.ranks import free_rendezvous  # noqa: E402

WAYS = {"one copy": "shm", "two copies": "two copies", "two hosts": "mixed", "one host": "mixed"}
ENDS = ("closed", "closed with a reason", "one killed", "all killed")
MOMENTS = ("joining", "idle", "pushing")
DEADLINE, HEARTBEAT = 5.0, 3.0
MARGIN = 30.0


def places(way: str) -> list[Place]:
    """The ranks of a session."""
    where, made = free_rendezvous(), []
    for rank in range(2):
        host = f"h{rank}" if way == "two hosts" else ""
        common = {"where": where, "rank": rank, "size": 2, "fabric": WAYS[way], "host": host}
        common |= {"deadline": DEADLINE, "heartbeat": HEARTBEAT}
        made.append(Place(held=rows(rank, 2), engines=("a",), **common))
        made.append(Place(held=columns(rank, 2), engine="a", **common))
    return made


def start(crew: Cast, moment: str, chance: random.Random) -> list[str]:
    """Bring the ranks to a moment; those that owe an answer."""
    names = list(crew.ranks)
    if moment != "joining":
        crew.together(dict.fromkeys(names, ("join",)))
        crew.push(1)
    if moment == "idle":
        return []
    for name, verb in crew.verbs(2).items():
        crew.start(name, *(("join",) if moment == "joining" else verb))
    time.sleep(chance.uniform(0, 0.1))
    return names


def end(crew: Cast, how: str, owing: list[str], chance: random.Random) -> list[str]:
    """End the session; the ranks that live and have said all that they owe."""
    names = list(crew.ranks)
    struck = {"one killed": [chance.choice(names)], "all killed": names}.get(how, [])
    for name in struck:
        crew.ranks[name].kill()
    living = [name for name in names if name not in struck]
    for name in living:
        if name in owing:
            crew.told(name, timeout=3 * DEADLINE + HEARTBEAT + MARGIN)
    for name in living:
        crew.start(name, "close", *(["the test ends it"] if how == "closed with a reason" else []))
    for name in living:
        crew.told(name, timeout=MARGIN)
        crew.ranks[name].go("go home")
    return living


def files() -> list[str]:
    """Files of ours in the one directory where segments can have names."""
    return [str(path) for path in Path("/dev/shm").iterdir() if "refit" in path.name]


def left_by(pids: list[int]) -> list[str]:
    """Processes, sockets and segments of these processes."""
    found = [f"process {pid} is there" for pid in pids if Path(f"/proc/{pid}").exists()]
    names = Path("/proc/net/unix").read_text().splitlines()
    found += [line for line in names if any(f"refit-{pid}-" in line for pid in pids)]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        found += [f"{maps}: {line}" for line in lines if any(f"memfd:refit-{pid} " in f"{line} " for pid in pids)]
    return found


def one(way: str, how: str, moment: str, chance: random.Random) -> list[str]:
    """Open and end one session; what is left."""
    with cast(places(way), join=False) as crew:
        pids = [rank.process.pid for rank in crew.ranks.values()]
        owing = start(crew, moment, chance)
        for name in end(crew, how, owing, chance):
            crew.ranks[name].process.join(MARGIN)
    return left_by(pids)


def main() -> int:
    """Try them; 1 if anything was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", choices=["ci"], help="a few, always the same")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    told = parser.parse_args()
    chance = random.Random(told.seed)
    tries = list(product(WAYS, ENDS, MOMENTS))
    chance.shuffle(tries)
    tries = (tries * (1 + told.count // len(tries)))[: 6 if told.slice else told.count]
    faults = []
    for number, (way, how, moment) in enumerate(tries, 1):
        begun = time.monotonic()
        found = one(way, how, moment, chance)
        faults += [f"session {number} ({way}, {how}, {moment}): {line}" for line in found]
        print(f"{number:3} {way:11} {how:21} {moment:8} {time.monotonic() - begun:6.1f} s", *found, flush=True)
    faults += [f"a file is left: {name}" for name in files()]
    print(f"sessions: {len(tries)} opened and ended, {len(faults)} things left", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
