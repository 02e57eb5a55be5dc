"""How the warps of one program for NVIDIA Hopper hand work over, in Gluon, Triton's dialect for one chip.

One program stays on each multiprocessor and takes tiles of 128 rows by ``WIDE`` columns in turn. One of its
warps looks up which tile is next and posts that on a `Board`. One loads the operands (TMA) into the stages of
a `Ring`, ahead by as many as there are, over the end of a tile into the next. Two groups of four warps
multiply (wgmma), 64 rows each, and write the result. So the tensor cores seldom wait for a look-up or memory.

A handover is a pair of barriers that count phases, one for each direction: who waits names step or turn.
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
from triton.language import core

# Later versions of Triton renamed them.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
aggregate = getattr(gluon, "aggregate", None) or core._aggregate

TALL = gl.constexpr(128)  # rows of a tile
HALF = gl.constexpr(64)  # those of one group of warps, and of one wgmma
# Rows behind the end of a group belong to the next. A descriptor of four dimensions, the first two of them
# sums that overflow 64 bits, begins anywhere and ends at the end of a group: see `launch_hopper`.
ENDLESS = gl.constexpr(2**30)
PARTITIONS = gl.constexpr([4, 1, 1])  # warps beside the first four: that multiply, load, look up
REGISTERS = gl.constexpr([232, 40, 40])  # of a thread of theirs


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@aggregate
class Ring:
    """Stages in shared memory for one step's operands each: left two blocks of `HALF` rows, right one."""

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, left, right, full, empty, STAGES):
        self.left = left
        self.right = right
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def begin(self, step, bytes: gl.constexpr):
        """Wait until both groups have read what was here; return where to load to, and what to tell."""
        stage = step % self.STAGES
        mbarrier.wait(self.empty.index(stage), (step // self.STAGES & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), bytes)
        return (
            self.left.index(stage * 2),
            self.left.index(stage * 2 + 1),
            self.right.index(stage),
            self.full.index(stage),
        )

    @gluon.jit
    def wait(self, step):
        """Wait until the operands of a step are there."""
        mbarrier.wait(self.full.index(step % self.STAGES), step // self.STAGES & 1)

    @gluon.jit
    def give_back(self, step, pred=True):
        """Let a step's stage be written again."""
        mbarrier.arrive(self.empty.index((step + self.STAGES) % self.STAGES), count=1, pred=pred)


@gluon.jit
def make_ring(left, right, STAGES: gl.constexpr):
    """Make a ring for the blocks of two descriptors."""
    return Ring(
        gl.allocate_shared_memory(left.dtype, [STAGES * 2] + left.block_type.shape, left.layout),
        gl.allocate_shared_memory(right.dtype, [STAGES] + right.block_type.shape, right.layout),
        _barriers(STAGES, 1),
        _barriers(STAGES, 2),
        STAGES,
    )


@aggregate
class Board:
    """Notes of four numbers in shared memory, each of which says what the next tile is."""

    notes: gl.shared_memory_descriptor
    posted: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    NOTES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, notes, posted, taken, NOTES):
        self.notes = notes
        self.posted = posted
        self.taken = taken
        self.NOTES = gl.constexpr(NOTES)

    @gluon.jit
    def post(self, turn, a, b, c, d):
        """Write the note of a turn, from one warp, for which `wait` has made room."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        at = turn % self.NOTES
        self.notes.index(at * 4).store(gl.full([1], a, gl.int32, layout))
        self.notes.index(at * 4 + 1).store(gl.full([1], b, gl.int32, layout))
        self.notes.index(at * 4 + 2).store(gl.full([1], c, gl.int32, layout))
        self.notes.index(at * 4 + 3).store(gl.full([1], d, gl.int32, layout))
        mbarrier.arrive(self.posted.index(at), count=1)

    @gluon.jit
    def wait(self, turn):
        """Wait until the other three have taken the note in whose place that of a turn will be."""
        mbarrier.wait(self.taken.index(turn % self.NOTES), (turn // self.NOTES & 1) ^ 1)

    @gluon.jit
    def read(self, turn, WARPS: gl.constexpr):
        """Read the note of a turn, once it is there."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        at = turn % self.NOTES
        mbarrier.wait(self.posted.index(at), turn // self.NOTES & 1)
        a = gl.max(self.notes.index(at * 4).load(layout), 0)
        b = gl.max(self.notes.index(at * 4 + 1).load(layout), 0)
        c = gl.max(self.notes.index(at * 4 + 2).load(layout), 0)
        d = gl.max(self.notes.index(at * 4 + 3).load(layout), 0)
        return a, b, c, d

    @gluon.jit
    def take(self, turn, pred=True):
        """Let the note of a turn be written over."""
        mbarrier.arrive(self.taken.index(turn % self.NOTES), count=1, pred=pred)


@gluon.jit
def make_board(NOTES: gl.constexpr):
    """Make a board, and let all warps see the barriers made before."""
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    made = Board(notes, _barriers(NOTES, 1), _barriers(NOTES, 3), NOTES)
    fence_async_shared()
    return made


@gluon.jit
def multiply(
    ring,
    step,
    steps,
    WHICH: gl.constexpr,
    WIDE: gl.constexpr,
    DEEP: gl.constexpr,
    TRANS_A: gl.constexpr,
    TRANS_B: gl.constexpr,
):
    """Sum the products of ``steps`` stages for one group of warps, one product behind the loads it needs."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    total = gl.zeros([HALF, WIDE], gl.float32, layout)
    for i in range(steps):
        ring.wait(step)
        a = ring.left.index(step % ring.STAGES * 2 + WHICH)
        if TRANS_A:
            a = a.reshape([DEEP, HALF]).permute((1, 0))
        b = ring.right.index(step % ring.STAGES)
        if TRANS_B:
            b = b.reshape([WIDE, DEEP]).permute((1, 0))
        else:
            b = b.reshape([DEEP, WIDE])
        total = warpgroup_mma(a, b, total, is_async=True, use_acc=i > 0)
        total = warpgroup_mma_wait(1, deps=[total])
        ring.give_back(step - 1, pred=i > 0)
        step += 1
    total = warpgroup_mma_wait(0, deps=[total])
    ring.give_back(step - 1, pred=steps > 0)
    return total, step
