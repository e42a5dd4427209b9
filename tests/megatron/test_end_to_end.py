"""Megatron, cut by tensor, pipeline and expert, into an engine that fuses and into a directory: twice, bit by bit."""

import bodies
import pytest
import tiny
import worlds
from build import Layout

LAYOUT = Layout(tp=2, pp=2, ep=2, etp=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    made = tiny.write("qwen3-moe", folder / "one")
    tiny.write("qwen3-moe", folder / "two", version=2)
    return made, folder / "two"


def pushed(checkpoints, tmp_path, *, fabric, layout=LAYOUT, ddp=False):
    checkpoint, newer = checkpoints
    told = {
        "checkpoint": checkpoint, "newer": newer, "layout": layout, "where": worlds.rendezvous(), "fabric": fabric,
        "engines": ["fused", "files"], "ddp": ddp,
    }  # fmt: skip
    bodies_of = [(bodies.push, (told,))] * layout.world
    bodies_of += [(bodies.receive, (told, rank, 2)) for rank in range(2)]
    bodies_of += [(bodies.export, (told, tmp_path / "out"))]
    found = worlds.results(bodies_of, world=layout.world)
    return found[: layout.world], found[layout.world :]


@pytest.mark.parametrize("fabric", ["mixed", "shm", "tcp", "gloo"])
def test_arrives_in_a_fused_engine_and_in_files(checkpoints, tmp_path, fabric):
    sources, targets = pushed(checkpoints, tmp_path, fabric=fabric)
    assert targets == [[[], []]] * 3
    links = {link for each in sources for link in each["links"]}
    assert links
    assert all(link.startswith({"mixed": "shm"}.get(fabric, fabric)) for link in links), links
    whole = sum(bodies.nbytes(checkpoints[0]))
    assert all(each["sent"][0] == each["sent"][1] > whole for each in sources)


def test_a_second_push_reads_no_names(checkpoints, tmp_path):
    sources, targets = pushed(checkpoints, tmp_path, fabric="mixed", layout=Layout(tp=2, dp=2, ep=2, etp=1), ddp=True)
    assert targets == [[[], []]] * 3
    assert all(each["reads"][0] == each["reads"][1] > 0 for each in sources)


def test_copies_that_drifted_stop_the_push_before_a_byte_moves(checkpoints):
    layout = Layout(dp=2)
    told = {"checkpoint": checkpoints[0], "layout": layout, "where": worlds.rendezvous()}
    jobs = [(bodies.push_drifted, (told,))] * 2 + [(bodies.receive_nothing, (told, rank, 2)) for rank in range(2)]
    *sources, one, other = worlds.results(jobs, world=2)
    assert all("rank 1 holds other values than its owner, rank 0" in said for said in sources), sources
    for said, changed in (one, other):
        assert "model.norm.weight" in said
        assert changed == []
