"""What packages of kernels for NVIDIA GPUs want of a device and of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from gmm_registry.contract import Problem

_ALIGNMENT = 16  # bytes, that such kernels move at once


def unfit_device(problem: Problem, package: str, major: int) -> list[str]:
    """Say why a package that needs CUDA and a compute capability from ``major`` on cannot run there."""
    if torch.version.hip is not None:
        return [f"this torch is for ROCm; {package} needs CUDA"]
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(problem.index)
        if capability[0] < major:
            return ["compute capability {}.{} < {}.0".format(*capability, major)]
    return []


def is_aligned(tensor: Tensor) -> bool:
    """Say whether a tensor lies as a new one of its shape would, at a multiple of 16 bytes.

    Along a dimension of size 1 a contiguous tensor may have any stride, and some kernels look at it.
    """
    packed = tensor.is_contiguous() and tensor.stride(0) == tensor.shape[1:].numel()
    return packed and tensor.data_ptr() % _ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor that is not aligned."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
