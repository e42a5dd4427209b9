"""A finite value that becomes infinite is found and named; infinities that were there before are not blamed."""

from __future__ import annotations

import pytest
import torch

from refit_sdk.narrowing import Narrowed, NarrowedRun, NarrowingError, may_overflow

BIG = {torch.bfloat16: 3.4e38, torch.float16: 7e4, torch.float32: 1e300, torch.float8_e5m2: 1e6}
WIRES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float8_e5m2),
]


def runs(view: torch.Tensor, wire: torch.dtype) -> NarrowedRun:
    return NarrowedRun(view.to(wire).reshape(-1), (Narrowed("fine", torch.ones(3), wire), Narrowed("w", view, wire)))


@pytest.mark.parametrize(("source", "wire"), WIRES, ids=str)
@pytest.mark.parametrize("shape", [(), (5, 7), (3, 1 << 18)], ids=str)
def test_overflow_names_the_tensor(source: torch.dtype, wire: torch.dtype, shape: tuple[int, ...]) -> None:
    view = torch.ones(shape, dtype=source)
    runs(view, wire).check()
    view[(-1,) * len(shape)] = -BIG[wire]
    with pytest.raises(NarrowingError, match=rf"^w: .*{str(source)[6:]} became infinite as {str(wire)[6:]}"):
        runs(view, wire).check()
    with pytest.raises(NarrowingError, match=r"^w: "):
        Narrowed("w", view, wire).check()


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_values_that_were_not_finite_before_pass(odd: float) -> None:
    view = torch.ones(4, 4)
    view[1, 2] = odd
    runs(view.t(), torch.bfloat16).check()
    view[3, 3] = 3.4e38
    with pytest.raises(NarrowingError):
        runs(view.t(), torch.bfloat16).check()


@pytest.mark.parametrize(
    ("source", "wire", "expected"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
        (torch.int64, torch.int32, False),
        (torch.float8_e4m3fn, torch.float16, False),
    ],
    ids=str,
)
def test_which_casts_are_looked_at(source: torch.dtype, wire: torch.dtype, expected: bool) -> None:
    assert may_overflow(source, wire) is expected
