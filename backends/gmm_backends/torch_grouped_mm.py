"""any.torch_grouped_mm: torch.nn.functional.grouped_mm, wherever torch has it.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gmm_backends._cpu import is_slow
from gmm_backends._cuda import too_old
from gmm_backends._out import deliver
from gmm_backends._refusals import other_dtype
from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes; grouped_mm refuses rows and pointers that are not multiples of it


class TorchGroupedMm(GroupedMatmulBackend):
    """torch's own grouped matmul, its operands copied where it wants 16-byte rows."""

    def rejections(self, problem: Problem) -> list[str]:
        reasons = []
        if not hasattr(F, "grouped_mm"):
            reasons.append(f"torch {torch.__version__} has no nn.functional.grouped_mm; needs 2.10")
        return reasons + other_dtype(problem, "grouped_mm", _DTYPES) + too_old(problem, 8)

    def priority(self, problem: Problem) -> int:
        # On the CPU grouped_mm is itself a loop, so that eager is as good where it needs no copy.
        aligned = not (_padding(problem.k, problem.dtype) or _padding(problem.n, problem.dtype))
        return 10 if problem.device != "cpu" or (aligned and not is_slow(problem.dtype)) else -10

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        x, weight = _aligned(x), _aligned(weight)
        if trans_b:
            weight = weight.mT
        product = F.grouped_mm(x, weight, offs=batch_sizes.ends(x.device))
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
        x, grad_out = _aligned(x), _aligned(grad_out)
        product = F.grouped_mm(x.mT, grad_out, offs=batch_sizes.ends(x.device))
        if _leaves_empty_groups(x.device):
            product.masked_fill_((batch_sizes.on(x.device) == 0)[:, None, None], 0)
        return deliver(product, out, accumulate)


def _padding(width: int, dtype: torch.dtype) -> int:
    return -width % (_ALIGNMENT // dtype.itemsize)


def _leaves_empty_groups(device: torch.device) -> bool:
    """Say whether the weight gradient of an empty group is what lay in memory.

    So it is on Blackwell (pytorch 172439, cutlass 2674) and on AMD GPUs (pytorch 174314); Hopper's kernel and
    the loop for other devices write zeros.
    """
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (10, 0)


def _aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor to aligned rows at an aligned address, if it is not there already."""
    width = tensor.shape[-1]
    # Where there is one row only, a contiguous tensor may have any stride, and grouped_mm looks at it.
    if tensor.stride(-2) == width and (width * tensor.element_size() | tensor.data_ptr()) % _ALIGNMENT == 0:
        return tensor
    row = width + _padding(width, tensor.dtype)
    return tensor.new_empty(*tensor.shape[:-1], row)[..., :width].copy_(tensor)
