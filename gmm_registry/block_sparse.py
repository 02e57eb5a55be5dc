"""Block-sparse matrices of the MegaBlocks formulation, and the products a backend offers on them.

A dMoE layer sees its experts as one block-sparse matrix: rows are the tokens, padded to whole blocks for
each expert, columns the widths of all experts side by side, and only the blocks where a token meets its own
expert are there. Source: Gale et al., MegaBlocks (2022), the section on sparse matrix products.

Shape letters: M padded rows, N columns (experts x width), H hidden, B blocks that are there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a block


@dataclass(frozen=True)
class Topology:
    """Say which blocks of an (M, N) matrix are there: hybrid blocked CSR and COO, with transpose indices.

    The values of such a matrix are (B, 128, 128), in row-major order of blocks. All indices are int32 and
    on one device.
    """

    shape: tuple[int, int]
    offsets: Tensor  # (M / 128 + 1,): where each row of blocks starts among the blocks
    rows: Tensor  # (B,): the row of each block
    columns: Tensor  # (B,): the column of each block
    transposed_offsets: Tensor  # (N / 128 + 1,): where each column of blocks starts in `transposed`
    transposed: Tensor  # (B,): the blocks in column-major order

    @classmethod
    def of_groups(cls, counts: Tensor, width: int, device: torch.device | str) -> Topology:
        """Build the topology of a dMoE layer: each group's rows meet that group's columns.

        Args:
            counts: padded rows of each group, (E,) int64 on the CPU, multiples of 128.
            width: columns of each group, a multiple of 128.
            device: where the indices shall lie.

        Raises:
            ValueError: the width or a count is no multiple of 128.
        """
        if width % BLOCK or bool((counts % BLOCK).any()):
            raise ValueError(
                f"width {width} and padded counts {counts.tolist()} must be multiples of the block, {BLOCK}"
            )
        groups, wide = len(counts), width // BLOCK
        tall = counts // BLOCK  # rows of blocks of each group
        owner = torch.arange(groups).repeat_interleave(tall)  # the group of each row of blocks
        rows = torch.arange(len(owner)).repeat_interleave(wide)
        columns = (owner[:, None] * wide + torch.arange(wide)).flatten()
        in_column = tall.repeat_interleave(wide)  # blocks in each column of blocks
        before = in_column.cumsum(0) - in_column  # blocks in the columns before it
        column = torch.arange(groups * wide).repeat_interleave(in_column)  # of each block, column-major
        first = (tall.cumsum(0) - tall)[column // wide]  # the group's first row of blocks
        transposed = (first + torch.arange(len(column)) - before[column]) * wide + column % wide

        indices = (
            torch.arange(len(owner) + 1) * wide,
            rows,
            columns,
            torch.nn.functional.pad(in_column.cumsum(0), (1, 0)),
            transposed,
        )
        moved = torch.cat(indices).to(device, torch.int32)  # one copy for all
        return cls((int(counts.sum()), groups * width), *moved.split([len(index) for index in indices]))


class BlockSparseProducts:
    """The three products of a dMoE layer on block-sparse values; a backend that has them derives from this.

    They are each other's derivatives. ``weight`` is all experts' matrices below each other, (N, H).
    """

    @abstractmethod
    def sdd(self, x: Tensor, weight: Tensor, topology: Topology) -> Tensor:
        """Multiply dense by dense, only where a block is: ``x @ weight.T``.

        Args:
            x: (M, H).
            weight: (N, H).
            topology: of the (M, N) result.

        Returns:
            values (B, 128, 128), the dtype of x.
        """

    @abstractmethod
    def dsd(self, values: Tensor, weight: Tensor, topology: Topology) -> Tensor:
        """Multiply sparse by dense: (M, N) sparse ``@ weight`` (N, H), giving (M, H)."""

    @abstractmethod
    def dsd_t(self, values: Tensor, x: Tensor, topology: Topology) -> Tensor:
        """Multiply transposed sparse by dense: (M, N) sparse ``.T @ x`` (M, H), giving (N, H).

        A column of blocks that has none gives zeros.
        """
