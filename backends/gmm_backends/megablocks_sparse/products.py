"""The three products with their operands checked, over whichever module multiplies.

Shape letters: M padded rows, N columns, H hidden, B blocks that are there.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from gmm_registry.contract import BLOCK, BlockSparseProducts, Topology

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CheckedProducts(BlockSparseProducts):
    """Refuse operands with which a kernel would read past an end, and make the others contiguous."""

    @abstractmethod
    def _products(self) -> Any:
        """Return the module with sdd, dsd and dsd_t."""

    def sdd(self, x: Tensor, weight: Tensor, topology: Topology) -> Tensor:
        (m, n), hidden = topology.shape, x.shape[1:]
        _check(topology, x, (m, *hidden), weight, (n, *hidden))
        product: Tensor = self._products().sdd(x.contiguous(), weight.contiguous(), topology)
        return product

    def dsd(self, values: Tensor, weight: Tensor, topology: Topology) -> Tensor:
        shape = (len(topology.rows), BLOCK, BLOCK)
        _check(topology, values, shape, weight, (topology.shape[1], *weight.shape[1:]))
        product: Tensor = self._products().dsd(values.contiguous(), weight.contiguous(), topology)
        return product

    def dsd_t(self, values: Tensor, x: Tensor, topology: Topology) -> Tensor:
        shape = (len(topology.rows), BLOCK, BLOCK)
        _check(topology, values, shape, x, (topology.shape[0], *x.shape[1:]))
        product: Tensor = self._products().dsd_t(values.contiguous(), x.contiguous(), topology)
        return product


def _check(
    topology: Topology, a: Tensor, a_shape: tuple[int, ...], b: Tensor, b_shape: tuple[int, ...]
) -> None:
    if (a.shape, b.shape) != (a_shape, b_shape) or b.dim() != 2:
        raise ValueError(
            f"operands {tuple(a.shape)} and {tuple(b.shape)} do not fit a topology of {topology.shape} "
            f"with {len(topology.rows)} blocks: they must be {a_shape} and {b_shape}"
        )
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise TypeError(f"operands are {a.dtype} and {b.dtype}; both must be one of {DTYPES}")
    if not a.device == b.device == topology.rows.device:
        raise ValueError(f"operands are on {a.device} and {b.device}, the topology on {topology.rows.device}")
