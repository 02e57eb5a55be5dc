"""The experts as one autograd function that keeps the layer's input and its first product, no more.

The backward gathers the rows again, repeats the activation, and never needs the second product: the
gradient of a routing weight is the dot product of a row's output with its gradient, and that equals the dot
product of the row's activation with the activation's gradient.

Shape letters: T tokens, K choices a token, R rows (T * K, and padding), E experts, F width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmm_registry.layers.permute import Permutation, permute, unpermute
from gmm_registry.layers.products import Products


@dataclass(frozen=True)
class Path:
    """How rows go through the experts; ``permutation`` is None for rows that are sorted already."""

    products: Products
    activate: Callable[[Tensor, Tensor | None], Tensor]  # the first product and its bias, to inner
    permutation: Permutation | None = None

    def gather(self, tokens: Tensor) -> Tensor:
        """Take tokens (T, H) to rows (R, H)."""
        if self.permutation is None:
            return tokens
        return permute(tokens, self.permutation, companions=self.products.companions)

    def combine(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Take rows (R, H) to tokens (T, H), weighted with (T, K)."""
        if self.permutation is None:
            return rows
        return unpermute(rows, self.permutation, weights, companions=self.products.companions)


def experts(
    path: Path,
    x: Tensor,
    weights: Tensor | None,
    first: Tensor,
    second: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
) -> Tensor:
    """Compute the experts by ordinary autograd.

    Args:
        path: the way of the rows.
        x: (T, H).
        weights: routing weights (T, K).
        first: (E, F or 2 F, H).
        second: (E, F, H).
        bias1: (E, F or 2 F).
        bias2: (E, H).

    Returns:
        (T, H).
    """
    inner = path.activate(path.products.expand(path.gather(x), first), bias1)
    rows = path.products.contract(inner, second)
    if bias2 is not None:
        rows = rows + bias2[path.products.groups(rows)]
    return path.combine(rows, weights)


def memory_optimized_experts(
    path: Path,
    x: Tensor,
    weights: Tensor | None,
    first: Tensor,
    second: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
) -> Tensor:
    """Compute what `experts` does, keeping x and the first product only; differentiable once."""
    return cast(
        Tensor,
        _Experts.apply(path, x, weights, first, second, bias1, bias2),  # type: ignore[no-untyped-call]
    )


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        path: Path,
        x: Tensor,
        weights: Tensor | None,
        first: Tensor,
        second: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
    ) -> Tensor:
        product = path.products.expand(path.gather(x), first)
        rows = path.products.contract(path.activate(product, bias1), second)
        if bias2 is not None:
            rows += bias2[path.products.groups(rows)]
        ctx.path = path
        ctx.save_for_backward(x, weights, first, second, bias1, bias2, product)
        return path.combine(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, first, second, bias1, bias2, product = ctx.saved_tensors
        path, products = ctx.path, ctx.path.products
        _, need_x, need_weights, need_first, need_second, need_bias1, need_bias2 = ctx.needs_input_grad
        grad_x = grad_weights = grad_first = grad_second = grad_bias1 = grad_bias2 = None

        grad_rows = path.gather(grad_out)  # before the routing weights; our own buffer with a permutation
        scale = None if weights is None else path.permutation.per_row(weights)  # (R,)
        with torch.enable_grad():
            leaf = product.detach().requires_grad_()
            bias_leaf = None if bias1 is None else bias1.detach().requires_grad_()
            inner = path.activate(leaf, bias_leaf)
        activation = inner.detach()
        if need_second:
            scaled = activation if scale is None else activation * _scale(products, scale, activation)
            grad_second = products.outer(scaled, grad_rows)
            del scaled
        if need_bias2:
            rows = grad_rows if scale is None else grad_rows * scale[:, None].to(grad_rows.dtype)
            groups = products.groups(rows)
            grad_bias2 = torch.zeros_like(bias2).index_put_((groups,), rows, accumulate=True)
            del rows
        if need_x or need_weights or need_first or need_bias1:
            grad_inner = products.expand(grad_rows, second)
            if need_weights:
                dots = products.row_sums(activation * grad_inner)
                if bias2 is not None:
                    dots += (grad_rows * bias2[products.groups(grad_rows)]).sum(-1, dtype=torch.float32)
                grad_weights = path.permutation.per_choice(dots).to(weights.dtype)
            if need_x or need_first or need_bias1:
                if scale is not None:
                    grad_inner *= _scale(products, scale, grad_inner)
                wanted = [leaf] + ([] if bias_leaf is None else [bias_leaf])
                grad_product, *bias_grads = torch.autograd.grad(inner, wanted, grad_inner)
                del grad_inner, inner, activation
                grad_bias1 = bias_grads[0] if need_bias1 else None
                if need_first:
                    grad_first = products.outer(grad_product, path.gather(x))
                if need_x:
                    # With a permutation grad_rows is ours and done with; without, it is the caller's.
                    scratch = None if path.permutation is None else grad_rows
                    rows = products.contract(grad_product, first, scratch)
                    grad_x = path.combine(rows, None)
        return None, grad_x, grad_weights, grad_first, grad_second, grad_bias1, grad_bias2


def _scale(products: Products, scale: Tensor, inner: Tensor) -> Tensor:
    return products.per_row(scale).to(inner.dtype)
