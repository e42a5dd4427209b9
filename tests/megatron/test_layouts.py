"""What ranks describe is the checkpoint that Megatron-Bridge loaded into them, bit by bit, however it's cut.

Megatron-Bridge cuts and fuses by code of its own, and the checkpoint's values are the judge's, different for every
element of every layer and expert.
"""

import bodies
import matrix
import numpy as np
import pytest
import tiny
import worlds
from build import Layout
from matrix import Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sampled" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole-matrix", default=False)
        metafunc.parametrize("sampled", matrix.whole() if whole else matrix.sample(), ids=str)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    made = {}

    def checkpoint(kind, dtype="float32"):
        if (kind, dtype) not in made:
            made[kind, dtype] = tiny.write(kind, tmp_path_factory.mktemp(kind), dtype=dtype)
        return made[kind, dtype]

    return checkpoint


def missing(described, checkpoint):
    """Names of tensors that all ranks together don't have whole."""
    held = {name: np.zeros(shape, np.bool_) for name, (shape, _) in checkpoint.tensors.items()}
    for each in described:
        for name, start, stop in each.places:
            held[name][tuple(map(slice, start, stop))] = True
    return [name for name, mask in held.items() if not mask.all()]


def check(case, checkpoint):
    described = worlds.everywhere(bodies.describe, case.layout.world, checkpoint, case.layout)
    assert [each.wrong for each in described] == [()] * case.layout.world
    assert missing(described, checkpoint) == []
    return described


def test_described_is_the_checkpoint(sampled, checkpoints):
    check(sampled, checkpoints(sampled.kind))


def test_in_bfloat16_with_a_float32_router_bias(checkpoints):
    check(Case("deepseek", Layout(tp=2, ep=2, etp=1)), checkpoints("deepseek", "bfloat16"))


def test_a_group_of_heads_is_cut_through(checkpoints):
    """Two key-value heads over four ranks: a rank has half a group's rows, at one end queries alone."""
    described = check(Case("llama", Layout(tp=4)), checkpoints("llama"))
    held = [{name for name, *_ in each.places if name.startswith("model.layers.0.self_attn")} for each in described]
    k = "model.layers.0.self_attn.k_proj.weight"
    assert [k in names for names in held] == [False, True, False, True]


def test_replicas_are_holders_and_a_tied_head_has_one_owner(checkpoints):
    described = check(Case("qwen3-tied", Layout(tp=2, pp=2, dp=2)), checkpoints("qwen3-tied"))
    names = [{name for name, *_ in each.places} for each in described]
    assert sum("model.norm.weight" in held for held in names) == 4  # two tensor ranks, two data ranks, one stage
    assert sum("model.embed_tokens.weight" in held for held in names) == 4  # not the last stage's copy
    assert not any("lm_head.weight" in held for held in names)


@pytest.mark.parametrize("kind", ["mistral", "olmoe"])
def test_names_that_megatron_bridge_supplies(checkpoints, kind):
    """No table is for these."""
    layout = Layout(tp=2, pp=2) if kind == "mistral" else Layout(tp=2, ep=2, etp=1)
    check(Case(kind, layout), checkpoints(kind))


def test_padding_is_nobodys(checkpoints):
    """500 rows padded to 1536 over four ranks: the last two have padding alone."""
    described = check(Case("qwen3-odd-vocab", Layout(tp=4, pad=384)), checkpoints("qwen3-odd-vocab"))
    rows = [[place for place in each.places if place[0] == "lm_head.weight"] for each in described]
    assert [[(start[0], stop[0]) for _, start, stop in each] for each in rows] == [[(0, 384)], [(384, 500)], [], []]


def test_the_sample_has_every_value_with_every_kind():
    whole, sample = matrix.whole(), matrix.sample()
    assert len(sample) < 60 < len(whole)
    for name in matrix.VALUES:
        for kind in matrix.VALUES["kind"]:
            of = [{getattr(c.layout, name, c.kind) for c in cases if c.kind == kind} for cases in (whole, sample)]
            assert of[0] == of[1], (name, kind)


def test_what_megatron_refuses_is_told_apart_from_what_is_tried():
    """Every value is tried somewhere; nothing is refused for a reason of ours."""
    tried = list(matrix.choices())
    for name, values in matrix.VALUES.items():
        assert {chosen[name] for chosen in tried} == set(values)
