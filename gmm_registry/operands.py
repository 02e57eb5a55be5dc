"""Random operands of a grouped product to measure it with, and how far its result is off.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The largest `row_error` of two right results: both were rounded, and in fp32 one may use TF32, where that is
# switched on.
_ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-3, torch.float64: 1e-10}
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


def fault(error: float, dtype: torch.dtype) -> str:
    """Say what is wrong with a result whose `row_error` from any.eager's that is, "" if nothing is."""
    allowed = _ALLOWED[dtype]
    if error <= allowed:  # not so for NaN
        return ""
    return f"wrong: a row is off from any.eager's by {error:.1e} of the largest, allowed are {allowed:.0e}"
