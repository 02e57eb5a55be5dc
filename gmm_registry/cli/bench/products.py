"""The three products of a shape, and whether a backend gets them right.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gmm_registry import BatchSizes, gmm
from gmm_registry.cli.bench.shapes import Shape
from gmm_registry.ops import weight_grad

Products = Mapping[str, Callable[[], Tensor]]  # by direction

# The relative Frobenius distance that two right results may have: each rounds its sums once.
_TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4, torch.float64: 1e-12}


class Operands(NamedTuple):
    """The tensors of a shape: x (R, K), weight (E, K, N), and grad (R, N), the gradient of the result."""

    x: Tensor
    weight: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, shape: Shape, dtype: torch.dtype, device: str) -> Operands:
        """Draw random ones, scaled so that the result is about as large as x."""
        generator = torch.Generator(device).manual_seed(0)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, dtype=dtype, device=device, generator=generator)

        weight = randn(shape.groups, shape.k, shape.n).mul_(shape.k**-0.5)
        return cls(randn(shape.rows, shape.k), weight, randn(shape.rows, shape.n))

    def products(self, sizes: BatchSizes, backend: str | None) -> Products:
        """Return the calls that users make, and autograd for them; the automatic choice if none is named."""
        x, weight, grad = self
        return {
            "forward": lambda: gmm(x, weight, sizes, backend=backend),
            "grad_x": lambda: gmm(grad, weight, sizes, trans_b=True, backend=backend),
            "grad_w": lambda: weight_grad(x, grad, sizes, backend=backend),
        }


def check(products: Products, reference: Mapping[str, Tensor]) -> tuple[dict[str, float | None], str]:
    """Compare products with a reference.

    Returns:
        the relative Frobenius distance of each, None where it is not finite; and what is wrong, if anything.
    """
    errors: dict[str, float | None] = {}
    for direction, product in products.items():
        want = reference[direction]
        torch.full_like(want, torch.nan)  # dirties the memory that the result is likely to get
        try:
            error = _distance(product(), want)
        except Exception as raised:  # the table has a row for it, and the run goes on
            return errors, f"{direction} raised {type(raised).__name__}: {raised}"
        errors[direction] = error if math.isfinite(error) else None
        allowed = _TOLERANCES[want.dtype]
        if not error <= allowed:
            return (
                errors,
                f"{direction} is wrong: {error:.1e} from any.eager's, at most {allowed:.0e} is right",
            )
    return errors, ""


def _distance(got: Tensor, want: Tensor) -> float:
    dtype = torch.promote_types(want.dtype, torch.float32)
    apart = torch.linalg.vector_norm(got - want, dtype=dtype)
    return float(apart / torch.linalg.vector_norm(want, dtype=dtype))
