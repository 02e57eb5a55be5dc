"""How far a result may be from the reference in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Allow ``atol + rtol * abs(reference)`` in each element."""

    rtol: float
    atol: float


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.bfloat16: Tolerance(1e-2, 1e-2),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float64: Tolerance(1e-12, 1e-12),
}
"""The tolerance of each dtype. bf16 is MindSpeed-MM's; the others leave room over one rounding of a sum."""


class Difference(NamedTuple):
    """The largest absolute and relative difference, and whether every element is within tolerance.

    The relative difference takes a reference below ``atol`` for ``atol``.
    """

    absolute: float
    relative: float
    passed: bool


def compare(result: Tensor, reference: Tensor, dtype: torch.dtype) -> Difference:
    """Compare with the tolerance of a dtype; shapes must be equal, NaN never passes."""
    if result.shape != reference.shape:
        raise ValueError(f"result {tuple(result.shape)} against reference {tuple(reference.shape)}")
    if not result.numel():
        return Difference(0.0, 0.0, True)
    rtol, atol = TOLERANCES[dtype]
    reference = reference.detach().cpu().double()
    error = (result.detach().cpu().double() - reference).abs()
    relative = error / reference.abs().clamp_min(atol)
    passed = bool((error <= atol + rtol * reference.abs()).all())
    return Difference(error.max().item(), relative.max().item(), passed)
