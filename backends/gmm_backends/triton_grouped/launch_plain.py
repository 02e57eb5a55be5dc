"""Launch the plain kernels, on any device of Triton's, or on CPU tensors under its interpreter.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gmm_backends._triton import shared_memory
from gmm_backends.triton_grouped import plain, schedule
from gmm_backends.triton_grouped.call import call, sixteenths
from gmm_registry.contract import BatchSizes


class Tile(NamedTuple):
    """How one program works: a tile of the result, and the steps of its inner sum."""

    tall: int
    wide: int
    deep: int
    warps: int
    stages: int

    def shared_memory(self, dtype: torch.dtype) -> int:
        """Bytes that the steps in flight take."""
        return (self.tall + self.wide) * self.deep * dtype.itemsize * self.stages


# The first that fits into shared memory is taken. Short groups would leave most of a tall tile empty.
_ROWS = (Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 3), Tile(128, 128, 32, 8, 2))
_SHORT_ROWS = (Tile(16, 128, 128, 4, 3), Tile(16, 128, 64, 4, 2))
_PRODUCTS = (Tile(128, 128, 32, 4, 4), Tile(128, 128, 32, 4, 2))
_SHORT_PRODUCTS = (Tile(128, 128, 16, 4, 2),)
_FP32 = (Tile(64, 64, 16, 4, 3),)  # full precision has no tensor cores
_SHORT = 16  # rows a group, on average
_BAND = 8
_SUMMED = 1024  # numbers a program of `plain.add_parts` sums


def is_short(rows: int, groups: int) -> bool:
    """Say whether groups have so few rows that the weights' bytes are all that counts."""
    return rows <= groups * _SHORT


def fitting(tiles: tuple[Tile, ...], dtype: torch.dtype, shared: int) -> Tile:
    """Choose a tile for a multiprocessor with that many bytes of shared memory."""
    if dtype == torch.float32:
        return _FP32[0]
    return next((tile for tile in tiles if tile.shared_memory(dtype) < shared), tiles[-1])


def _tile(tiles: tuple[Tile, ...], x: Tensor) -> Tile:
    return fitting(tiles, x.dtype, shared_memory(x.device))


def rows(
    x: Tensor,
    weight: Tensor,
    batch_sizes: BatchSizes,
    trans_b: bool,
    out: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """Write each group's rows (R, K) times its matrix to ``out`` (R, N)."""
    (length, inner), outer, groups = x.shape, out.shape[1], len(batch_sizes)
    tile = tile or _tile(_SHORT_ROWS if is_short(length, groups) else _ROWS, x)
    wide = -(-outer // tile.wide)
    call(
        plain.rows,
        (length // tile.tall + groups) * wide,
        x.device,
        (x, weight, out, schedule.of(batch_sizes, x.device, tile.tall), groups, wide, inner, outer),
        (trans_b, tile.tall, tile.wide, tile.deep, _BAND),
        (x.dtype, *sixteenths(x.data_ptr(), weight.data_ptr(), out.data_ptr(), inner, outer)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def products(
    x: Tensor,
    grad_out: Tensor,
    batch_sizes: BatchSizes,
    out: Tensor,
    accumulate: bool,
    part: int = 0,
    *,
    tile: Tile | None = None,
) -> None:
    """Write ``x_e.T @ grad_out_e`` to ``out`` (E, K, N), or add it.

    With ``part`` for each part of so many rows: ``out`` then has a matrix for each part that there can be.
    """
    (matrices, inner, outer), groups = out.shape, len(batch_sizes)
    tile = tile or _tile(_SHORT_PRODUCTS if is_short(len(x), groups) else _PRODUCTS, x)
    call(
        plain.products,
        matrices * -(-inner // tile.tall) * -(-outer // tile.wide),
        x.device,
        (x, grad_out, out, schedule.of(batch_sizes, x.device, part or tile.tall), groups, inner, outer),
        (tile.tall, tile.wide, tile.deep, part, accumulate),
        (x.dtype, out.dtype, *sixteenths(x.data_ptr(), grad_out.data_ptr(), out.data_ptr(), inner, outer)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def add_parts(parts: Tensor, batch_sizes: BatchSizes, part: int, out: Tensor, accumulate: bool) -> None:
    """Sum what `products` wrote for the parts of each group into ``out`` (E, K, N)."""
    numel = out[0].numel()
    plain.add_parts[(len(out), -(-numel // _SUMMED))](
        parts,
        out,
        schedule.of(batch_sizes, out.device, part),
        numel,
        PART=part,
        BLOCK=_SUMMED,
        ACCUMULATE=accumulate,
    )
