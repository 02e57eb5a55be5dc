"""Ask a device, whatever it is called, for its stream, and wait for it."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> int:
    """Say which stream of a device is current; 0 where there is but one, as in compiled code."""
    if device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return 0
    if device.type == "cuda":
        return int(torch._C._cuda_getCurrentRawStream(device.index))  # at a tenth of the cost
    return torch.accelerator.current_stream(device).stream_id if _is_ours(device) else 0


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device, on every stream of it.

    Nothing is waited for on the CPU, on meta, and on what is not the accelerator of this process, of which
    torch knows one.
    """
    if _is_ours(device):
        torch.accelerator.synchronize(device)


def _is_ours(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
