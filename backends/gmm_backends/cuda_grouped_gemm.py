"""cuda.cuda_grouped_gemm: the package grouped_gemm, a cuBLAS product for each group, or CUTLASS if built so.

Nothing tells how it was built, so what either cannot do is refused. nv_grouped_gemm, the fork for Megatron,
has the same import name and the same function, and serves one device of a process.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import distributions

import torch
from torch import Tensor

from gmm_backends._cuda import aligned, is_aligned, unfit_device
from gmm_backends._out import deliver
from gmm_backends._refusals import not_importable, odd_widths, other_dtype
from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_FORK = "nv_grouped_gemm"
_NEED = "grouped_gemm needs a multiple of 8 where it was built with CUTLASS"
_MOST = 2**31 - 1  # elements of a group, which CUTLASS's arguments are made of in 32 bits


class CudaGroupedGemm(GroupedMatmulBackend):
    """grouped_gemm.backend.gmm, for the product and for both gradients."""

    _home: torch.device | None = None  # of the fork in this process

    def rejections(self, problem: Problem) -> list[str]:
        if problem.device != "cuda":
            return [f"grouped_gemm computes on cuda, not on {problem.device}"]
        reasons = [*self._missing, *unfit_device(problem, "grouped_gemm", 8)]
        reasons += other_dtype(problem, "grouped_gemm", (torch.bfloat16,))
        reasons += odd_widths(problem, 8, f"; {_NEED}")
        rows, k, n = problem.rows, problem.k, problem.n
        most = max(rows * k, rows * n, k * n)  # if one group has all rows
        if most > _MOST:
            reasons.append(f"up to {most} elements in a group; grouped_gemm takes at most {_MOST}")
        return reasons

    @cached_property
    def _missing(self) -> list[str]:
        """What is wrong with grouped_gemm, which is imported here; found once for each instance."""
        # It is built with the torch that is here.
        install = "pip install --no-build-isolation 'gmm_registry[grouped-gemm]'"
        return not_importable("grouped_gemm", install, "was it built for this torch?")

    def priority(self, problem: Problem) -> int:
        # It waits for the counts and launches a kernel for each group, as the loop in Python does (0), only
        # faster. On an H200 it equals torch's grouped_mm (10) with few groups, and with 256 it takes four to
        # seven times as long.
        return 3

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        product = self._multiply(x, weight, batch_sizes.host, out, trans_b=trans_b)
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
        product = self._multiply(x, grad_out, batch_sizes.host, None if accumulate else out, trans_a=True)
        for size, matrix in zip(batch_sizes.host.tolist(), product.unbind(), strict=True):
            if not size:
                matrix.zero_()  # cuBLAS does not say what a product over nothing writes
        return deliver(product, out, accumulate)

    def _multiply(self, a: Tensor, b: Tensor, counts: Tensor, out: Tensor | None, **trans: bool) -> Tensor:
        """Overwrite and return ``out`` if it can be written to directly, else return a new tensor."""
        from grouped_gemm import backend

        if self._is_fork:
            # It makes its handles once, on the device that is the current one then.
            home = CudaGroupedGemm._home = CudaGroupedGemm._home or a.device
            if a.device != home:
                what = f"{_FORK} made its cuBLAS handles on {home} and cannot use {a.device}"
                raise NotImplementedError(f"{what}: give each device a process, or take another backend")
        if out is not None and not (out.dtype == a.dtype and is_aligned(out)):
            out = None  # with trans_a it would take any strides for contiguous ones
        with torch.cuda.device_of(a):  # grouped_gemm 15: it computes on the current device, whatever a's is
            product: Tensor = backend.gmm(aligned(a), aligned(b), counts, c=out, **trans)
        return product

    @cached_property
    def _is_fork(self) -> bool:
        return bool([*distributions(name=_FORK)])
