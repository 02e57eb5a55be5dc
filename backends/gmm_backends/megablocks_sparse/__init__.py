"""cuda.megablocks_sparse and cpu.megablocks_sparse: the block-sparse formulation of MegaBlocks, block 128.

Each group's rows are filled up with zeros to whole blocks; then all groups are one block-sparse product.
Source: Gale et al., MegaBlocks (2022). The kernels are this repository's own.

Shape letters: R rows, E groups, K inner, N outer dimension; M padded rows, B blocks that are there.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from gmm_backends._cuda import too_old
from gmm_backends._out import deliver
from gmm_backends._refusals import late_import, odd_widths, other_dtype
from gmm_backends._triton import missing_triton
from gmm_backends.megablocks_sparse.padding import Padding
from gmm_backends.megablocks_sparse.products import DTYPES, CheckedProducts
from gmm_registry.contract import BLOCK, BatchSizes, GroupedMatmulBackend, Problem


class MegablocksSparse(CheckedProducts, GroupedMatmulBackend):
    """Pad, multiply block-sparse, unpad; the products themselves are for the sparse MLP."""

    def rejections(self, problem: Problem) -> list[str]:
        widths = odd_widths(problem, BLOCK, f" is no multiple of the block, {BLOCK}")
        return widths + other_dtype(problem, "megablocks_sparse", DTYPES)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        # All matrices below each other, as they lie in memory. Either product meets the same topology.
        width, stacked = weight.shape[1], weight.flatten(0, 1)
        padding = Padding.of(batch_sizes, width, x.device)
        if trans_b:
            values = self.sdd(padding.dense(x), stacked, padding.topology)
            product = padding.rows_of_values(values, width)
        else:
            product = padding.rows_of_dense(self.dsd(padding.values(x), stacked, padding.topology))
        return deliver(product, out)

    def weight_grad(
        self,
        x: Tensor,
        grad_out: Tensor,
        batch_sizes: BatchSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        padding = Padding.of(batch_sizes, x.shape[1], x.device)
        if out is None:
            out, accumulate = x.new_empty(len(batch_sizes), x.shape[1], grad_out.shape[1]), False
        direct = out.contiguous()
        self._products().dsd_t(
            padding.values(x),
            padding.dense(grad_out),
            padding.topology,
            out=direct.flatten(0, 1),
            accumulate=accumulate,
        )
        return deliver(direct, out)


class CpuMegablocksSparse(MegablocksSparse):
    """The products as torch operations."""

    def _products(self) -> Any:
        from gmm_backends.megablocks_sparse import blocks

        return blocks

    def priority(self, problem: Problem) -> int:
        return -20  # it copies what the loop over groups (0) does not


class CudaMegablocksSparse(MegablocksSparse):
    """The products as Triton kernels."""

    def _products(self) -> Any:
        return late_import("gmm_backends.megablocks_sparse.launch", "triton")

    @cached_property
    def _missing(self) -> list[str]:
        return missing_triton()

    def rejections(self, problem: Problem) -> list[str]:
        return super().rejections(problem) + self._missing + too_old(problem, 8)

    def priority(self, problem: Problem) -> int:
        # Below torch's grouped_mm (10): padding writes and reads every row once more, and multiplies the
        # padding. Above the loop over groups (0), which launches a kernel for each group.
        return 5
