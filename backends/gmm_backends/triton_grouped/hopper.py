"""Grouped products for NVIDIA Hopper, in Gluon, Triton's dialect for one chip: fp16 and bf16.

One program stays on each multiprocessor and takes tiles of 128 rows by ``WIDE`` columns in turn. Of its warps
one loads (TMA), and two groups of four multiply (wgmma), 64 rows each. The loading warp runs ahead by
``STAGES`` steps, over the end of a tile into the next, so that the tensor cores seldom wait for memory.
Barriers hand each stage over: ``full`` when its operands are there, ``empty`` when both groups have read it.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gmm_backends.triton_grouped import schedule

# Triton 3.9 renamed them.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

TALL = gl.constexpr(128)  # rows of a tile
HALF = gl.constexpr(64)  # those of one group of warps, and of one wgmma
_REGISTERS = gl.constexpr([232, 40])  # of a thread: in the second multiplying group, in the loading warp
# Rows behind the end of a group belong to the next. A descriptor of four dimensions, the first two of them
# sums that overflow 64 bits, begins anywhere and ends at the end of a group: see `launch_hopper`.
ENDLESS = gl.constexpr(2**30)

_place = gluon.jit(schedule.place)
_tiles = gluon.jit(schedule.tiles)


@gluon.jit
def _wait_empty(empty, step, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)


@gluon.jit
def _wait_full(full, step, STAGES: gl.constexpr):
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def _multiply(
    left,
    right,
    full,
    empty,
    step,
    steps,
    WHICH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Sum the products of ``steps`` stages for one group of warps, one product behind the loads it needs."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    total = gl.zeros([HALF, WIDE], gl.float32, layout)
    for i in range(steps):
        _wait_full(full, step, STAGES)
        a = left.index(step % STAGES * 2 + WHICH)
        if TRANS_A:
            a = a.reshape([DEEP, HALF]).permute((1, 0))
        b = right.index(step % STAGES)
        if TRANS_B:
            b = b.reshape([WIDE, DEEP]).permute((1, 0))
        else:
            b = b.reshape([DEEP, WIDE])
        total = warpgroup_mma(a, b, total, is_async=True, use_acc=i > 0)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
        step += 1
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return total, step


@gluon.jit
def _setup(STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return full, empty


@gluon.jit
def _load_rows(
    x,
    weight,
    schedule,
    groups,
    wide,
    inner,
    left,
    right,
    full,
    empty,
    TRANS_B: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    step = 0
    for tile in range(gl.program_id(0), _tiles(schedule, groups) * wide, gl.num_programs(0)):
        group, start, _, row, column = _place(schedule, groups, tile, wide, TALL, BAND)
        row += start
        for k in range(0, inner, DEEP):
            ready = full.index(step % STAGES)
            _wait_empty(empty, step, STAGES)
            mbarrier.expect(ready, (TALL + WIDE) * DEEP * 2)
            _load(x, [row, k], ready, left.index(step % STAGES * 2))
            _load(x, [row + HALF, k], ready, left.index(step % STAGES * 2 + 1))
            block = right.index(step % STAGES)
            if TRANS_B:
                _load(weight, [group, column * WIDE, k], ready, block)
            else:
                _load(weight, [group, k, column * WIDE], ready, block)
            step += 1


@gluon.jit
def _multiply_rows(
    out,
    schedule,
    groups,
    wide,
    inner,
    left,
    right,
    store,
    full,
    empty,
    WHICH: gl.constexpr,
    TRANS_B: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    step = 0
    steps = (inner + DEEP - 1) // DEEP
    block = store.index(WHICH)
    for tile in range(gl.program_id(0), _tiles(schedule, groups) * wide, gl.num_programs(0)):
        _, start, size, row, column = _place(schedule, groups, tile, wide, TALL, BAND)
        row += WHICH * HALF
        if row < size:
            total, step = _multiply(
                left, right, full, empty, step, steps, WHICH, WIDE, DEEP, False, TRANS_B, STAGES
            )
            halves = total.reshape([HALF, 2, WIDE // 2]).permute(0, 2, 1).split()
            for half in gl.static_range(2):
                tma.store_wait(0)
                block.reshape([HALF, WIDE // 2]).store(halves[half].to(out.dtype))
                fence_async_shared()
                at = [ENDLESS, start + size, ENDLESS - size + row, column * WIDE + half * (WIDE // 2)]
                _store(out, at, block)
        else:  # short groups end in the other half; nothing is to do but to give the stages back
            for _ in range(steps):
                _wait_full(full, step, STAGES)
                mbarrier.arrive(empty.index(step % STAGES), count=1)
                step += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "wide", "inner"])
def rows(
    x,
    weight,
    out,
    schedule,
    groups,
    wide,
    inner,
    TRANS_B: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    """Multiply each group's rows, (R, inner), with its matrix; the last three of ``out`` are its columns."""
    left = gl.allocate_shared_memory(x.dtype, [STAGES * 2] + x.block_type.shape, x.layout)
    right = gl.allocate_shared_memory(x.dtype, [STAGES] + weight.block_type.shape, weight.layout)
    store = gl.allocate_shared_memory(x.dtype, [2] + out.block_type.shape, out.layout)
    full, empty = _setup(STAGES)
    # fmt: off
    gl.warp_specialize([
        (_multiply_rows, (out, schedule, groups, wide, inner, left, right, store, full, empty, 0,
                          TRANS_B, WIDE, DEEP, STAGES, BAND)),
        (_multiply_rows, (out, schedule, groups, wide, inner, left, right, store, full, empty, 1,
                          TRANS_B, WIDE, DEEP, STAGES, BAND)),
        (_load_rows, (x, weight, schedule, groups, wide, inner, left, right, full, empty,
                      TRANS_B, WIDE, DEEP, STAGES, BAND)),
    ], [4, 1], _REGISTERS)
    # fmt: on


