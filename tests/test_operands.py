"""Random operands for measuring, and the gate that a result passes before it is timed."""

import math

import pytest
import torch

from gmm_registry import gmm
from gmm_registry.operands import Operands, judge, row_error


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


LOWER = {
    torch.float64: torch.float32,
    torch.float32: torch.float16,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float8_e4m3fn,
}


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_another_order_of_the_sum_is_right_and_a_smaller_type_is_not(dtype):
    x, weight, _ = Operands.draw(300, 2, 512, 32, dtype, "cpu")
    want = gmm(x, weight, [100, 200], backend="eager")
    turned = gmm(x.flip(1), weight.flip(1), [100, 200], backend="eager")
    error, wrong = judge(lambda: turned, want)
    assert error >= 0
    assert wrong == ""
    smaller = gmm(
        x.to(LOWER[dtype]).to(dtype), weight.to(LOWER[dtype]).to(dtype), [100, 200], backend="eager"
    )
    assert "wrong: a row is off from any.eager's by" in judge(lambda: smaller, want)[1]


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_a_row_that_is_lost_or_no_number_is_wrong(dtype):
    want = Operands.draw(5000, 2, 8, 32, dtype, "cpu").grad_out
    for value in (0, math.nan, math.inf):
        got = want.clone()
        got[4321] = value
        assert "wrong" in judge(lambda got=got: got, want)[1]


def test_what_an_earlier_product_left_in_memory_is_no_result():
    want = torch.ones(64, 64)

    def lazy():
        return torch.empty_like(want)

    for _ in range(3):
        want.clone()  # is freed at once, and the next one gets its memory
        assert "wrong" in judge(lazy, want)[1]


def test_fp32_may_be_tf32_where_torch_may_be():
    want = torch.ones(4, 4)
    tf32 = want + 1e-3
    assert "allowed are 1e-04" in judge(lambda: tf32, want)[1]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert judge(lambda: tf32, want)[1] == ""
    finally:
        torch.set_float32_matmul_precision(before)
