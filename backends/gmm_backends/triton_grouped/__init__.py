"""cuda.triton and xpu.triton: grouped matmul in Triton, scheduled on the device, with no count on the host.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gmm_backends import _cuda
from gmm_backends._out import deliver
from gmm_backends._refusals import late_import, other_dtype
from gmm_backends._triton import missing_triton, multiprocessors, triton_version
from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_log = logging.getLogger("gmm_registry")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = 8  # the major compute capability, for the tensor cores' bf16
_HOPPER = (9, 0)
_NEWEST = (
    3,
    9,
)  # triton whose Gluon, which is young and renames what it has, compiles the kernels for Hopper
_CELL = 128  # rows and columns of a tile, about
_PROGRAMS = 2  # a multiprocessor that keep it busy
_PART = 512  # rows at least that are worth a sum of their own
# The table of `_quack_is_faster`.
_LONG = 128  # rows a group
_WIDE = 4096  # columns of a weight
_EVEN, _UNEQUAL = 2, 8  # skew


class TritonGrouped(GroupedMatmulBackend):
    """Kernels of our own: those for Hopper in its own dialect, plain ones wherever else Triton compiles."""

    def rejections(self, problem: Problem) -> list[str]:
        return self._missing + other_dtype(problem, "triton", _DTYPES) + _cuda.too_old(problem, _OLDEST)

    @cached_property
    def _missing(self) -> list[str]:
        return missing_triton()

    def priority(self, problem: Problem) -> int:
        # torch's grouped_mm has 10. Measured on an H200 only: see docs/performance.md.
        capability = _cuda.capability(problem.device, problem.index)
        if capability is None or problem.dtype == torch.float32:  # full precision has no tensor cores
            return 5
        if capability == _HOPPER and _gluon_is_known():
            return 18 if _quack_is_faster(problem) else 50  # quack has 20
        return 15 if capability <= _HOPPER else 5  # torch loops over the groups on older ones

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[1 if trans_b else 2])
        direct = out.contiguous()
        with _current(x):
            _kernels(len(batch_sizes), x, weight, direct).rows(x, weight, batch_sizes, trans_b, direct)
        return deliver(direct, out)

    def weight_grad(
        self,
        x: Tensor,
        grad_out: Tensor,
        batch_sizes: BatchSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        if out is None:
            out, accumulate = x.new_empty(len(batch_sizes), x.shape[1], grad_out.shape[1]), False
        direct = out.contiguous()
        with _current(x):
            kernels = _kernels(len(batch_sizes), x, grad_out, direct)
            part = _part(x, out)
            if part:
                parts = out.new_empty(len(x) // part + len(out), *out.shape[1:], dtype=torch.float32)
                kernels.products(x, grad_out, batch_sizes, parts, False, part)
                _plain_kernels().add_parts(parts, batch_sizes, part, direct, accumulate)
            else:
                kernels.products(x, grad_out, batch_sizes, direct, accumulate)
        return deliver(direct, out)


def _quack_is_faster(problem: Problem) -> bool:
    """Say where quack was the faster on an H200, by up to 11 %: in wide results of groups not too unequal."""
    if problem.rows < _LONG * problem.groups:
        return False
    if problem.direction == "grad_w":
        return problem.n >= _WIDE
    forward = problem.direction == "forward"
    inner, width = (problem.k, problem.n) if forward else (problem.n, problem.k)
    skew = problem.skew
    if skew is None or width < 2 * inner:
        return False
    return skew <= (_EVEN if width < 3 * inner else _UNEQUAL)


@cache
def _gluon_is_known() -> bool:
    installed = triton_version()
    return installed is None or installed <= _NEWEST


@cache
def _hopper_kernels(device: torch.device) -> ModuleType | None:
    """Return the launcher of the kernels for Hopper, if that is what the device is."""
    if _cuda.capability(device.type, device.index) != _HOPPER:
        return None
    try:
        if _gluon_is_known():
            return import_module("gmm_backends.triton_grouped.launch_hopper")
        why = f"they were tried up to triton {'.'.join(map(str, _NEWEST))}"
    except Exception as error:
        why = f"importing them raised {type(error).__name__}: {error}"
    _log.warning("the plain Triton kernels are used on %s, not those for Hopper: %s", device, why)
    return None


@cache
def _plain_kernels() -> ModuleType:
    return late_import("gmm_backends.triton_grouped.launch_plain", "triton")


def _kernels(groups: int, x: Tensor, *others: Tensor) -> Any:
    """Choose the module that launches the kernels for these tensors."""
    plain, hopper = _plain_kernels(), _hopper_kernels(x.device)
    short = plain.is_short(len(x), groups)
    if hopper is None or short or x.dtype == torch.float32 or not hopper.takes(x, *others):
        return plain
    return hopper


def _part(x: Tensor, out: Tensor) -> int:
    """Return how many rows of a group one program sums, if whole groups would leave some idle; else 0."""
    groups, inner, outer = out.shape
    cells = -(-inner // _CELL) * -(-outer // _CELL)
    programs = _PROGRAMS * multiprocessors(x.device)
    if groups * cells >= programs:
        return 0
    part = max(_PART, 1 << (len(x) * cells // programs).bit_length())
    return part if len(x) > groups * part else 0


def _current(x: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one: Triton launches there."""
    context: AbstractContextManager[None] = (torch.xpu if x.is_xpu else torch.cuda).device_of(x)
    return context
