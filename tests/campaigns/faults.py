"""Random sequences of pushes, kills, stops, returns and reforms on real processes; what is said of them must be true.

1. An episode: a controller, two sources that both hold everything, the engine `a` of two ranks and `b` of one, over the
   fabrics in turn, one an episode.
2. A step: a push; or a rank is killed or stopped, idle or at a stage of a push. All others must raise in time and name
   it, or have committed; and what is said of an engine must be what its bytes and fences are.
3. After a loss the survivors re-form, or a new process takes the seat, or both; the next push must be exact.
4. An episode ends with the controller killed in the middle of a push: all raise.

    python tests/campaigns/faults.py                   # whole: writes docs/reference/fault-campaign.md
    python tests/campaigns/faults.py --slice ci        # a small one, always the same
    python tests/campaigns/faults.py --seed 7 --episodes 1
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "refit"))

from attrs import define, evolve, field, frozen  # noqa: E402
from nodes import Cast, Place, Told, cast, columns, whole  # noqa: E402
from truths import engine_of, is_target, silent, unfenced, unnamed, untruths  # noqa: E402

from refit_sdk.testing.ranks import free_rendezvous  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "fault-campaign.md"
DEADLINE, HEARTBEAT, MARGIN = 10.0, 3.0, 60.0
FABRICS = ("gloo", "mixed", "tcp", "two copies", "two hosts")
HOSTS = {"source[0]": "x", "source[1]": "y", "a[0]": "x", "a[1]": "y", "b[0]": "x"}
STAGES = {
    "source": ("idle", "preparing", "agreeing", "moving", "confirmed"),
    "target": ("idle", "looking", "agreeing", "moving", "installing", "confirmed"),
}


@frozen
class Row:
    """What was tried: how, at which stage, on which side."""

    how: str
    stage: str
    side: str


@define
class Tally:
    """What a campaign has seen. `states` counts, by what was tried, what was said of the engines."""

    tries: Counter[Row] = field(factory=Counter)
    states: Counter[tuple[Row, str]] = field(factory=Counter)
    pushes: int = 0
    faults: list[str] = field(factory=list)


def places(fabric: str) -> list[Place]:
    """The ranks of an episode. On two hosts, which are stated, the fabric is `mixed`, and everything is relayed."""
    common = {"where": free_rendezvous(), "deadline": DEADLINE, "heartbeat": HEARTBEAT}
    common["fabric"] = "mixed" if fabric == "two hosts" else fabric
    made = [Place(rank=r, size=2, held=whole(), engines=("a", "b"), **common) for r in range(2)]  # type: ignore[arg-type]
    made += [Place(engine="a", rank=r, size=2, held=columns(r, 2), **common) for r in range(2)]  # type: ignore[arg-type]
    made.append(Place(engine="b", rank=0, size=1, held=whole(), **common))  # type: ignore[arg-type]
    if fabric != "two hosts":
        return made
    return [evolve(place, host=HOSTS[str(place)], transport="broadcast") for place in made]


@define
class Episode:
    """One session's life."""

    crew: Cast
    places: dict[str, Place]
    random: random.Random
    tally: Tally
    name: str
    version: int = 0
    lost: set[str] = field(factory=set)
    held: dict[str, str] = field(factory=dict)

    def check(self, right: bool, what: object) -> None:
        """Keep a fault."""
        if not right:
            self.tally.faults.append(f"{self.name}, version {self.version}: {what}")

    def ranks(self) -> list[str]:
        """Those that are in a push: the living, whose engine has all its ranks."""
        halved = {engine_of(name) for name in self.lost if is_target(name)}
        return [name for name in self.places if name not in self.lost and engine_of(name) not in halved]

    def outside(self) -> list[str]:
        """Those that aren't."""
        return [name for name in self.places if name not in self.ranks()]

    def push(self) -> None:
        """A push that must be exact."""
        self.version += 1
        self.tally.pushes += 1
        targets = [name for name in self.ranks() if is_target(name)]
        told = self.crew.push(self.version, but=self.outside(), first=targets)
        self.check(silent(told) == list(told), {name: each.text for name, each in told.items() if each.raised})
        wrong = {
            n: (told[n].content, told[n].fenced)
            for n in targets
            if told[n].content != str(self.version) or told[n].fenced
        }
        self.check(not wrong, wrong)
        self.held.update({name: told[name].content for name in targets})

    def strike(self) -> None:
        """A loss, what is said of it, and what comes after."""
        may_be_lost = [name for name in self.ranks() if self.may_be_lost(name)]
        if not may_be_lost:
            self.come_back()
            return
        victim = self.random.choice(may_be_lost)
        stage = self.random.choice(STAGES["target" if is_target(victim) else "source"])
        row = Row(self.random.choice(("killed", "stopped")), stage, "target" if is_target(victim) else "source")
        self.tally.tries[row] += 1
        self.version += 1
        heard = self.fell(victim, row)
        for each in heard.values():
            self.tally.states.update((row, state) for state in set(each.engines.values()))
        self.judge(heard, victim, row)
        self.lost.add(victim)
        self.recover(victim)

    def may_be_lost(self, name: str) -> bool:
        """Whether a source and an engine are left without it."""
        left = [other for other in self.ranks() if other != name and engine_of(other) != engine_of(name)]
        others = [other for other in self.ranks() if other != name]
        return any(not is_target(other) for other in others) and (not is_target(name) or any(map(is_target, left)))

    def fell(self, victim: str, row: Row) -> dict[str, Told]:
        """Strike, and hear the others, and the stopped one when it goes on."""
        others = [name for name in self.ranks() if name != victim]
        if row.stage == "idle":
            self.signal(victim, row)
            heard = self.crew.push(self.version, but=[*self.outside(), victim], first=list(filter(is_target, others)))
        else:
            self.crew.ask(victim, "holds", row.stage, self.random.randint(1, 3) if row.stage == "moving" else 1)
            self.crew.begin(self.version, held=[victim], but=self.outside())
            self.crew.at_stage(victim)
            self.signal(victim, row)
            heard = {name: self.crew.told(name, timeout=DEADLINE + HEARTBEAT + MARGIN) for name in others}
        if row.how == "stopped":
            self.go_on(victim, row)
        return heard

    def signal(self, victim: str, row: Row) -> None:
        """Kill or stop."""
        if row.how == "killed":
            self.crew.ranks[victim].kill()
        else:
            self.crew.ranks[victim].signal(signal.SIGSTOP)

    def go_on(self, victim: str, row: Row) -> None:
        """Let a stopped rank run: it ends with an error or with a push that was complete; then it is gone for good."""
        self.crew.ranks[victim].signal(signal.SIGCONT)
        if row.stage != "idle":
            self.crew.release(victim)
            told = self.crew.told(victim, timeout=3 * DEADLINE + MARGIN)
            well = told.raised in ("PushError", "RendezvousError") or set(told.engines.values()) == {"complete"}
            self.check(well, f"{victim}, going on: {told}")
            if is_target(victim):
                safe = told.fenced or told.content in (str(self.version), self.held.get(victim, "poison"))
                self.check(bool(safe), f"{victim}, going on, serves {told.content}")
        self.crew.ranks[victim].kill()

    def judge(self, heard: dict[str, Told], victim: str, row: Row) -> None:
        """Hold what was said against what is."""
        before = {name: self.held.get(name, "poison") for name in heard}
        about = f"{victim} {row.how}, {row.stage}"
        self.check(
            not untruths(heard, before=before, version=self.version),
            (about, untruths(heard, before=before, version=self.version)),
        )
        self.check(not unfenced(heard), (about, "serve", unfenced(heard)))
        self.check(not unnamed(heard, victim), (about, unnamed(heard, victim)))
        committed = [name for name in silent(heard) if set(heard[name].engines.values()) != {"complete"}]
        self.check(not committed, (about, "neither raised nor complete", committed))
        self.held.update({name: told.content for name, told in heard.items() if is_target(name)})

    def recover(self, victim: str) -> None:
        """Re-form, or let a new process come, or both."""
        how = self.random.choice(("reform", "return", "both"))
        alive = [name for name in self.places if name not in self.lost]
        if how != "return":
            told = self.crew.together(dict.fromkeys(alive, ("reform",)))
            self.check(silent(told) == alive, {name: each.text for name, each in told.items() if each.raised})
        if how == "reform":
            self.push()
        else:
            self.come_back()

    def come_back(self) -> None:
        """New processes take all seats that were lost."""
        for name in sorted(self.lost):
            told = self.crew.add(evolve(self.places[name], stage=""))
            self.check(not is_target(name) or bool(told.fenced), f"{name} came late and serves")
            self.held[name] = told.content
        self.lost.clear()
        self.push()

    def end(self) -> None:
        """The controller dies while a target is being written."""
        victim = self.random.choice([name for name in self.ranks() if is_target(name)])
        row = Row("killed", "moving", "controller")
        self.tally.tries[row] += 1
        self.version += 1
        self.crew.ask(victim, "holds", "moving", 2)
        self.crew.begin(self.version, held=[victim], but=self.outside())
        self.crew.at_stage(victim)
        self.crew.ranks["controller"].kill()
        self.crew.release(victim)
        heard = {name: self.crew.told(name, timeout=3 * DEADLINE + MARGIN) for name in self.ranks()}
        for each in heard.values():
            self.tally.states.update((row, state) for state in set(each.engines.values()))
        self.judge(heard, "the controller", row)


