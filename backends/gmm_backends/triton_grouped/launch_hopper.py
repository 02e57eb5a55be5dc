"""Launch the kernels for NVIDIA Hopper.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gmm_backends._triton import multiprocessors
from gmm_backends.triton_grouped import hopper_handover, hopper_products, hopper_rows, schedule
from gmm_backends.triton_grouped.call import call
from gmm_registry.contract import BatchSizes

_TALL = hopper_handover.TALL.value
_HALF = hopper_handover.HALF.value
_ENDLESS = hopper_handover.ENDLESS.value
_WIDE = 256
_ROWS = {"DEEP": 64, "STAGES": 4, "BAND": 16}  # the fastest of those tried: see docs/performance.md
_PRODUCTS = {"DEEP": 32, "STAGES": 6}
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_ALIGNMENT = 16  # bytes: of a row and of an address, as TMA wants them


def takes(*tensors: Tensor) -> bool:
    """Say whether the kernels can address these; the last dimension is a row."""
    return all(
        (tensor.shape[-1] * tensor.element_size() | tensor.data_ptr()) % _ALIGNMENT == 0
        and tensor.shape[-2] <= _ENDLESS
        for tensor in tensors
    )


def rows(x: Tensor, weight: Tensor, batch_sizes: BatchSizes, trans_b: bool, out: Tensor) -> None:
    """Do `launch_plain.rows`."""
    deep = _ROWS["DEEP"]
    # Programs that go through equal tiles in step read the same at the same time, which the L2 cache serves
    # at once. Of unequal groups, whoever is done takes the next tile.
    dynamic = batch_sizes.skew != 1
    tiles = schedule.of(batch_sizes, x.device, _TALL)
    args = (
        _whole(x, (_HALF, deep)),
        _whole(weight, (1, _WIDE, deep) if trans_b else (1, deep, _WIDE)),
        _ragged(out, (_HALF, _WIDE // 2)),
        tiles,
        _counter(x) if dynamic else tiles,
        len(batch_sizes),
        -(-out.shape[1] // _WIDE),
        x.shape[1],
    )
    _call(hopper_rows.rows, x, args, (trans_b, _WIDE, *_ROWS.values(), dynamic))


def products(
    x: Tensor, grad_out: Tensor, batch_sizes: BatchSizes, out: Tensor, accumulate: bool, part: int = 0
) -> None:
    """Do `launch_plain.products`."""
    deep = _PRODUCTS["DEEP"]
    direct = accumulate or out.dtype != x.dtype
    args = (
        _ragged(x, (deep, _HALF)),
        _ragged(grad_out, (deep, _WIDE)),
        out if direct else _whole(out, (1, _HALF, _WIDE)),
        schedule.of(batch_sizes, x.device, part or _TALL),
        _counter(x),
        len(batch_sizes),
        *out.shape[1:],
    )
    constants = (_WIDE, *_PRODUCTS.values(), part, direct, accumulate)
    _call(hopper_products.products, x, args, constants, out.dtype)


def _counter(x: Tensor) -> Tensor:
    """Make what the programs of one launch count the tiles with that they have taken."""
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def _call(
    kernel: Any, x: Tensor, args: tuple[Any, ...], constants: tuple[Any, ...], *dtypes: torch.dtype
) -> None:
    """Launch one program a multiprocessor; none of the arguments is specialised on its value."""
    call(kernel, multiprocessors(x.device), x.device, args, constants, (x.dtype, *dtypes), num_warps=4)


class _Address(NamedTuple):
    """What a descriptor reads of its tensor, without keeping the tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _whole(tensor: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Describe a contiguous tensor, to be read and written in blocks."""
    *_, tall, wide = tensor.shape
    strides = (tall * wide, wide, 1)[-tensor.dim() :]  # its own may be any along a dimension of size 1
    return _described(tensor.data_ptr(), tensor.dtype, tensor.shape, strides, block)


def _ragged(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Describe rows such that a group is addressed by where it ends, and nothing behind that is touched.

    The address of (ENDLESS, end, ENDLESS - size + r, c) is that of row ``end - size + r``: the first two
    strides add up to ENDLESS * 2**34, which is 0 in 64 bits for every size of an element. Rows from
    ENDLESS on are out of bounds, for which TMA reads zeros and writes nothing. `triton.tools.ragged_tma`
    has the same for Triton's first dialect.
    """
    row = tensor.shape[1]
    shape = (2**31 - 2**16, 2**31 - 2**16, _ENDLESS, row)
    return _described(tensor.data_ptr(), tensor.dtype, shape, (2**34 - row, row, row, 1), (1, 1, *block))


@lru_cache(maxsize=4096)
def _described(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
    return TensorDescriptor(_Address(address, dtype), list(shape), list(strides), list(block), layout)
