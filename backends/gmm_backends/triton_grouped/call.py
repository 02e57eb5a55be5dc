"""Call a kernel with less work on the host than Triton's own look-up, which a short product does not hide."""

from __future__ import annotations

import threading
from typing import Any

import torch

_compiled: dict[tuple[Any, ...], Any] = {}
_thread = threading.local()


def call(
    kernel: Any,
    grid: int,
    device: torch.device,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    kind: tuple[object, ...],
    **options: int,
) -> None:
    """Launch ``kernel[grid](*args, *constants)``, compiled at the first time.

    ``kind`` tells apart all arguments for which Triton compiles another kernel for an NVIDIA GPU: dtypes, and
    the numbers and addresses that are multiples of 16. For others it looks at more, such as at tensors over
    2 GiB, so there it looks itself.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        kernel[(grid,)](*args, *constants, **options)
        return
    key = (kernel.__module__, kernel.__name__, device, constants, kind, *options.values())
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = kernel.warmup(*args, *constants, grid=(grid,), **options)
    if not hasattr(_thread, "bound"):  # a thread of autograd's may have done nothing on the device yet
        _thread.bound = torch.get_device_module(device).mem_get_info(device)
    compiled[grid, 1, 1](*args, *constants)


def sixteenths(*numbers: int) -> tuple[bool, ...]:
    """Say of numbers and addresses what Triton compiles another kernel for."""
    return tuple(number % 16 == 0 for number in numbers) + tuple(number == 1 for number in numbers)
