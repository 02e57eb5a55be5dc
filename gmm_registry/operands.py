"""Random operands of a grouped product to measure it with, and how far its result is off.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The largest `row_error` of two right results, which were both rounded.
_ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-10}
# In fp32 by what torch allows: the type itself, TF32 which has the mantissa of fp16, or bf16.
_ALLOWED_FP32 = {"highest": 1e-4, "high": 2e-3, "medium": 2e-2}
_CHUNK = 4096  # rows compared at a time, since a whole result in fp32 may not fit


class Operands(NamedTuple):
    """The tensors: x (R, K), weight (E, K, N), and grad_out (R, N)."""

    x: Tensor
    weight: Tensor
    grad_out: Tensor

    @classmethod
    def draw(
        cls, rows: int, groups: int, k: int, n: int, dtype: torch.dtype, device: str | torch.device
    ) -> Operands:
        """Draw them, always the same, scaled so that the result is about as large as x."""
        generator = torch.Generator(device).manual_seed(0)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device, generator=generator)

        weight = randn(groups, k, n).mul_(k**-0.5)  # in place: a second one may not fit
        return cls(randn(rows, k), weight, randn(rows, n))


def judge(product: Callable[[], object], want: Tensor) -> tuple[float, str]:
    """Call a product, and compare what it gives with any.eager's result.

    The memory that it is likely to get is filled with NaN before. Else what an earlier product left there
    would pass for its result.

    Returns:
        the `row_error`, and what is wrong, "" if nothing is.
    """
    torch.full_like(want, torch.nan)
    got = product()
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        what = f"{tuple(got.shape)} {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        return math.nan, f"wrong: returned {what}, not {tuple(want.shape)} {want.dtype}"
    error, allowed = row_error(got, want), _allowed(want.dtype)
    if error <= allowed:  # not so for NaN
        return error, ""
    by = f"{error:.1e} of the largest, allowed are {allowed:.0e}"
    return error, f"wrong: a row is off from any.eager's by {by}"


def row_error(got: Tensor, want: Tensor) -> float:
    """Return the largest distance of two rows, as vectors, over the length of the largest in ``want``.

    A row counts for itself: a wrong one is not lost among many right ones. NaN if either has one.
    """
    worst, largest = [], []
    for a, b in zip(got.flatten(0, -2).split(_CHUNK), want.flatten(0, -2).split(_CHUNK), strict=True):
        exact = b.to(torch.promote_types(b.dtype, torch.float32))
        worst.append((a.to(exact.dtype) - exact).norm(dim=1).max())
        largest.append(exact.norm(dim=1).max())
    return (torch.stack(worst).max() / torch.stack(largest).max()).item()


def _allowed(dtype: torch.dtype) -> float:
    if dtype != torch.float32:
        return _ALLOWED[dtype]
    try:
        return _ALLOWED_FP32[torch.get_float32_matmul_precision()]
    except RuntimeError:  # it was set in two ways, which torch refuses to tell apart
        return _ALLOWED_FP32["high"]
