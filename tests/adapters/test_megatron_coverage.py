"""Who owns what, over all ranks: tensors whole, elements once, layers and experts all there; copies that drifted."""

import numpy as np
import pytest
from refit_adapters._megatron_coverage import Sum, drifted, violations

from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.fold import fold

W, E = "model.layers.{layer}.mlp.up_proj.weight", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"


def manifest(*held):
    """Of (name, shape, rows that are owned)."""
    made = []
    for name, shape, rows in held:
        box = Box.whole(shape).narrow(0, *rows)
        made.append(Fragment(name, shape, box, np.zeros(box.shape, np.float32)))
    return fold(made)


def layers(numbers, rows=(0, 4)):
    return [(W.format(layer=n), (4, 2), rows) for n in numbers]


def found(*ranks, layers=4, experts=None):
    owners = {rank: manifest(*held) for rank, held in enumerate(ranks)}
    return violations(owners, layers=layers, experts=experts, expert_names=[E])


def test_halves_of_every_layer_are_whole():
    assert found(layers(range(4), (0, 2)), layers(range(4), (2, 4))) == []


def test_stages_of_a_pipeline_are_whole():
    assert found(layers((0, 1)), layers((2, 3))) == []


def test_a_layer_that_nobody_has():
    assert found(layers((0, 1)), layers((3,))) == ["nobody has layers 2 of 4: a chunk is missing on some rank"]


def test_a_layer_too_many():
    (wrong,) = found(layers(range(5)))
    assert wrong == "layers 4 are there, and Megatron's config says 4 layers: a chunk is another model's"


def test_two_owners_are_named_with_what_both_own():
    (wrong,) = found(layers(range(4)), layers((2,), (1, 3)))
    name = "model.layers.{}.mlp.up_proj.weight"
    assert wrong == f"{name}: rank 0 owns [0:4, 0:4, 0:2], rank 1 owns [2:3, 1:3, 0:2]: both own [2:3, 1:3, 0:2]"


def test_rows_that_nobody_owns():
    (wrong,) = found(layers(range(4), (0, 3)))
    assert wrong == "model.layers.{}.mlp.up_proj.weight: nobody owns [0:4, 3:4, 0:2]"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([(0, 1), (2, 3)], None),
        ([(0, 1), (3,)], "nobody has experts 2 of layer 1"),
        ([(0, 1), (0, 1)], "both own"),
    ],
    ids=["all", "one short", "one twice"],
)
def test_experts(ranks, text):
    held = [[(E.format(layer=1, expert=e), (4, 2), (0, 4)) for e in experts] for experts in ranks]
    held[0] += layers((0, 1))
    wrong = found(*held, layers=2, experts=4)
    assert (wrong == []) if text is None else text in "\n".join(wrong)


def test_several_copies_that_drifted_are_one_line_a_tensor():
    whole = Box((0,), (4,))
    sums = {
        rank: [Sum("a", whole, value, rank == 1), Sum("b", whole, 5, rank == 0)] for rank, value in enumerate("xyxz")
    }
    assert drifted(sums) == ["a [0:4]: ranks 0, 2, 3 hold other values than its owner, rank 1"]
