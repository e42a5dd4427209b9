"""Values are new on every rank when they're read, or the ranks that are behind are named."""

import bodies
import pytest
import tiny
import worlds
from build import Layout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    made = {}
    for kind in ("qwen3", "qwen3-moe"):
        made[kind] = (tiny.write(kind, folder / kind), folder / f"{kind}-2")
        tiny.write(kind, made[kind][1], version=2)
    return made


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", Layout(dp=2)), ("qwen3", Layout(tp=2, dp=2)), ("qwen3-moe", Layout(pp=2, ep=2, dp=2))],
    ids=str,
)
def test_a_gather_that_was_put_off_is_completed(checkpoints, kind, layout):
    checkpoint, newer = checkpoints[kind]
    found = worlds.everywhere(bodies.put_off, layout.world, checkpoint, newer, layout)
    assert all(each["before"] for each in found)
    assert [each["after"] for each in found] == [()] * layout.world
    assert all(each["same"] for each in found)


def test_copies_that_drifted_are_named_with_their_ranks(checkpoints):
    """One data-parallel replica, and one tensor rank's norm: every rank says the same."""
    layout = Layout(tp=2, dp=2)
    where = {1: "decoder.final_layernorm.weight", 2: "decoder.layers.1.self_attention.linear_proj.weight"}
    said = worlds.everywhere(bodies.drifting, layout.world, checkpoints["qwen3"][0], layout, where)
    assert len(set(said)) == 1
    assert "model.norm.weight [0:64]: rank 1 holds other values than its owner, rank 0" in said[0]
    assert "model.layers.1.self_attn.o_proj.weight [0:64, 0:32]: rank 2 holds" in said[0]
    assert said[0].count("\n") == 2


def test_a_chunk_without_groups_has_the_jobs():
    layout = Layout(tp=2, pp=2)
    assert worlds.everywhere(bodies.groups, layout.world, layout) == [True] * 4


def test_equal_copies_pass(checkpoints):
    layout = Layout(tp=2, dp=2)
    assert worlds.everywhere(bodies.drifting, layout.world, checkpoints["qwen3"][0], layout, {}) == [""] * 4


def test_storage_that_was_rebound_is_read_again(checkpoints):
    checkpoint, newer = checkpoints["qwen3-moe"]
    layout = Layout(tp=2, ep=2, etp=1)
    found = worlds.everywhere(bodies.rebound, layout.world, checkpoint, newer, layout)
    assert found == [{"same": True, "changed": True, "wrong": ()}] * layout.world
