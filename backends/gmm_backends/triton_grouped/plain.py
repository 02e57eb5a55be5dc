"""Grouped products in plain Triton: for every GPU that Triton compiles for, every dtype, every K and N.

Shape letters: R rows, E groups, K inner, N outer dimension. Offsets that can pass 2**31 are 64 bits wide.
"""

import triton
import triton.language as tl

from gmm_backends._dot import add_product
from gmm_backends.triton_grouped import schedule

_place = triton.jit(schedule.place)
_tiles = triton.jit(schedule.tiles)


@triton.jit(do_not_specialize=["groups", "wide"])
def rows(
    x,
    weight,
    out,
    schedule,
    groups,
    wide,
    inner,
    outer,
    TRANS_B: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    BAND: tl.constexpr,
):
    """Multiply each group's rows, (R, inner), with its matrix, (inner, outer): one tile a program."""
    tile = tl.program_id(0)
    if tile < _tiles(schedule, groups) * wide:
        group, start, size, row, column = _place(schedule, groups, tile, wide, TALL, BAND)
        r = row + tl.arange(0, TALL)
        c = column * WIDE + tl.arange(0, WIDE)
        k = tl.arange(0, DEEP)
        row_there = (r < size)[:, None]
        column_there = (c < outer)[None, :]
        matrix = weight + group.to(tl.int64) * inner * outer
        x_at = x + (start + r).to(tl.int64)[:, None] * inner + k[None, :]
        if TRANS_B:
            step = DEEP
            weight_at = matrix + c.to(tl.int64)[None, :] * inner + k[:, None]
        else:
            step = DEEP * outer
            weight_at = matrix + k.to(tl.int64)[:, None] * outer + c[None, :]
        total = tl.zeros((TALL, WIDE), dtype=tl.float32)
        for done in range(0, inner, DEEP):
            there = done + k < inner
            a = tl.load(x_at, mask=row_there & there[None, :], other=0.0)
            b = tl.load(weight_at, mask=column_there & there[:, None], other=0.0)
            total = add_product(a, b, total)
            x_at += DEEP
            weight_at += step
        out_at = out + (start + r).to(tl.int64)[:, None] * outer + c[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=row_there & column_there)


@triton.jit(do_not_specialize=["groups"])
def products(
    x,
    grad_out,
    out,
    schedule,
    groups,
    inner,
    outer,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    PART: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Give ``x_e.T @ grad_out_e``: one tile of one group's (inner, outer) a program.

    With ``PART`` the schedule's tiles are parts of so many rows, and ``out`` holds a matrix for each.
    """
    tall = tl.cdiv(inner, TALL)
    cells = tall * tl.cdiv(outer, WIDE)
    index = tl.program_id(0) // cells
    inside = tl.program_id(0) % cells
    entries = groups
    if PART:
        entries = _tiles(schedule, groups)
    if index < entries:
        if PART:
            _, start, size, first, _ = _place(schedule, groups, index, 1, PART, 1)
            start += first
            size = tl.minimum(size - first, PART)
            matrix = index
        else:
            matrix = tl.load(schedule + index * 4 + 3)
            start = tl.load(schedule + matrix * 4)
            size = tl.load(schedule + matrix * 4 + 1)
        i = inside % tall * TALL + tl.arange(0, TALL)
        o = inside // tall * WIDE + tl.arange(0, WIDE)
        r = tl.arange(0, DEEP)
        inner_there = (i < inner)[:, None]
        outer_there = (o < outer)[None, :]
        x_at = x + (start + r).to(tl.int64)[None, :] * inner + i[:, None]
        grad_at = grad_out + (start + r).to(tl.int64)[:, None] * outer + o[None, :]
        total = tl.zeros((TALL, WIDE), dtype=tl.float32)
        for done in range(0, size, DEEP):
            there = done + r < size
            a = tl.load(x_at, mask=inner_there & there[None, :], other=0.0)
            b = tl.load(grad_at, mask=outer_there & there[:, None], other=0.0)
            total = add_product(a, b, total)
            x_at += DEEP * inner
            grad_at += DEEP * outer
        out_at = (
            out + tl.cast(matrix, tl.int64) * inner * outer + i.to(tl.int64)[:, None] * outer + o[None, :]
        )
        mask = inner_there & outer_there
        if ACCUMULATE:
            total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_parts(parts, out, schedule, numel, PART: tl.constexpr, BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Sum each group's matrices of ``numel`` entries, one a part of its rows, always in the same order."""
    group = tl.program_id(0)
    size = tl.load(schedule + group * 4 + 1)
    count = size // PART + (size % PART != 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < numel
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    part_at = parts + tl.load(schedule + group * 4 + 2).to(tl.int64) * numel + at
    for _ in range(count):
        total += tl.load(part_at, mask=there, other=0.0)
        part_at += numel
    out_at = out + group.to(tl.int64) * numel + at
    if ACCUMULATE:
        total += tl.load(out_at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there)
