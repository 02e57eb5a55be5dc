"""The kernel of NVIDIA Hopper for forward and the gradient of x, fp16 and bf16: see `hopper_handover`.

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

_NOTES = gl.constexpr(1)
_EARLY = gl.constexpr(6)  # steps before the end of a tile at which the next is looked up

_place = gluon.jit(schedule.place)
_tiles = gluon.jit(schedule.tiles)


@gluon.jit
def _look_up(schedule, groups, counter, wide, board, BAND: gl.constexpr, DYNAMIC: gl.constexpr):
    """Post of each tile: its group, its first row, how many rows of the group begin there, its column."""
    turn = 0
    tile = gl.program_id(0)
    while tile < _tiles(schedule, groups) * wide:
        group, start, size, row, column = _place(schedule, groups, tile, wide, TALL, BAND)
        board.post(turn, group, start + row, size - row, column)
        turn += 1
        board.wait(turn)
        if DYNAMIC:  # the first that no program has
            tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
        else:
            tile += gl.num_programs(0)
    board.post(turn, 0, 0, 0, 0)


@gluon.jit
def _load(x, weight, inner, board, ring, TRANS_B: gl.constexpr, WIDE: gl.constexpr, DEEP: gl.constexpr):
    step = 0
    steps = (inner + DEEP - 1) // DEEP
    turn = 0
    group, row, rest, column = board.read(turn, 1)
    while rest > 0:
        for i in range(steps):
            board.take(turn, pred=i == gl.maximum(steps - _EARLY, 0))
            upper, lower, right, ready = ring.begin(step, (TALL + WIDE) * DEEP * 2)
            k = i * DEEP
            load(x, [row, k], ready, upper)
            load(x, [row + HALF, k], ready, lower)
            if TRANS_B:
                load(weight, [group, column * WIDE, k], ready, right)
            else:
                load(weight, [group, k, column * WIDE], ready, right)
            step += 1
        turn += 1
        group, row, rest, column = board.read(turn, 1)


@gluon.jit
def _multiply(
    out,
    block,
    inner,
    board,
    ring,
    WHICH: gl.constexpr,
    TRANS_B: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
):
    step = 0
    steps = (inner + DEEP - 1) // DEEP
    turn = 0
    _, row, rest, column = board.read(turn, 4)
    while rest > 0:
        board.take(turn)
        if rest > WHICH * HALF:
            total, step = multiply(ring, step, steps, WHICH, WIDE, DEEP, False, TRANS_B)
            halves = total.reshape([HALF, 2, WIDE // 2]).permute(0, 2, 1).split()
            for half in gl.static_range(2):
                tma.store_wait(0)
                block.reshape([HALF, WIDE // 2]).store(halves[half].to(out.dtype))
                fence_async_shared()
                at = ENDLESS - rest + WHICH * HALF
                store(out, [ENDLESS, row + rest, at, column * WIDE + half * (WIDE // 2)], block)
        else:  # the group ends in the other half; nothing is to do but to give the stages back
            for _ in range(steps):
                ring.wait(step)
                ring.give_back(step)
                step += 1
        turn += 1
        _, row, rest, column = board.read(turn, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "wide", "inner"])
def rows(
    x,
    weight,
    out,
    schedule,
    counter,
    groups,
    wide,
    inner,
    TRANS_B: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    DYNAMIC: gl.constexpr,
):
    """Multiply each group's rows, (R, inner), with its matrix; the last three of ``out`` are its columns.

    ``inner`` is not 0. ``counter`` points to a 0, and holds how many tiles were handed out if ``DYNAMIC``.
    """
    blocks = gl.allocate_shared_memory(x.dtype, [2] + out.block_type.shape, out.layout)
    stages = make_ring(x, weight, STAGES)
    notes = make_board(_NOTES)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (out, blocks.index(0), inner, notes, stages, 0, TRANS_B, WIDE, DEEP)),
        (_multiply, (out, blocks.index(1), inner, notes, stages, 1, TRANS_B, WIDE, DEEP)),
        (_load, (x, weight, inner, notes, stages, TRANS_B, WIDE, DEEP)),
        (_look_up, (schedule, groups, counter, wide, notes, BAND, DYNAMIC)),
    ], PARTITIONS, REGISTERS)
    # fmt: on
