"""What this machine has: versions and devices, for reports."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

# Distributions whose version decides what a backend can do.
PACKAGES = (
    "gmm_registry",
    "torch",
    "stevedore",
    "triton",
    "torch_npu",
    "grouped_gemm",
    "nv-grouped-gemm",
    "megablocks",
    "quack-kernels",
    "transformers",
)


def versions() -> dict[str, str]:
    """Return the version of Python and of each installed package of `PACKAGES`; imports none."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def default_device() -> str:
    """Return the type of the accelerator that torch sees here, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def device_name(device: str) -> str:
    """Return what the hardware calls itself, or that it is not there."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"
    module: Any = getattr(torch, kind, None)
    if not (hasattr(module, "is_available") and module.is_available()):
        return f"no {kind} device"
    return str(module.get_device_name(int(index or 0))) if hasattr(module, "get_device_name") else kind


def describe(device: str) -> dict[str, str]:
    """Describe where a result came from: versions, platform and device."""
    return {**versions(), "platform": platform.platform(), "device": device_name(device)}