@gluon.jit
def _find_product(schedule, groups, tile, cells, tall, WIDE: gl.constexpr, PART: gl.constexpr):
    """Find a tile's matrix of the result, its rows of x and grad_out, and its place in the matrix."""
    index = tile // cells
    if PART:
        _, start, size, first, _ = _place(schedule, groups, index, 1, PART, 1)
        start += first
        size = gl.minimum(size - first, PART)
    else:  # the longest group first
        index = gl.load(schedule + index * 4 + 3)
        start = gl.load(schedule + index * 4)
        size = gl.load(schedule + index * 4 + 1)
    inside = tile % cells
    return index, start, size, inside % tall * TALL, inside // tall * WIDE


@gluon.jit
def _load_products(
    x,
    grad_out,
    schedule,
    groups,
    total,
    cells,
    tall,
    left,
    right,
    full,
    empty,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
):
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        _, start, size, row, column = _find_product(schedule, groups, tile, cells, tall, WIDE, PART)
        for r in range(0, size, DEEP):
            ready = full.index(step % STAGES)
            _wait_empty(empty, step, STAGES)
            mbarrier.expect(ready, (TALL + WIDE) * DEEP * 2)
            end = start + size
            at = ENDLESS - size + r
            upper = left.index(step % STAGES * 2)
            lower = left.index(step % STAGES * 2 + 1)
            _load(x, [ENDLESS, end, at, row], ready, upper)
            _load(x, [ENDLESS, end, at, row + HALF], ready, lower)
            _load(grad_out, [ENDLESS, end, at, column], ready, right.index(step % STAGES))
            step += 1


@gluon.jit
def _multiply_products(
    out,
    schedule,
    groups,
    total,
    cells,
    tall,
    inner,
    outer,
    left,
    right,
    store,
    full,
    empty,
    WHICH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
    DIRECT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        matrix, _, size, row, column = _find_product(schedule, groups, tile, cells, tall, WIDE, PART)
        row += WHICH * HALF
        product, step = _multiply(
            left,
            right,
            full,
            empty,
            step,
            (size + DEEP - 1) // DEEP,
            WHICH,
            WIDE,
            DEEP,
            True,
            False,
            STAGES,
        )
        if DIRECT:
            layout: gl.constexpr = product.type.layout
            i = row + gl.arange(0, HALF, gl.SliceLayout(1, layout))[:, None]
            o = column + gl.arange(0, WIDE, gl.SliceLayout(0, layout))[None, :]
            at = out + (matrix.to(gl.int64) * inner + i) * outer + o
            there = (i < inner) & (o < outer)
            if ACCUMULATE:
                product += gl.load(at, there, 0).to(gl.float32)
            gl.store(at, product.to(out.dtype.element_ty), there)
        else:
            block = store.index(WHICH)
            tma.store_wait(0)
            block.reshape([HALF, WIDE]).store(product.to(out.dtype))
            fence_async_shared()
            _store(out, [matrix, row, column], block)
    if not DIRECT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "inner", "outer"])
def products(
    x,
    grad_out,
    out,
    schedule,
    groups,
    inner,
    outer,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
    DIRECT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Give ``x_e.T @ grad_out_e``; with ``PART`` for each part of so many rows, which is a schedule's tile.

    ``out`` is a descriptor, or with ``DIRECT`` a pointer: to another dtype, or to what is added to.
    """
    left = gl.allocate_shared_memory(x.dtype, [STAGES * 2] + x.block_type.shape, x.layout)
    right = gl.allocate_shared_memory(x.dtype, [STAGES] + grad_out.block_type.shape, grad_out.layout)
    if DIRECT:
        store: gl.constexpr = None
    else:
        store = gl.allocate_shared_memory(x.dtype, [2] + out.block_type.shape, out.layout)
    full, empty = _setup(STAGES)
    tall = (inner + TALL - 1) // TALL
    cells = tall * ((outer + WIDE - 1) // WIDE)
    if PART:
        total = _tiles(schedule, groups) * cells
    else:
        total = groups * cells
    # fmt: off
    gl.warp_specialize([
        (_multiply_products, (out, schedule, groups, total, cells, tall, inner, outer, left, right, store,
                              full, empty, 0, WIDE, DEEP, STAGES, PART, DIRECT, ACCUMULATE)),
        (_multiply_products, (out, schedule, groups, total, cells, tall, inner, outer, left, right, store,
                              full, empty, 1, WIDE, DEEP, STAGES, PART, DIRECT, ACCUMULATE)),
        (_load_products, (x, grad_out, schedule, groups, total, cells, tall, left, right, full, empty,
                          WIDE, DEEP, STAGES, PART)),
    ], [4, 1], _REGISTERS)
    # fmt: on
