"""How a kernel's result gets into the tensor that the caller gave."""

from __future__ import annotations

from torch import Tensor


def deliver(product: Tensor, out: Tensor | None, accumulate: bool = False) -> Tensor:
    """Copy a product to ``out``, or add it, if there is one that the kernel did not write to itself."""
    if out is None or product is out:
        return product
    return out.add_(product) if accumulate else out.copy_(product)
