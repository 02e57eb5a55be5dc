"""Where each tile of work lies, written on the device from the counts: the host never waits for them.

A schedule holds four numbers a group: its first row, its rows, how many tiles come before its own, and, apart
from these, the group that is that long: the longest in the first place, so that a kernel can end with short
work. One more entry holds the number of all tiles. Kernels of both dialects read it through `place`.

Shape letters: E groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmm_registry.contract import BatchSizes

_BLOCK = 8  # groups of one program
_WIDTH = 128


def of(batch_sizes: BatchSizes, device: torch.device, tall: int) -> Tensor:
    """Return the schedule for tiles of ``tall`` rows, (E + 1, 4) int32; made once for one `BatchSizes`."""

    def make() -> Tensor:
        groups = len(batch_sizes)
        made = torch.empty(groups + 1, 4, dtype=torch.int32, device=device)
        grid = (-(-groups // _BLOCK),)
        fill[grid](batch_sizes.on(device), made, groups, TALL=tall, BLOCK=_BLOCK, WIDTH=_WIDTH)
        return made

    return batch_sizes.derived((__name__, tall), make, device)


@triton.jit(do_not_specialize=["groups"])
def fill(counts, schedule, groups, TALL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the entries of ``BLOCK`` groups from counts (E,) int64; a tile is ``TALL`` rows of one group."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = group < groups
    size = tl.load(counts + group, mask=there, other=0).to(tl.int32)
    start = tl.zeros((BLOCK,), dtype=tl.int32)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, groups, WIDTH):
        other = first + tl.arange(0, WIDTH)
        rows = tl.load(counts + other, mask=other < groups, other=-1).to(tl.int32)[None, :]
        lower = (other[None, :] < group[:, None]) & (other < groups)[None, :]
        start += tl.sum(tl.where(lower, rows, 0), 1)
        before += tl.sum(tl.where(lower, rows // TALL + (rows % TALL != 0), 0), 1)
        rank += tl.sum(((rows > size[:, None]) | ((rows == size[:, None]) & lower)).to(tl.int32), 1)
    entry = schedule + group * 4
    tl.store(entry, start, mask=there)
    tl.store(entry + 1, size, mask=there)
    tl.store(entry + 2, before, mask=there)
    tl.store(schedule + rank * 4 + 3, group, mask=there)
    tl.store(entry + 6, before + size // TALL + (size % TALL != 0), mask=group == groups - 1)


def tiles(schedule, groups):
    """Return the number of all tiles."""
    return tl.load(schedule + groups * 4 + 2)


def place(schedule, groups, tile, wide, TALL: tl.constexpr, BAND: tl.constexpr):
    """Find a tile's group, the group's first row and rows, the tile's row in the group, and its column.

    Each tile stands for ``wide`` columns. Those of ``BAND`` neighbouring tiles are numbered together, rows
    fastest, so that what is at work at one time shares what it reads.
    """
    low = 0
    high = groups
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(schedule + middle * 4 + 2) * wide <= tile:
            low = middle
        else:
            high = middle
    entry = schedule + low * 4
    start = tl.load(entry)
    size = tl.load(entry + 1)
    inside = tile - tl.load(entry + 2) * wide
    first = inside // (BAND * wide) * BAND
    inside = inside % (BAND * wide)
    height = min((size - 1 - first * TALL) // TALL + 1, BAND)
    return low, start, size, (first + inside % height) * TALL, inside // height
