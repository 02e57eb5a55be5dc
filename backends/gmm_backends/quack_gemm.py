"""cuda.quack: the GEMM of quack-kernels, for Hopper and Blackwell. It reads where groups end on the device.

It compiles a kernel at the first call of each kind, in two seconds, and keeps it on disk: forward, forward
with trans_b, weight gradient, and that added to another, in each dtype, not for each shape. Tuning would take
minutes and is off.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import re
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from gmm_backends._cuda import aligned, is_aligned, unfit_device
from gmm_backends._out import deliver
from gmm_backends._refusals import late_import, odd_widths, other_dtype
from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_DTYPES = (torch.bfloat16, torch.float16)  # fp32 it refuses, or rounds to TF32 on Blackwell
_OLDEST = (0, 6, 5)
_MOST_ROWS = 2**30  # of a group: the range in which it finds a group's end


class Quack(GroupedMatmulBackend):
    """quack.gemm_interface.gemm: over ranges of rows, and for the weight gradient of the inner dimension."""

    def rejections(self, problem: Problem) -> list[str]:
        # Every backend is asked before one is chosen, and importing quack takes seconds and changes CuTe's
        # classes for the whole process. So its version is read here, and it is imported where it computes.
        reasons = self._missing + unfit_device(problem, "quack", 9) + other_dtype(problem, "quack", _DTYPES)
        reasons += odd_widths(problem, 8, "; quack needs a multiple of 8, for rows of whole 16 bytes")
        if problem.rows > _MOST_ROWS:
            reasons.append(f"{problem.rows} rows; quack takes at most {_MOST_ROWS}")
        return reasons

    @cached_property
    def _missing(self) -> list[str]:
        """Say what is wrong with the quack-kernels that is installed; do not import it."""
        install = "pip install 'gmm_registry[quack]'"
        try:
            installed = version("quack-kernels")
        except PackageNotFoundError:
            return [f"quack-kernels is not installed: {install}"]
        if tuple(map(int, re.findall(r"\d+", installed)[:3])) < _OLDEST:
            return [f"quack-kernels {installed} < 0.6.5, the oldest that was tested: {install}"]
        return []

    def priority(self, problem: Problem) -> int:
        # On an H200 as fast as torch's grouped_mm (10), and a tenth to a third faster in weight gradients.
        return 20

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        weight = aligned(weight)
        if trans_b:
            weight = weight.mT  # a view; it sees by the strides how a matrix lies
        direct = out if out is not None and is_aligned(out) else None
        offsets = batch_sizes.offsets(x.device)
        with torch.cuda.device_of(x):  # it compiles for the current device
            product: Tensor = _quack().gemm(aligned(x), weight, out=direct, cu_seqlens_m=offsets, tuned=False)
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
        operands = aligned(x).T, aligned(grad_out)
        groups: dict[str, Any] = {"cu_seqlens_k": batch_sizes.offsets(x.device), "tuned": False}
        with torch.cuda.device_of(x):
            if out is not None and is_aligned(out):
                # Straight from the fp32 sums, of whichever dtype out is. An empty group's sum is zero.
                (_quack().gemm_add_inplace if accumulate else _quack().gemm)(*operands, out=out, **groups)
                return out
            product: Tensor = _quack().gemm(*operands, **groups)
        return deliver(product, out, accumulate)


def _quack() -> Any:
    return late_import("quack.gemm_interface", "quack")
