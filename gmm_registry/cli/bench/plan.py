"""What `gmm-registry bench` is asked to measure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from gmm_registry import environment
from gmm_registry.cli.bench.shapes import SHAPES, Shape
from gmm_registry.contract import BackendKey
from gmm_registry.errors import did_you_mean
from gmm_registry.measure import DISTRIBUTIONS, check_seconds
from gmm_registry.registry import get_backend
from gmm_registry.registry.discovery import parse_device
from gmm_registry.testing.parity import candidates


@dataclass(frozen=True)
class Plan:
    """Measure the backends of ``keys``, and the automatic choice too unless they were asked for by name."""

    device: str
    dtype: torch.dtype
    shapes: list[Shape]
    distributions: list[str]
    keys: list[BackendKey]
    automatic: bool
    seconds: float  # for each shape under each distribution

    @classmethod
    def of(
        cls,
        device: str | None,
        dtype: str | None,
        shapes: Sequence[str],
        own: tuple[int | None, int | None, int | None, int | None],
        distributions: Sequence[str],
        backends: Sequence[str],
        seconds: float,
    ) -> Plan:
        """Fill in what was not asked for, and refuse what does not exist.

        Args:
            device: by default the accelerator, or the CPU.
            dtype: by default float32 on the CPU, else bfloat16.
            shapes: names of `SHAPES`.
            own: rows, k, n and groups of one more shape, or None for each. Without any shape: the small one
                on the CPU, else all others.
            distributions: by default all.
            backends: by default all that accept, and the automatic choice.
            seconds: for each shape under each distribution.

        Raises:
            ValueError: a name is unknown, part of ``own`` is missing, or the seconds are negative or
                not finite.
            GmmRegistryError: the device is not there, or a backend is not for it.
        """
        check_seconds(seconds)
        device = device or environment.default_device()
        for name in backends or (None,):
            get_backend(device, name)  # one answer rather than a refusal of every shape
        on_cpu = parse_device(device)[0] == "cpu"
        chosen = [SHAPES[name] for name in _known("shape", shapes, SHAPES)] + _own(*own)
        return cls(
            device,
            getattr(torch, dtype or ("float32" if on_cpu else "bfloat16")),
            chosen or [shape for name, shape in SHAPES.items() if (name == "small") == on_cpu],
            _known("distribution", distributions, DISTRIBUTIONS) or list(DISTRIBUTIONS),
            candidates(device, backends),
            not backends,
            seconds,
        )


def _own(rows: int | None, k: int | None, n: int | None, groups: int | None) -> list[Shape]:
    if rows and k and n and groups:
        return [Shape("custom", rows, k, n, groups)]
    if rows or k or n or groups:
        raise ValueError("--rows, --k, --n and --groups make a shape together: give all four")
    return []


def _known(what: str, names: Sequence[str], among: Collection[str]) -> list[str]:
    """Return the names, each once, or say which there are."""
    for name in names:
        if name not in among:
            raise ValueError(f"no {what} {name!r}; known: {', '.join(among)}{did_you_mean(name, among)}")
    return list(dict.fromkeys(names))
