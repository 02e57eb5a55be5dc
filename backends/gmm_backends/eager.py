"""any.eager: the loop over groups, on any device torch knows.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gmm_backends._cpu import is_slow
from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Eager(GroupedMatmulBackend):
    """One torch.mm for each group that has rows."""

    def rejections(self, problem: Problem) -> list[str]:
        if problem.dtype not in _DTYPES:
            return [f"{problem.dtype} has no torch.mm; needs one of {', '.join(map(str, _DTYPES))}"]
        return []

    def priority(self, problem: Problem) -> int:
        return 0

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        if trans_b:
            weight = weight.mT
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[2])
        sizes = batch_sizes.host.tolist()
        for size, rows, matrix, result in zip(
            sizes, x.split(sizes), weight.unbind(), out.split(sizes), strict=True
        ):
            if size:
                _product(rows, matrix, result)
        return out

    def weight_grad(
        self,
        x: Tensor,
        grad_out: Tensor,
        batch_sizes: BatchSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        if out is None:
            out = x.new_empty(len(batch_sizes), x.shape[1], grad_out.shape[1])
            accumulate = False
        sizes = batch_sizes.host.tolist()
        for size, rows, grads, result in zip(
            sizes, x.split(sizes), grad_out.split(sizes), out.unbind(), strict=True
        ):
            if size:
                _product(rows.mT, grads, result, accumulate)
            elif not accumulate:
                result.zero_()
        return out


def _product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Write ``a @ b`` to ``out``, or add it; sum in fp32 and round once."""
    if out.dtype != a.dtype or (a.is_cpu and is_slow(a.dtype)):
        # One group's operands at a time are held in fp32, never a whole weight.
        product = torch.mm(a.to(torch.float32), b.to(torch.float32))
        out.add_(product) if accumulate else out.copy_(product)
    elif accumulate:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)
