"""What the backends in Triton ask without importing it: whether it is there, and how large a device is."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

_OLDEST = (3, 6)
_LEAST_SHARED = 64 * 1024  # AMD's; also where torch does not tell
_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")  # that bring it


def missing_triton() -> list[str]:
    """Say what is wrong with the triton that is installed; do not import it."""
    try:
        found = find_spec("triton")
    except ValueError:  # somebody's stand-in for the module
        found = None
    if found is None:
        return ["triton is not installed: pip install 'gmm_registry[triton]'"]
    installed = triton_version()
    if installed and installed < _OLDEST:
        return [f"triton {_installed()} < {'.'.join(map(str, _OLDEST))}, which torch 2.10 brings"]
    return []


def triton_version() -> tuple[int, int] | None:
    """Return the first two numbers of the version that is installed; None if its package does not say."""
    numbers = re.match(r"(\d+)\.(\d+)", _installed())
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _installed() -> str:
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; 0 where torch does not tell."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
