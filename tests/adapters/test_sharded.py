"""What real processes hold, by every way of sharding: all ranks' fragments make the checkpoint, bit by bit."""

import multiprocessing
import runpy
from pathlib import Path

import pytest

CASES = {
    2: ("tp", "trained", "trained-tied", "trained-experts", "described-unsharded", "broken-forward", "wrapped"),
    3: ("fsdp-uneven", "fsdp-experts", "tp-uneven", "experts-on-gate-up", "fsdp-every-class",
        "outside-the-mesh"),
    4: (
        "fsdp", "fsdp-last-dim", "fsdp-tied", "hsdp", "fsdp-tp", "ep-2d", "experts-on-hidden", "by-hand",
        "padded-strides", "refused", "plain-in-fsdp", "offloaded",
    ),
    6: ("fsdp-empty", "fsdp-tp-uneven", "ep-2d-empty"),
    8: ("hsdp-tp", "fsdp-tp-few-rows", "ep-2d-inside", "ep-2d-uneven", "ep-3d"),
}  # fmt: skip
"""Cases by number of processes."""

SCRIPT = str(Path(__file__).with_name("sharded_cases.py"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Problems by (processes, case), each group of processes started once, when its first case is asked for."""
    known = {}

    def outcome(world, case):
        if world not in known:
            known[world] = _run(world, tmp_path_factory.mktemp("store") / "store")
        return known[world].get(case, ["no rank came to it"])

    return outcome


def _run(world, store):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "transformers"])
    results = context.Queue()
    ranks = [
        context.Process(
            target=runpy.run_path,
            args=(SCRIPT, {"arguments": (rank, world, str(store), CASES[world], results)}, "rank"),
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    try:
        return _collect(results, expected=world * len(CASES[world]))
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()


def _collect(results, *, expected):
    found = {}
    for _ in range(expected):
        name, _, problems = results.get(timeout=120)
        found.setdefault(name, []).extend(problems)
    return found


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_fragments_of_all_ranks_make_the_checkpoint(outcomes, world, case):
    assert outcomes(world, case) == []
