"""Rows of groups to whole blocks and back: what the block-sparse formulation asks of a grouped matmul.

Shape letters: R rows, M padded rows, T = M / 128 rows of blocks, W columns of a group, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gmm_registry.contract import BLOCK, BatchSizes, Topology


@dataclass(frozen=True)
class Padding:
    """Know where each row goes when every group is filled up with zeros to whole blocks."""

    topology: Topology  # of the (M, E * W) matrix
    row: Tensor  # (R,) int64: the row of blocks that each row goes to
    within: Tensor  # (R,) int64: its row in there

    @classmethod
    def of(cls, batch_sizes: BatchSizes, width: int, device: torch.device) -> Padding:
        """Return the padding for groups of ``width`` columns; made once for all products of a layer."""
        return batch_sizes.derived(
            ("megablocks_sparse", width), lambda: cls._make(batch_sizes, width, device), device
        )

    @classmethod
    def _make(cls, batch_sizes: BatchSizes, width: int, device: torch.device) -> Padding:
        counts = batch_sizes.host
        padded = (counts + BLOCK - 1) // BLOCK * BLOCK
        moved = (padded - counts).cumsum(0) - (padded - counts)  # how far each group's rows move down
        rows = int(counts.sum())
        # Only E numbers cross to the device, not R.
        move = moved.to(device).repeat_interleave(batch_sizes.on(device), output_size=rows)
        places = torch.arange(rows, device=device) + move
        return cls(Topology.of_groups(padded, width, device), places // BLOCK, places % BLOCK)

    def dense(self, x: Tensor) -> Tensor:
        """Spread (R, H) over the padded rows, (M, H)."""
        padded = x.new_zeros(self.topology.shape[0], x.shape[1])
        padded.view(-1, BLOCK, x.shape[1])[self.row, self.within] = x
        return padded

    def rows_of_dense(self, padded: Tensor) -> Tensor:
        """Take the rows (R, H) out of the padded ones, (M, H)."""
        return padded.view(-1, BLOCK, padded.shape[1])[self.row, self.within]

    def values(self, x: Tensor) -> Tensor:
        """Spread (R, W) over the values of the block-sparse matrix, (B, 128, 128)."""
        values = x.new_zeros(len(self.topology.rows), BLOCK, BLOCK)
        self._by_row(values, x.shape[1])[self.row, self.within] = x.view(len(x), -1, BLOCK)
        return values

    def rows_of_values(self, values: Tensor, width: int) -> Tensor:
        """Take the rows (R, W) out of the values, (B, 128, 128)."""
        return self._by_row(values, width)[self.row, self.within].reshape(-1, width)

    def _by_row(self, values: Tensor, width: int) -> Tensor:
        """See the values as (T, 128, W / 128, 128): every row of blocks has the same number of them."""
        return values.view(-1, width // BLOCK, BLOCK, BLOCK).transpose(1, 2)
