"""The kernel of NVIDIA Hopper for the gradient of the weight, fp16 and bf16: see `hopper_handover`.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gmm_backends.triton_grouped import schedule
from gmm_backends.triton_grouped.hopper_handover import (
    ENDLESS,
    HALF,
    PARTITIONS,
    REGISTERS,
    TALL,
    load,
    make_board,
    make_ring,
    multiply,
    store,
)

_NOTES = gl.constexpr(2)  # short groups are a few steps only: the tile after the next must be known

_place = gluon.jit(schedule.place)
_tiles = gluon.jit(schedule.tiles)


@gluon.jit
def _look_up(schedule, groups, counter, cells, board, PART: gl.constexpr):
    """Post of each tile: its matrix of the result, its rows of x and grad_out, its place in the matrix."""
    if PART:
        total = _tiles(schedule, groups) * cells
    else:
        total = groups * cells
    turn = 0
    tile = gl.program_id(0)
    while tile < total:
        matrix = tile // cells
        if PART:
            _, start, size, first, _ = _place(schedule, groups, matrix, 1, PART, 1)
            start += first
            size = gl.minimum(size - first, PART)
        else:  # the longest group first
            matrix = gl.load(schedule + matrix * 4 + 3)
            start = gl.load(schedule + matrix * 4)
            size = gl.load(schedule + matrix * 4 + 1)
        board.post(turn, matrix, start, size, tile % cells)
        turn += 1
        board.wait(turn)
        tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
    board.post(turn, 0, 0, -1, 0)


@gluon.jit
def _load(x, grad_out, tall, board, ring, WIDE: gl.constexpr, DEEP: gl.constexpr):
    step = 0
    turn = 0
    _, start, size, cell = board.read(turn, 1)
    while size >= 0:
        board.take(turn)
        row = cell % tall * TALL
        column = cell // tall * WIDE
        for r in range(0, size, DEEP):
            upper, lower, right, ready = ring.begin(step, (TALL + WIDE) * DEEP * 2)
            at = ENDLESS - size + r
            load(x, [ENDLESS, start + size, at, row], ready, upper)
            load(x, [ENDLESS, start + size, at, row + HALF], ready, lower)
            load(grad_out, [ENDLESS, start + size, at, column], ready, right)
            step += 1
        turn += 1
        _, start, size, cell = board.read(turn, 1)


@gluon.jit
def _multiply(
    out,
    block,
    tall,
    inner,
    outer,
    board,
    ring,
    WHICH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    DIRECT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    step = 0
    turn = 0
    matrix, _, size, cell = board.read(turn, 4)
    while size >= 0:
        board.take(turn)
        row = cell % tall * TALL + WHICH * HALF
        column = cell // tall * WIDE
        product, step = multiply(ring, step, (size + DEEP - 1) // DEEP, WHICH, WIDE, DEEP, True, False)
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
            tma.store_wait(0)
            block.reshape([HALF, WIDE]).store(product.to(out.dtype))
            fence_async_shared()
            store(out, [matrix, row, column], block)
        turn += 1
        matrix, _, size, cell = board.read(turn, 4)
    if not DIRECT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "inner", "outer"])
def products(
    x,
    grad_out,
    out,
    schedule,
    counter,
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
    ``counter`` points to a 0, and holds how many tiles were handed out.
    """
    stages = make_ring(x, grad_out, STAGES)
    if DIRECT:
        upper: gl.constexpr = None
        lower: gl.constexpr = None
    else:
        blocks = gl.allocate_shared_memory(x.dtype, [2] + out.block_type.shape, out.layout)
        upper = blocks.index(0)
        lower = blocks.index(1)
    notes = make_board(_NOTES)
    tall = (inner + TALL - 1) // TALL
    cells = tall * ((outer + WIDE - 1) // WIDE)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (out, upper, tall, inner, outer, notes, stages, 0, WIDE, DEEP, DIRECT, ACCUMULATE)),
        (_multiply, (out, lower, tall, inner, outer, notes, stages, 1, WIDE, DEEP, DIRECT, ACCUMULATE)),
        (_load, (x, grad_out, tall, notes, stages, WIDE, DEEP)),
        (_look_up, (schedule, groups, counter, cells, notes, PART)),
    ], PARTITIONS, REGISTERS)
    # fmt: on
