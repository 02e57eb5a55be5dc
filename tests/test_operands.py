"""Random operands for measuring, and the gate that a result passes before it is timed."""

import math

import pytest
import torch

from gmm_registry import gmm
from gmm_registry.operands import Operands, fault, row_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_operands_are_the_same_each_time_and_keep_the_size_of_x(dtype):
    one, other = (Operands.draw(600, 3, 256, 32, dtype, "cpu") for _ in range(2))
    assert [tuple(tensor.shape) for tensor in one] == [(600, 256), (3, 256, 32), (600, 32)]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    out = gmm(one.x, one.weight, [200, 0, 400], backend="eager")
    assert out.double().std() == pytest.approx(1, rel=0.1)


def test_one_wrong_row_is_not_lost_among_many():
    want = torch.ones(10_000, 4)
    got = want.clone()
    assert row_error(got, want) == 0
    got[7777] *= 1.5
    assert row_error(got, want) == pytest.approx(0.5)
    got[7777, 2] = math.nan
    assert math.isnan(row_error(got, want))
    matrices = torch.ones(3, 5, 4)
    assert row_error(2 * matrices, matrices) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_rounding_is_right_and_a_lost_row_is_not(dtype):
    x, weight, _ = Operands.draw(300, 2, 64, 32, dtype, "cpu")
    exact = gmm(x.double(), weight.double(), [100, 200], backend="eager")
    rounded = row_error(exact.to(dtype), exact)
    assert fault(rounded, dtype) == ""
    assert "wrong" in fault(1.0, dtype)
    assert "nan" in fault(math.nan, dtype)
