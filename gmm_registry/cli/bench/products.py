"""The three products of a shape, as users call them, and whether a backend gets them right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from gmm_registry import BatchSizes, gmm
from gmm_registry.operands import Operands, judge
from gmm_registry.ops import weight_grad

Products = Mapping[str, Callable[[], Tensor]]  # by direction


def products(operands: Operands, sizes: BatchSizes, backend: str | None) -> Products:
    """Return the calls that users make, and autograd for them; the automatic choice if none is named."""
    x, weight, grad_out = operands
    return {
        "forward": lambda: gmm(x, weight, sizes, backend=backend),
        "grad_x": lambda: gmm(grad_out, weight, sizes, trans_b=True, backend=backend),
        "grad_w": lambda: weight_grad(x, grad_out, sizes, backend=backend),
    }


def check(products: Products, reference: Mapping[str, Tensor]) -> tuple[dict[str, float | None], str]:
    """Compare products with a reference.

    Returns:
        the error of each that `judge` finds, None where it is not finite; and what is wrong, if anything.
    """
    errors: dict[str, float | None] = {}
    for direction, product in products.items():
        try:
            error, wrong = judge(product, reference[direction])
        except Exception as raised:  # the table has a row for it, and the run goes on
            return errors, f"{direction} raised {type(raised).__name__}: {raised}"
        errors[direction] = error if math.isfinite(error) else None
        if wrong:
            return errors, f"{direction} is {wrong}"
    return errors, ""
