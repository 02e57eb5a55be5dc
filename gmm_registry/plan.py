"""Plan one grouped product: check the operands, choose the backend, and see that the result is one.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gmm_registry.contract import BatchSizes, Direction, GroupedMatmulBackend, Problem
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.registry import choice
from gmm_registry.registry.choice import choose, forgive, refuse
from gmm_registry.registry.verdicts import describe

_STRIDED = torch.strided
_MOST = 4096  # plans that are kept


def _check(x: Tensor, name: str, other: Tensor, counts: Tensor) -> None:
    """Check what both operators share; ``other`` is the weight or grad_out, as ``name`` says."""
    if x.dim() != 2:
        raise ValueError(f"x must be (R, K), got shape {tuple(x.shape)}")
    if x.layout is not _STRIDED or other.layout is not _STRIDED:
        raise TypeError(f"x is {x.layout} and {name} {other.layout}; both must be ordinary tensors")
    if x.device != other.device:
        raise ValueError(f"x is on {x.device}, but {name} is on {other.device}")
    dtype = x.dtype
    if dtype is not other.dtype:
        raise TypeError(f"x is {dtype}, but {name} is {other.dtype}: cast one, or use autocast")
    if not dtype.is_floating_point:
        raise TypeError(f"x is {dtype}; a floating-point dtype is needed")
    if counts.dim() != 1:
        raise ValueError(f"batch_sizes have shape {tuple(counts.shape)}; they must be (E,)")
    if counts.is_meta and not x.is_meta:
        raise ValueError(f"batch_sizes are on meta and hold no numbers, but x is on {x.device}")


def gmm_shape(x: Tensor, weight: Tensor, counts: Tensor, trans_b: bool) -> tuple[int, int]:
    """Check all that the shapes and types tell, and return (R, N)."""
    _check(x, "weight", weight, counts)
    if weight.dim() != 3:
        layout = "(E, N, K)" if trans_b else "(E, K, N)"
        raise ValueError(f"weight must be {layout}, got shape {tuple(weight.shape)}")
    groups, k, n = weight.shape
    if trans_b:
        k, n = n, k
    rows, inner = x.shape
    if inner != k:
        layout = "(E, N, K)" if trans_b else "(E, K, N)"
        raise ValueError(
            f"x {tuple(x.shape)} has K = {inner}, but weight {tuple(weight.shape)} is {layout} "
            f"with trans_b={trans_b} and has K = {k}"
        )
    entries = counts.shape[0]
    if isinstance(entries, torch.SymInt):  # known when the compiled code runs
        torch._check(entries == groups)
    elif entries != groups:
        raise ValueError(
            f"batch_sizes have {entries} entries, but weight {tuple(weight.shape)} has {groups} groups"
        )
    return rows, n


def weight_grad_shape(x: Tensor, grad_out: Tensor, counts: Tensor, trans_b: bool) -> tuple[int, int, int]:
    """Check all that the shapes and types tell, and return the shape of the weight."""
    _check(x, "grad_out", grad_out, counts)
    if grad_out.dim() != 2 or grad_out.shape[0] != x.shape[0]:
        raise ValueError(
            f"grad_out must be (R, N) with the R of x {tuple(x.shape)}, got shape {tuple(grad_out.shape)}"
        )
    k, n = x.shape[1], grad_out.shape[1]
    return counts.shape[0], *((n, k) if trans_b else (k, n))


class Plan(NamedTuple):
    """What a call has to do: the shape of the result, and the backend, None if there is no work."""

    shape: tuple[int, ...]
    backend: GroupedMatmulBackend | None
    problem: Problem


def plan(
    shape_of: Callable[[Tensor, Tensor, Tensor, bool], tuple[int, ...]],
    direction: Direction,
    name: str,
    a: Tensor,
    b: Tensor,
    sizes: BatchSizes,
    trans_b: bool,
) -> Plan:
    """Check all operands and choose a backend; after the first time this costs one look-up."""
    a_shape, counts = a.shape, sizes.counts
    # fmt: off
    key = (
        choice.state,
        direction, name, trans_b, sizes.skew, counts.shape, counts.is_meta,
        a_shape, a.dtype, a.device, a.layout, b.shape, b.dtype, b.device, b.layout,
    )
    # fmt: on
    known: Plan | None = choice.kept.get(key)
    if known is not None:
        sizes.check(a_shape[0])
        return known
    shape = shape_of(a, b, counts, trans_b)
    sizes.check(a_shape[0])
    device, rows = a.device, a_shape[0]
    groups, k, n = shape if direction == "grad_w" else b.shape
    problem = Problem(device.type, device.index, a.dtype, rows, groups, k, n, direction, sizes.skew)
    backend = None
    if 0 not in (*a_shape, *shape):
        backend = choose(name, problem)
    elif name:  # a rank without rows refuses what the other ranks refuse
        choose(name, replace(problem, direction="forward", skew=None))
    if len(choice.kept) >= _MOST:
        choice.kept.clear()
    found = choice.kept[key] = Plan(shape, backend, problem)
    return found


def checked(
    result: Tensor, backend: GroupedMatmulBackend, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Let nothing out of a backend that is not what was asked for."""
    if not isinstance(result, Tensor):
        raise RuntimeError(f"{backend.key} returned {type(result).__name__}, not a tensor")
    if result.shape != shape or result.dtype is not dtype:
        raise RuntimeError(
            f"{backend.key} returned {tuple(result.shape)} {result.dtype}, not {shape} {dtype}"
        )
    return result


def without(
    backend: GroupedMatmulBackend,
    error: NotImplementedError,
    name: str,
    problem: Problem,
    product: Callable[[GroupedMatmulBackend], Tensor],
) -> tuple[GroupedMatmulBackend, Tensor]:
    """Compute on the next backend that has the kernel, and remember which did not.

    A kernel that is named but not there has computed nothing: that is a refusal that comes late. Any other
    exception is a fault and never sends the call to another backend.
    """
    if name:
        raise error
    absent = {backend.key: error}
    while True:
        for key, reason in absent.items():
            refuse(key, problem, f"its kernel raised {describe(reason)}")
        try:
            backend = choose("", problem)
            return backend, product(backend)
        except BackendUnavailableError:
            # No backend has it, so the fault is the call's and says nothing about any backend.
            forgive(absent, problem)
            raise error from None
        except NotImplementedError as another:
            absent[backend.key] = another
