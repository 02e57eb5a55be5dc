"""The block-sparse products as Triton kernels, in plain Triton: nothing here is one vendor's only.

This is the only module that imports triton at its top; `launch` is imported where it is used.

Shape letters: M padded rows, N columns, H hidden, B blocks that are there. Whatever can pass 2**31 (a block's
place among the values, a row's among M * H elements) is computed in 64 bits.
"""

import triton
import triton.language as tl

from gmm_backends._dot import add_product


@triton.jit
def _place(index, tall, cells, BAND: tl.constexpr):
    """Find a program's row and cell: bands of rows one after the other, in a band the rows fastest."""
    first = index // (BAND * cells) * BAND
    inside = index % (BAND * cells)
    height = tl.minimum(tall - first, BAND)
    return first + inside % height, inside // height


# Compiled once whatever the topology: its indices may begin anywhere, and its size is no constant.
@triton.jit(do_not_specialize=["tall", "cells"], do_not_specialize_on_alignment=["rows", "columns"])
def sdd(
    x,
    weight,
    values,
    rows,
    columns,
    hidden,
    tall,
    cells,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Fill ``WIDE`` neighbouring blocks of the values: ``x @ weight.T``."""
    row, cell = _place(tl.program_id(0), tall, cells, BAND)
    first = (row * cells + cell) * WIDE
    r = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    lane = tl.arange(0, WIDE * BLOCK)  # WIDE is 1 or 2
    column = tl.where(lane < BLOCK, tl.load(columns + first), tl.load(columns + first + WIDE - 1))
    weight_at = weight + (column.to(tl.int64) * BLOCK + lane % BLOCK)[None, :] * hidden + k[:, None]
    block_at = (lane // BLOCK * (BLOCK * BLOCK) + lane % BLOCK)[None, :] + (r * BLOCK)[:, None]
    values_at = values + first.to(tl.int64) * (BLOCK * BLOCK) + block_at
    # Neighbouring blocks are of one row where every row holds a multiple of WIDE blocks; else of two.
    low = tl.load(rows + first)
    high = tl.load(rows + first + WIDE - 1)
    for owner in range(low, high + 1, tl.maximum(high - low, 1)):
        x_at = x + tl.cast(owner, tl.int64) * BLOCK * hidden + r[:, None] * hidden + k[None, :]
        total = tl.zeros((BLOCK, WIDE * BLOCK), dtype=tl.float32)
        for start in range(0, hidden, K):
            if EVEN:
                a = tl.load(x_at + start)
                b = tl.load(weight_at + start)
            else:
                inside = start + k < hidden
                a = tl.load(x_at + start, mask=inside[None, :], other=0.0)
                b = tl.load(weight_at + start, mask=inside[:, None], other=0.0)
            total = add_product(a, b, total)
        result = total.to(values.dtype.element_ty)
        if low == high:
            tl.store(values_at, result)
        else:
            owned = tl.where(lane < BLOCK, low, high) == owner
            tl.store(values_at, result, mask=owned[None, :])


@triton.jit(
    do_not_specialize=["tall", "cells"],
    do_not_specialize_on_alignment=["offsets", "blocks", "sources"],
)
def dsd(
    values,
    dense,
    out,
    offsets,
    blocks,
    sources,
    hidden,
    tall,
    cells,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
    EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Sum over the blocks of one row, or ``TRANSPOSED`` column: each times the rows of ``dense`` it meets."""
    row, cell = _place(tl.program_id(0), tall, cells, BAND)
    r = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    h = cell * N + tl.arange(0, N)
    inside = h[None, :] < hidden
    total = tl.zeros((BLOCK, N), dtype=tl.float32)
    STEPS: tl.constexpr = BLOCK // K
    STRIDE: tl.constexpr = BLOCK if TRANSPOSED else 1  # of the inner dimension within a block
    dense_at = dense + (k[:, None] * hidden + h[None, :])
    if TRANSPOSED:
        values_at = values + (k[None, :] * BLOCK + r[:, None])
    else:
        values_at = values + (r[:, None] * BLOCK + k[None, :])
    for step in range(tl.load(offsets + row) * STEPS, tl.load(offsets + row + 1) * STEPS):
        place = step // STEPS
        inner = step % STEPS * K
        block = tl.load(blocks + place) if TRANSPOSED else place
        source = tl.load(sources + place)
        a = tl.load(values_at + (tl.cast(block, tl.int64) * (BLOCK * BLOCK) + inner * STRIDE))
        b_at = dense_at + (tl.cast(source, tl.int64) * BLOCK + inner) * hidden
        b = tl.load(b_at) if EVEN else tl.load(b_at, mask=inside, other=0.0)
        total = add_product(a, b, total)
    out_at = out + row.to(tl.int64) * BLOCK * hidden + (r[:, None] * hidden + h[None, :])
    if ACCUMULATE:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    if EVEN:
        tl.store(out_at, total.to(out.dtype.element_ty))
    else:
        tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
