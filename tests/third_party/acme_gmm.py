"""cpu.acme: all groups in one batched product, the short ones filled up with rows of zeros.

Shape letters: R rows, E groups, M rows of the longest group, K inner, N outer dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Acme(GroupedMatmulBackend):
    """One torch.bmm over (E, M, K); good where the groups are of about equal length."""

    def rejections(self, problem: Problem) -> list[str]:
        if problem.dtype not in _DTYPES:
            return [f"acme computes {', '.join(map(str, _DTYPES))}, not {problem.dtype}"]
        return []

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        taken = _taken(batch_sizes, x.device)
        if trans_b:
            weight = weight.mT
        product = torch.bmm(_pad(x, taken), weight)[taken]
        return product if out is None else out.copy_(product)

    def weight_grad(
        self,
        x: Tensor,
        grad_out: Tensor,
        batch_sizes: BatchSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        taken = _taken(batch_sizes, x.device)
        # An empty group is all zeros here, and so is its gradient.
        product = torch.bmm(_pad(x, taken).mT, _pad(grad_out, taken))
        if out is None:
            return product
        return out.add_(product) if accumulate else out.copy_(product)


def _taken(batch_sizes: BatchSizes, device: torch.device) -> Tensor:
    """Say which of the (E, M) places hold a row; in their order they are the R rows."""
    places = torch.arange(int(batch_sizes.host.max()), device=device)
    return places < batch_sizes.on(device)[:, None]


def _pad(rows: Tensor, taken: Tensor) -> Tensor:
    """Spread (R, K) over (E, M, K)."""
    padded = rows.new_zeros(*taken.shape, rows.shape[1])
    padded[taken] = rows
    return padded
