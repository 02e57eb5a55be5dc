"""Wait for a device, whatever it is called."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device, on every stream of it.

    Nothing is waited for on the CPU, on meta, and on what is not the accelerator of this process, of which
    torch knows one.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        torch.accelerator.synchronize(device)
