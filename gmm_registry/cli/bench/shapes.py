"""The products that `gmm-registry bench` knows by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """One grouped product: x (rows, k), weight (groups, k, n)."""

    name: str
    rows: int
    k: int
    n: int
    groups: int

    @property
    def flops(self) -> int:
        """The operations of each of the three products."""
        return 2 * self.rows * self.k * self.n

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the size of x, weight and result together."""
        return (self.rows * (self.k + self.n) + self.groups * self.k * self.n) * dtype.itemsize

    def __str__(self) -> str:
        return f"{self.rows} rows in {self.groups} groups, K {self.k}, N {self.n}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen35b", 65536, 2048, 1024, 256),
        Shape("qwen397b_ep16", 40960, 4096, 2048, 32),
        Shape("mixtral_gate", 16384, 4096, 28672, 8),
        Shape("mixtral_down", 16384, 14336, 4096, 8),
        Shape("megablocks_paper", 16384, 1024, 4096, 64),
        Shape("decode", 512, 2048, 1024, 128),
        Shape("small", 2048, 512, 512, 16),
    )
}
