"""Megatron to Megatron beside megatron-core's own resharder: planning and refitting, in the same processes, in turns.

    python tests/benchmarks/bench_megatron.py [--turns 7] [--hidden 512] [--layers 8] [--json FILE]

Needs what `tests/megatron/requirements.txt` lists, and megatron-core (the tox environment `megatron` has it). Training
and generating ranks are different processes. The resharder gets its models by its own groups and moves by one batch of
gloo sends and receives straight into the target, which is kind to it: its own gloo service needs CUDA. Ours pushes
what the adapter describes, over gloo and over what sessions take by themselves (shared memory on one host), agreement
and commit included. After each turn the target is compared with the judge's values, element by element.

*Plan* is, for both, from models to what each rank sends: describing, exchanging, planning; and ours once more without
describing, which a session does when it opens, not when it plans again. Cases are those that the
resharder gets right: it reads one chunk a rank, and mixes up experts when sequential ones change their expert
parallelism or grouped ones their expert-tensor parallelism.

`describe` is how long one rank of a model with many experts takes to describe itself, by number of entries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

sys.path.append(str(Path(__file__).parents[1] / "megatron" / "support"))
sys.path.append(str(Path(__file__).parents[1] / "refit"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import bench_megatron_ranks as ranks
import tiny
import worlds
from build import Layout


@frozen
class Case:
    """A kind of model, and how the two sides cut it."""

    kind: str
    source: Layout
    target: Layout


CASES: dict[str, Case] = {
    "dense, tp2 to tp1": Case("qwen3", Layout(tp=2), Layout()),
    "dense, tp1 to tp2": Case("qwen3", Layout(), Layout(tp=2)),
    "dense, tp2 pp2 to tp2": Case("qwen3", Layout(tp=2, pp=2), Layout(tp=2)),
    "experts, ep4 to ep2": Case("qwen3-moe", Layout(ep=4, etp=1), Layout(ep=2, etp=1)),
}


def sizes(told: argparse.Namespace, kind: str) -> dict[str, Any]:
    """A config's sizes: about 64 MiB in bfloat16 by default, dense or with experts."""
    common = {
        "hidden_size": told.hidden, "num_hidden_layers": told.layers, "num_attention_heads": 8,
        "head_dim": told.hidden // 8, "num_key_value_heads": 4, "intermediate_size": 3 * told.hidden,
        "vocab_size": 16 * told.hidden,
    }  # fmt: skip
    experts = {"num_experts": 32, "moe_intermediate_size": told.hidden // 8}
    return {**common, **(experts if kind == "qwen3-moe" else {})}


def measure(case: Case, told: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians over turns of plan and refit seconds, and the ratios to the resharder's in the same turn."""
    checkpoint = tiny.write(case.kind, folder, dtype="bfloat16", **sizes(told, case.kind))
    world = case.source.world + case.target.world
    where = [worlds.rendezvous() for _ in ranks.FABRICS]
    found = worlds.everywhere(ranks.compare, world, checkpoint, case.source, case.target, where, told.turns)
    assert [each["wrong"] for each in found] == [[]] * world, found
    plans = {who: [max(turn) for turn in zip(*(e["plan"][who] for e in found), strict=True)] for who in ranks.PLANNERS}
    turns = {who: [max(turn) for turn in zip(*(e["refit"][who] for e in found), strict=True)] for who in ranks.MOVERS}
    base = turns["resharder"]
    return {
        "mib": sum(each["mib"] for each in found),
        "plan": {who: statistics.median(took) for who, took in plans.items()},
        "plan_ratio": {
            who: statistics.median(a / b for a, b in zip(took, plans["resharder"], strict=True))
            for who, took in plans.items()
        },
        "refit": {who: statistics.median(took) for who, took in turns.items()},
        "refit_ratio": {
            who: statistics.median(a / b for a, b in zip(took, base, strict=True)) for who, took in turns.items()
        },
        "spread": {who: [min(took), max(took)] for who, took in turns.items()},
    }


def describing(told: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Seconds to describe models of half as many experts and of all."""
    rows = []
    for experts in (told.experts // 2, told.experts):
        over = {"num_hidden_layers": 26, "num_experts": experts, "hidden_size": 16, "moe_intermediate_size": 8}
        kind = {**over, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64}
        checkpoint = tiny.write("qwen3-moe", folder / str(experts), **kind, intermediate_size=16)
        (found,) = worlds.everywhere(ranks.describe, 1, checkpoint, told.turns)
        rows.append(found)
    return rows


def show(name: str, row: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """A case as lines."""
    plan = row["plan"]
    say(f"{name}: {row['mib']:.0f} MiB")
    for who, seconds in plan.items():
        say(f"    {who:18} plan  {1e3 * seconds:7.1f} ms  ratio {row['plan_ratio'][who]:.2f}")
    for who, seconds in row["refit"].items():
        low, high = row["spread"][who]
        ratio = row["refit_ratio"][who]
        say(f"    {who:18} refit {1e3 * seconds:7.1f} ms ({1e3 * low:.1f}..{1e3 * high:.1f})  ratio {ratio:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("turns", 7), ("hidden", 512), ("layers", 8), ("experts", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=[*CASES, "describe"])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    told = parser.parse_args()
    begun, rows = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(CASES.items()):
            if told.only in (None, name):
                rows[name] = measure(case, told, Path(folder, str(number)))
                show(name, rows[name])
        if told.only in (None, "describe"):
            rows["describe"] = describing(told, Path(folder, "describe"))
            for row in rows["describe"]:
                each = 1e6 * row["seconds"] / row["entries"]
                print(f"describe: {row['entries']:.0f} entries in {row['seconds']:.3f} s, {each:.0f} µs each; "
                      f"a look at their identity {1e3 * row['look']:.1f} ms")  # fmt: skip
    print(f"{time.monotonic() - begun:.0f} s in all")
    if told.json is not None:
        told.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