def run(seed: int, *, steps: int, tally: Tally) -> None:
    """One episode."""
    fabric = FABRICS[seed % len(FABRICS)]
    made = places(fabric)
    with cast(made, controlled=True) as crew:
        episode = Episode(crew, {str(p): p for p in made}, random.Random(seed), tally, f"seed {seed}, {fabric}")
        episode.push()
        for _ in range(steps):
            if episode.random.random() < 0.2:
                episode.push()
            else:
                episode.strike()
        episode.end()


def table(tally: Tally) -> str:
    """What was tried and what was said, as Markdown."""
    said = ("untouched", "complete", "torn", "in doubt")
    lines = [
        "| a rank of | is | at | times | untouched | complete | torn | in doubt |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(tally.tries, key=lambda row: (row.side, row.how, row.stage)):
        counts = " | ".join(str(tally.states[row, state]) for state in said)
        lines.append(f"| {row.side} | {row.how} | {row.stage} | {tally.tries[row]} | {counts} |")
    return "\n".join(lines)


def page(tally: Tally, *, seeds: range, seconds: float) -> str:
    """The whole page."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    head = (
        "# The fault campaign\n\n"
        "Written by `tests/campaigns/faults.py`, which says how it goes. Each line: what was done to a rank, how\n"
        "often, and how many times a rank was told each state of an engine. Every state told was held against the\n"
        "engine's bytes and fences. Episodes take turns over gloo, shared memory of one and of two copies, TCP, and\n"
        "two stated hosts, between which everything is relayed.\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, seeds {seeds.start} to {seeds.stop - 1}, "
        f"{seconds / 60:.0f} minutes: {sum(tally.tries.values())} losses, {tally.pushes} pushes to be exact, "
        f"{len(tally.faults)} faults.\n\n"
    )
    return head + table(tally) + "\n"


def main() -> int:
    """Run; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slice", choices=["ci"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    whole_run = args.slice is None and args.episodes is None and args.seed == 0
    seeds = range(args.seed, args.seed + (args.episodes or (2 if args.slice else 25)))
    tally, begun = Tally(), time.monotonic()
    for seed in seeds:
        run(seed, steps=args.steps or (5 if args.slice else 10), tally=tally)
        print(f"faults: seed {seed}, {time.monotonic() - begun:.0f} s, {len(tally.faults)} faults", flush=True)
    print(table(tally))
    for fault in tally.faults:
        print(f"fault: {fault}")
    if whole_run:
        PAGE.write_text(page(tally, seeds=seeds, seconds=time.monotonic() - begun))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
