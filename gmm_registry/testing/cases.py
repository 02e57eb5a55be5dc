"""The problems that every backend is tested with, and their inputs, the same bits on every machine.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gmm_registry.contract import dtype_name

_MANTISSA = 24  # bits of the random numbers, as many as fp32 holds


class Inputs(NamedTuple):
    """What one case multiplies: x (R, K), weight (E, K, N) or (E, N, K), counts (E,), grad_out (R, N)."""

    x: Tensor
    weight: Tensor
    batch_sizes: Tensor
    grad_out: Tensor

    def to(self, device: str) -> Inputs:
        """Copy to a device, fresh leaves each time; the counts stay on the CPU."""
        x, weight, grad_out = (t.to(device, copy=True) for t in (self.x, self.weight, self.grad_out))
        return Inputs(x, weight, self.batch_sizes, grad_out)

    def fingerprint(self) -> str:
        """Hash shapes, dtypes and every bit."""
        return digest(*self)


def digest(*tensors: Tensor) -> str:
    """Hash shapes, dtypes and every bit of tensors; SHA-256 in hexadecimal."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True)
class Case:
    """One grouped matmul: the rows of each group, K, N, and how it is stored."""

    name: str
    counts: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    trans_b: bool = False
    routed: bool = False  # x are embeddings of the routed text, not noise

    def inputs(self) -> Inputs:
        """Make the inputs on the CPU.

        They come from integers, and dividing those by a power of two is exact, so no vector library's
        logarithm can make one machine differ from another. The weight is scaled to keep the result near 1.
        """
        generator = torch.Generator().manual_seed(0)
        rows, groups = sum(self.counts), len(self.counts)
        shape = (groups, self.n, self.k) if self.trans_b else (groups, self.k, self.n)
        scale = 2.0 ** -((max(self.k, 1).bit_length() + 1) // 2)
        x = _routed().embed(self.k) if self.routed else _uniform((rows, self.k), generator)
        weight = _uniform(shape, generator) * scale
        grad_out = _uniform((rows, self.n), generator)
        counts = torch.tensor(self.counts, dtype=torch.int64)
        return Inputs(x.to(self.dtype), weight.to(self.dtype), counts, grad_out.to(self.dtype))


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from [-1, 1), fp32, on a grid of 2**-23."""
    half = 2 ** (_MANTISSA - 1)
    integers = torch.randint(-half, half, shape, generator=generator)
    return integers.to(torch.float32).div(half)


class _Routed(NamedTuple):
    counts: tuple[int, ...]
    embed: Callable[[int], Tensor]


@lru_cache(maxsize=1)
def _routed(groups: int = 16, top_k: int = 2) -> _Routed:
    """Route the bytes of the Zen of Python, in the order in which an MoE layer would multiply them.

    Every CPython has the same text, in the source of its module ``this``. A byte's logits are those of
    the byte and of the one before it; they are integers, so that every machine picks the same experts.
    """
    spec = importlib.util.find_spec("this")
    if spec is None or spec.origin is None:
        raise RuntimeError("the standard library's module 'this', the text of a parity case, is missing")
    text = torch.tensor(list(Path(spec.origin).read_bytes()))
    generator = torch.Generator().manual_seed(1)
    tables = torch.randint(-(2**20), 2**20, (2, 256, groups), generator=generator)
    logits = tables[0, text] + tables[1, text.roll(1)]
    experts = logits.argsort(dim=1, descending=True, stable=True)[:, :top_k].flatten()
    order = experts.argsort(stable=True)
    tokens = text.repeat_interleave(top_k)[order]

    def embed(width: int) -> Tensor:
        return _uniform((256, width), torch.Generator().manual_seed(2))[tokens]

    return _Routed(tuple(torch.bincount(experts, minlength=groups).tolist()), embed)


def _cases() -> list[Case]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    cases = [
        # What MindSpeed-MM's test of its grouped_matmul covers (seed: its pull request 2664), in bf16.
        Case("equal groups", (64,) * 8, 128, 256),
        Case("unequal groups", (3, 130, 1, 57, 200, 16, 9, 96), 128, 256),
        Case("small K going up", (40, 24, 72, 56), 16, 512),
        Case("four experts, equal share", (128,) * 4, 256, 128),
        # What it does not.
        Case("first group empty", (0, 5, 3), 32, 16),
        Case("last group empty", (5, 3, 0), 32, 16),
        Case("middle groups empty", (2, 0, 0, 3), 32, 16),
        Case("all groups but one empty", (0, 0, 9, 0), 32, 16),
        Case("one group", (37,), 64, 48),
        Case("no rows", (0, 0, 0), 32, 16),
        Case("groups of one row", (1,) * 33, 32, 64),
        Case("130 groups, half of them empty", (0, 1) * 65, 32, 16),  # an NPU's tensor lists end at 128
        Case("a tile spans groups", (64, 1, 63, 0, 129), 128, 128),
        Case("inner 12, outer 8", (4, 0, 7), 12, 8),
        Case("inner 8, outer 12", (4, 0, 7), 8, 12),
        Case("inner 13, outer 1", (4, 0, 7), 13, 1),
        Case("inner 1, outer 13", (4, 0, 7), 1, 13),
        Case("inner 100, outer 72", (30, 2, 41), 100, 72),
        Case("long inner sum", (20, 12), 4096, 32),
        Case("long group", (3000, 96), 32, 32),
    ]
    for dtype in (bf16, f16, f32):
        name = dtype_name(dtype)
        cases += [
            Case(f"{name}", (33, 0, 65, 14), 96, 80, dtype),
            Case(f"{name}, trans_b", (33, 0, 65, 14), 96, 80, dtype, trans_b=True),
        ]
    cases += [
        Case("trans_b, inner 12, outer 5", (4, 0, 7), 12, 5, bf16, trans_b=True),
        Case("float16, inner 13, outer 3", (4, 0, 7), 13, 3, f16),
        Case("float32, inner 3, outer 5", (4, 0, 7), 3, 5, f32),
        Case("a routed text", _routed().counts, 64, 128, bf16, routed=True),
    ]
    return cases


CASES: tuple[Case, ...] = tuple(_cases())
"""The cases of the parity command and of `BackendParityTests`."""
