"""Meshes, verb by verb."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_sdk.errors import LayoutError
from refit_sdk.mesh import Mesh

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(shapes, st.randoms(use_true_random=False))
def test_a_rank_stands_where_numpy_has_it(shape, random):
    ranks = random.sample(range(1000), int(np.prod(shape)))
    grid = np.array(ranks, dtype=int).reshape(shape)
    mesh = Mesh(grid)
    assert mesh == Mesh(ranks, shape=shape) == Mesh(grid.tolist())
    assert hash(mesh) == hash(Mesh(ranks, shape=shape))
    for at in np.ndindex(*shape):
        assert mesh.coordinate(int(grid[at])) == at
        assert mesh.rank_at(at) == grid[at]
    assert mesh.coordinate(1000) is None


def test_a_mesh_without_axes_is_one_rank():
    mesh = Mesh(7)
    assert (mesh.ranks, mesh.shape, mesh.coordinate(7), mesh.rank_at(())) == ((7,), (), (), 7)


def test_axes_have_names_or_numbers():
    mesh = Mesh(range(8), shape=(2, 2, 2), axes=("pp", "dp", "tp"))
    assert [mesh.axis("dp"), mesh.axis(2)] == [1, 2]
    assert Mesh([0, 1]).axes == ("0",)


def test_a_mesh_of_other_ranks_or_names_is_another():
    assert Mesh([[0, 1], [2, 3]]) != Mesh([[0, 2], [1, 3]])
    assert Mesh([0, 1], axes=("dp",)) != Mesh([0, 1], axes=("tp",))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Mesh([0, 1, 1]), r"distinct ranks from 0 up, got \[1\] more than once"),
        (lambda: Mesh([0, -1]), "the negative rank -1"),
        (lambda: Mesh(range(6), shape=(2, 4)), r"shape \(2, 4\) needs 8 ranks .* got 6"),
        (lambda: Mesh([]), "1 or more"),
        (lambda: Mesh([[0, 1], [2]]), "equal lengths"),
        (lambda: Mesh([0, 1], axes=("dp", "tp")), "needs 1 different axis names"),
        (lambda: Mesh([[0], [1]], axes=("dp", "dp")), "needs 2 different axis names"),
        (lambda: Mesh([0, 1.5]), "whole numbers"),
        (lambda: Mesh([0, 1], axes=("dp",)).axis("tp"), "no axis 'tp'; it has dp"),
        (lambda: Mesh([0, 1]).rank_at((2,)), r"\(2,\) is no coordinate"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(LayoutError, match=message):
        wrong()
