"""What kernels for NVIDIA GPUs want of a device and of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from gmm_registry.contract import Problem

_ALIGNMENT = 16  # bytes, that such kernels move at once


def capability(device: str, index: int | None) -> tuple[int, int] | None:
    """Return NVIDIA's compute capability; None for every other device, and where there is none."""
    if device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(index)


def too_old(problem: Problem, major: int) -> list[str]:
    """Say that a compute capability from ``major`` on is needed, if the device is NVIDIA's and has less."""
    found = capability(problem.device, problem.index)
    if found is None or found[0] >= major:
        return []
    return ["compute capability {}.{} < {}.0".format(*found, major)]


def unfit_device(problem: Problem, package: str, major: int) -> list[str]:
    """Say why a package that needs CUDA and a compute capability from ``major`` on cannot run there."""
    if torch.version.hip is not None:
        return [f"this torch is for ROCm; {package} needs CUDA"]
    return too_old(problem, major)


def is_aligned(tensor: Tensor) -> bool:
    """Say whether a tensor lies as a new one of its shape would, at a multiple of 16 bytes.

    Along a dimension of size 1 a contiguous tensor may have any stride, and some kernels look at it.
    """
    packed = tensor.is_contiguous() and tensor.stride(0) == tensor.shape[1:].numel()
    return packed and tensor.data_ptr() % _ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor that is not aligned."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
