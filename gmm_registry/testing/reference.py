"""The reference: fp64, and nothing in common with any backend's way of finding a group's rows.

Each group's rows are selected by a mask over all rows, where backends use offsets, slices or tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _masks(batch_sizes: Tensor) -> Tensor:
    """Return (E, R, 1): one where a row belongs to a group."""
    groups = torch.arange(len(batch_sizes))
    owner = groups.repeat_interleave(batch_sizes)
    return (groups[:, None, None] == owner[None, :, None]).double()


def reference_gmm(x: Tensor, weight: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Compute `gmm` in fp64 from inputs of any floating dtype; differentiable by torch's autograd.

    Returns:
        (R, N) fp64, on the CPU: not every device has fp64, and some round it to fp32 unasked.
    """
    x, weight = x.cpu().double(), weight.cpu().double()
    if trans_b:
        weight = weight.transpose(1, 2)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for mask, matrix in zip(_masks(batch_sizes), weight, strict=True):
        out = out + (x * mask) @ matrix
    return out


def reference_grads(
    x: Tensor, weight: Tensor, batch_sizes: Tensor, grad_out: Tensor, trans_b: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute grad_x (R, K) and grad_weight (the weight's shape) in fp64 on the CPU, by the formulas."""
    x, weight, grad_out = (tensor.cpu().double() for tensor in (x, weight, grad_out))
    if trans_b:
        weight = weight.transpose(1, 2)
    grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for group, mask in enumerate(_masks(batch_sizes)):
        grad_x += (grad_out * mask) @ weight[group].T
        grad_weight[group] = (x * mask).T @ grad_out
    return grad_x, grad_weight.transpose(1, 2) if trans_b else grad_weight
