"""The block-sparse products as torch operations, for the CPU.

Shape letters: M padded rows, N columns, H hidden, B blocks that are there; a rectangle of blocks is
m blocks tall and n wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor

from gmm_backends._cpu import is_slow
from gmm_registry.contract import BLOCK, Topology


def sdd(x: Tensor, weight: Tensor, topology: Topology) -> Tensor:
    """Do `BlockSparseProducts.sdd`."""
    values = x.new_empty(len(topology.rows), BLOCK, BLOCK)
    for rows, columns, blocks in _rectangles(topology.offsets, topology.columns):
        if columns:
            product = _product(x[_span(rows)], _taken(weight, columns).T)
            tiled = product.view(len(rows), BLOCK, len(columns), BLOCK).transpose(1, 2)
            values[blocks].view_as(tiled).copy_(tiled)
    return values


def dsd(values: Tensor, weight: Tensor, topology: Topology) -> Tensor:
    """Do `BlockSparseProducts.dsd`."""
    out = weight.new_empty(topology.shape[0], weight.shape[1])
    for rows, columns, blocks in _rectangles(topology.offsets, topology.columns):
        tiled = values[blocks].view(len(rows), len(columns), BLOCK, BLOCK).transpose(1, 2)
        left = tiled.reshape(len(rows) * BLOCK, len(columns) * BLOCK)
        out[_span(rows)] = _product(left, _taken(weight, columns))
    return out


def dsd_t(
    values: Tensor, x: Tensor, topology: Topology, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Do `BlockSparseProducts.dsd_t`, into ``out`` (of any floating dtype) or added to it."""
    if out is None:
        out, accumulate = x.new_empty(topology.shape[1], x.shape[1]), False
    transposed = topology.transposed.long()
    exact = accumulate or out.dtype != x.dtype
    for columns, rows, places in _rectangles(topology.transposed_offsets, topology.rows[transposed]):
        tiled = values[transposed[places]].view(len(columns), len(rows), BLOCK, BLOCK).permute(0, 3, 1, 2)
        left = tiled.reshape(len(columns) * BLOCK, len(rows) * BLOCK)
        product = _product(left, _taken(x, rows), exact)
        result = out[_span(columns)]
        result.add_(product) if accumulate else result.copy_(product)
    return out


def _rectangles(offsets: Tensor, indices: Tensor) -> Iterator[tuple[range, list[int], slice]]:
    """Split a matrix into rectangles of blocks: neighbouring rows whose blocks are in the same columns.

    In a dMoE layer a rectangle is an expert, so that no more than one expert's operands are copied at once.

    Yields:
        the rows (m), the columns (n), and where the m * n blocks are in the row-major order.
    """
    starts, columns = offsets.tolist(), indices.tolist()
    rows = (columns[start:end] for start, end in pairwise(starts))
    for same, group in groupby(enumerate(rows), key=lambda row: row[1]):
        numbers = [number for number, _ in group]
        first, last = numbers[0], numbers[-1] + 1
        yield range(first, last), same, slice(starts[first], starts[last])


def _span(blocks: range) -> slice:
    return slice(blocks.start * BLOCK, blocks.stop * BLOCK)


def _taken(dense: Tensor, blocks: list[int]) -> Tensor:
    """Take blocks of rows out of (M, H): a view of neighbours, a copy of others."""
    neighbours = range(blocks[0], blocks[0] + len(blocks)) if blocks else range(0)
    if blocks == list(neighbours):
        return dense[_span(neighbours)]
    return dense.view(-1, BLOCK, dense.shape[1])[blocks].flatten(0, 1)


def _product(a: Tensor, b: Tensor, exact: bool = False) -> Tensor:
    """Compute ``a @ b``, summed in fp32; ``exact`` does not round the sums either."""
    if exact or is_slow(a.dtype):
        a, b = a.to(torch.float32), b.to(torch.float32)
    return a @ b
