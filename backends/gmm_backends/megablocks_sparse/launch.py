"""The block-sparse products on CUDA tensors, or on the CPU's under the Triton interpreter.

Shape letters: M padded rows, N columns, H hidden, B blocks that are there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gmm_backends._triton import shared_memory
from gmm_backends.megablocks_sparse import kernels
from gmm_registry.contract import BLOCK, Topology


class Tile(NamedTuple):
    """How one program works: 128 rows by ``n`` columns of the result, ``k`` of the inner sum a step.

    The programs of ``band`` neighbouring rows run together, so that they share a weight block in the cache.
    ``stages`` steps of operands are in flight.
    """

    n: int
    k: int
    band: int
    warps: int
    stages: int

    def shared_memory(self, dtype: torch.dtype) -> int:
        """Bytes that the steps in flight take."""
        return (BLOCK + self.n) * self.k * dtype.itemsize * self.stages


_FP32 = Tile(128, 16, 8, warps=8, stages=3)  # full precision has no tensor cores
TILES = (  # of 16-bit types; the first that fits into shared memory is taken
    Tile(256, 64, 8, warps=8, stages=4),
    Tile(256, 64, 8, warps=8, stages=3),
    Tile(128, 64, 8, warps=8, stages=3),
    Tile(128, 32, 8, warps=4, stages=2),
)


def fitting(dtype: torch.dtype, shared: int) -> Tile:
    """Choose the tile for a multiprocessor with that many bytes of shared memory."""
    if dtype == torch.float32:
        return _FP32
    return next((tile for tile in TILES if tile.shared_memory(dtype) < shared), TILES[-1])


def _tile(dtype: torch.dtype, device: torch.device) -> Tile:
    return fitting(dtype, shared_memory(device))


def sdd(x: Tensor, weight: Tensor, topology: Topology, *, tile: Tile | None = None) -> Tensor:
    """Do `BlockSparseProducts.sdd`."""
    blocks, hidden = len(topology.rows), x.shape[1]
    values = x.new_empty(blocks, BLOCK, BLOCK)
    if not blocks:
        return values
    tile = tile or _tile(x.dtype, x.device)
    # In a dMoE layer every row holds the same number of blocks. Only speed relies on it here.
    tall = topology.shape[0] // BLOCK
    tall, cells = (tall, blocks // tall) if blocks % tall == 0 else (blocks, 1)
    wide = tile.n // BLOCK
    if cells % wide:
        wide = 1
    cells //= wide
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernels.sdd[(tall * cells,)](
            x,
            weight,
            values,
            topology.rows,
            topology.columns,
            hidden,
            tall,
            cells,
            BLOCK=BLOCK,
            WIDE=wide,
            K=tile.k,
            BAND=tile.band,
            EVEN=hidden % tile.k == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return values


def dsd(values: Tensor, weight: Tensor, topology: Topology, *, tile: Tile | None = None) -> Tensor:
    """Do `BlockSparseProducts.dsd`."""
    out = weight.new_empty(topology.shape[0], weight.shape[1])
    return _sum_blocks(values, weight, out, topology.offsets, None, topology.columns, False, tile)


def dsd_t(
    values: Tensor,
    x: Tensor,
    topology: Topology,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Do `BlockSparseProducts.dsd_t`, into ``out`` (of any floating dtype) or added to it."""
    if out is None:
        out, accumulate = x.new_empty(topology.shape[1], x.shape[1]), False
    blocks, offsets = topology.transposed, topology.transposed_offsets
    rows = topology.rows.index_select(0, blocks)  # not in the kernel, where each step would wait for it
    return _sum_blocks(values, x, out, offsets, blocks, rows, accumulate, tile)


def _sum_blocks(
    values: Tensor,
    dense: Tensor,
    out: Tensor,
    offsets: Tensor,
    blocks: Tensor | None,
    sources: Tensor,
    accumulate: bool,
    tile: Tile | None,
) -> Tensor:
    """Launch the kernel of dsd, or with ``blocks`` in column-major order that of its transposed form."""
    hidden = dense.shape[1]
    if 0 in (len(values), hidden):
        return out if accumulate else out.zero_()
    tile = tile or _tile(dense.dtype, dense.device)
    n = min(tile.n, max(64, 1 << (hidden - 1).bit_length()))
    tall, cells = len(offsets) - 1, -(-hidden // n)
    with torch.cuda.device_of(dense):
        kernels.dsd[(tall * cells,)](
            values,
            dense,
            out,
            offsets,
            blocks,
            sources,
            hidden,
            tall,
            cells,
            BLOCK=BLOCK,
            N=n,
            K=tile.k,
            BAND=tile.band,
            EVEN=hidden % n == 0,
            TRANSPOSED=blocks is not None,
            ACCUMULATE=accumulate,
            num_warps=tile.warps,
            num_stages=2 * tile.stages - 1,  # Triton gives every other one to the look-up of the block
        )
    return out
