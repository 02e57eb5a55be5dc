"""The three products of an expert layer, on the grouped or on the block-sparse formulation.

`expand` takes rows to the experts' width, `contract` takes them back, `outer` gives the gradient of a
weight. They are each other's derivatives, so a layer written with them has one form for both formulations.
What lies between is called inner: (R, F) when grouped, (M / 128, F / 128, 128, 128) when block-sparse.

Shape letters: R rows, E experts, F width of a weight, H hidden, M rows padded to blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gmm_registry.block_sparse import BLOCK, BlockSparseProducts, Topology
from gmm_registry.contract import BatchSizes, Companions
from gmm_registry.ops import gmm, gmm_into, weight_grad


class Products(ABC):
    """Multiply rows (R, H) with the experts' weights (E, F, H), differentiably."""

    companions: Companions | None = None  # who does the steps around them; None: torch

    @abstractmethod
    def expand(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply each expert's rows (R, H) with ``weight[e].T``, giving inner."""

    @abstractmethod
    def contract(self, inner: Tensor, weight: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Multiply each expert's inner with ``weight[e]``, giving (R, H).

        ``scratch`` (R, H) may be overwritten with the result; no gradient flows then.
        """

    @abstractmethod
    def outer(self, inner: Tensor, rows: Tensor) -> Tensor:
        """Give ``inner_e.T @ rows_e`` for each expert, (E, F, H)."""

    @abstractmethod
    def halves(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        """Split the inner of a weight of width 2 F into those of its first and of its second F."""

    def glu(self, inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Give ``activation(gate) * up`` for the inner of a weight of width 2 F, the gate first."""
        if self.companions is not None and (activation is F.silu or type(activation) is nn.SiLU):
            return self.companions.glu(inner)
        gate, up = self.halves(inner)
        return activation(gate) * up

    @abstractmethod
    def add_bias(self, inner: Tensor, bias: Tensor) -> Tensor:
        """Add each expert's bias (E, F) to its rows."""

    @abstractmethod
    def groups(self, rows: Tensor) -> Tensor:
        """Return the expert of each row, (R,) integers on the device of ``rows`` (R, ...)."""

    @abstractmethod
    def per_row(self, scale: Tensor) -> Tensor:
        """Shape one number a row (R,) so that inner can be multiplied with it."""

    @abstractmethod
    def row_sums(self, inner: Tensor) -> Tensor:
        """Sum inner over each row in fp32, (R,)."""


class GroupedProducts(Products):
    """The grouped formulation: any gmm backend serves, and its companions if it has them."""

    def __init__(
        self, batch_sizes: BatchSizes, backend: str | None, companions: Companions | None = None
    ) -> None:
        self.batch_sizes, self.backend, self.companions = batch_sizes, backend, companions

    def expand(self, rows: Tensor, weight: Tensor) -> Tensor:
        return gmm(rows, weight, self.batch_sizes, trans_b=True, backend=self.backend)

    def contract(self, inner: Tensor, weight: Tensor, scratch: Tensor | None = None) -> Tensor:
        if scratch is None:
            return gmm(inner, weight, self.batch_sizes, backend=self.backend)
        return gmm_into(scratch, inner, weight, self.batch_sizes, backend=self.backend)

    def outer(self, inner: Tensor, rows: Tensor) -> Tensor:
        return weight_grad(inner, rows, self.batch_sizes, backend=self.backend)

    def halves(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        first, second = inner.chunk(2, dim=-1)
        return first, second

    def add_bias(self, inner: Tensor, bias: Tensor) -> Tensor:
        return inner + bias[self.groups(inner)]

    def groups(self, rows: Tensor) -> Tensor:
        index = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
        return torch.searchsorted(self.batch_sizes.ends(rows.device), index, right=True)

    def per_row(self, scale: Tensor) -> Tensor:
        return scale[:, None]

    def row_sums(self, inner: Tensor) -> Tensor:
        return inner.sum(-1, dtype=torch.float32)


class SparseProducts(Products):
    """The block-sparse formulation, on rows that are padded to whole blocks for each expert.

    Args:
        padded_counts: rows of each expert, (E,) int64 on the CPU, multiples of 128.
        backend: what multiplies.
    """

    def __init__(self, padded_counts: Tensor, backend: BlockSparseProducts) -> None:
        self.padded_counts, self.backend = padded_counts, backend
        self._topologies: dict[int, Topology] = {}

    def topology(self, width: int, device: torch.device) -> Topology:
        """Return the topology for weights of a width; each is made once."""
        if width not in self._topologies:
            self._topologies[width] = Topology.of_groups(self.padded_counts, width, device)
        return self._topologies[width]

    def expand(self, rows: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, _Expand.apply(rows, weight, self))  # type: ignore[no-untyped-call]

    def contract(self, inner: Tensor, weight: Tensor, scratch: Tensor | None = None) -> Tensor:
        return cast(Tensor, _Contract.apply(inner, weight, self))  # type: ignore[no-untyped-call]

    def outer(self, inner: Tensor, rows: Tensor) -> Tensor:
        return cast(Tensor, _Outer.apply(inner, rows, self))  # type: ignore[no-untyped-call]

    def halves(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        first, second = inner.chunk(2, dim=1)
        return first, second

    def add_bias(self, inner: Tensor, bias: Tensor) -> Tensor:
        by_block = bias.view(bias.shape[0], bias.shape[1] // BLOCK, 1, BLOCK)
        return inner + by_block[self._owners(self.padded_counts // BLOCK).to(inner.device)]

    def groups(self, rows: Tensor) -> Tensor:
        return self._owners(self.padded_counts).to(rows.device)

    @staticmethod
    def _owners(counts: Tensor) -> Tensor:
        return torch.arange(len(counts)).repeat_interleave(counts)

    def per_row(self, scale: Tensor) -> Tensor:
        return scale.view(-1, 1, BLOCK, 1)

    def row_sums(self, inner: Tensor) -> Tensor:
        return inner.sum((1, 3), dtype=torch.float32).flatten()


def _flat(inner: Tensor) -> Tensor:
    """Give the blocks (B, 128, 128) of inner, in the order of the topology."""
    return inner.contiguous().view(-1, BLOCK, BLOCK)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, products: SparseProducts) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products = products
        groups, width, hidden = weight.shape
        topology = products.topology(width, rows.device)
        weight = weight.contiguous().view(groups * width, hidden)
        values = products.backend.sdd(rows.contiguous(), weight, topology)
        return values.view(rows.shape[0] // BLOCK, width // BLOCK, BLOCK, BLOCK)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        need_rows, need_weight = ctx.needs_input_grad[:2]
        return (
            ctx.products.contract(grad, weight) if need_rows else None,
            ctx.products.outer(grad, rows) if need_weight else None,
            None,
        )


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weight: Tensor, products: SparseProducts) -> Tensor:
        ctx.save_for_backward(inner, weight)
        ctx.products = products
        groups, width, hidden = weight.shape
        topology = products.topology(width, inner.device)
        weight = weight.contiguous().view(groups * width, hidden)
        return products.backend.dsd(_flat(inner), weight, topology)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        need_inner, need_weight = ctx.needs_input_grad[:2]
        return (
            ctx.products.expand(grad, weight) if need_inner else None,
            ctx.products.outer(inner, grad) if need_weight else None,
            None,
        )


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, rows: Tensor, products: SparseProducts) -> Tensor:
        ctx.save_for_backward(inner, rows)
        ctx.products = products
        groups, width = len(products.padded_counts), inner.shape[1] * BLOCK
        topology = products.topology(width, rows.device)
        grad = products.backend.dsd_t(_flat(inner), rows.contiguous(), topology)
        return grad.view(groups, width, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, rows = ctx.saved_tensors
        need_inner, need_rows = ctx.needs_input_grad[:2]
        return (
            ctx.products.expand(rows, grad) if need_inner else None,
            ctx.products.contract(inner, grad) if need_rows else None,
            None,
        )
