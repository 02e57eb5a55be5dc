"""gmm() and the two torch operators behind it: validation, autograd, dispatch to a backend.

The derivatives of both operators are made of the same two operators, so they can be taken again.
Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gmm_registry.contract import BatchSizes, Direction, GroupedMatmulBackend, autocast, prepare
from gmm_registry.plan import checked, gmm_shape, plan, weight_grad_shape, without
from gmm_registry.registry.request import requested


def gmm(
    x: Tensor,
    weight: Tensor,
    batch_sizes: BatchSizes | Tensor | Iterable[int],
    trans_b: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Multiply each group of rows with that group's matrix.

    For every group e: ``out[start:end] = x[start:end] @ weight[e]`` (``weight[e].T`` with ``trans_b``).
    Differentiable twice; accumulates in fp32; runs in the autocast type under autocast.

    Args:
        x: rows sorted by group, (R, K).
        weight: one matrix a group, (E, K, N), or (E, N, K) with ``trans_b``. A transposed view is
            used as it is, without a copy.
        batch_sizes: rows of each group, (E,): a CPU int64 or int32 tensor, ints, or a `BatchSizes`.
        trans_b: multiply with the transposed matrices.
        backend: name of the implementation ("eager"); by default `use_backend`, then the environment
            variable GMM_REGISTRY_BACKEND, then the fastest that accepts the problem.

    Returns:
        (R, N), dtype and device of x.

    Raises:
        ValueError: shapes, devices or counts do not fit.
        TypeError: dtypes do not fit.
        UnknownBackendError: no backend has the name asked for.
        BackendUnavailableError: the backend asked for refuses this problem, or every one does.

    >>> x, w = torch.ones(3, 2), torch.stack([torch.eye(2), 5 * torch.eye(2)])
    >>> gmm(x, w, [1, 2])
    tensor([[1., 1.],
            [5., 5.],
            [5., 5.]])
    """
    x, weight, sizes, trans_b = prepare(x, weight, batch_sizes, trans_b)
    name = requested(backend, x.device)
    if not _is_compiling():
        transform = _transform()
        if transform is None and _needs_no_dispatch(x, weight):
            return _gmm(x, weight, sizes, trans_b, name)
        if transform is not None and transform.key() in _GRADIENTS:
            raise NotImplementedError(
                "torch.func's grad, jvp and what is made of them cannot go through gmm; use torch.autograd"
            )
    return cast(Tensor, _gmm_op(x, weight, sizes.counts, trans_b, name))


def weight_grad(
    x: Tensor,
    grad_out: Tensor,
    batch_sizes: BatchSizes | Tensor | Iterable[int],
    *,
    backend: str | None = None,
) -> Tensor:
    """Compute ``x_e.T @ grad_out_e`` for each group, the gradient of `gmm`'s weight; differentiable.

    Args:
        x: (R, K).
        grad_out: (R, N).
        batch_sizes: as in `gmm`.
        backend: as in `gmm`.

    Returns:
        (E, K, N), exactly zero for an empty group.
    """
    name = requested(backend, x.device)
    counts = BatchSizes.of(batch_sizes).counts
    return cast(Tensor, _weight_grad_op(autocast(x), autocast(grad_out), counts, False, name))


def gmm_into(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    batch_sizes: BatchSizes | Tensor | Iterable[int],
    trans_b: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Do `gmm` into ``out`` (R, N), which is returned. No gradient flows through it."""
    x, weight, sizes, trans_b = prepare(x, weight, batch_sizes, trans_b)
    name = requested(backend, x.device)
    with torch.no_grad():
        return _gmm(x, weight, sizes, trans_b, name, out)


_library = torch.library.Library("gmm_registry", "DEF")
_library.define(
    "gmm(Tensor x, Tensor weight, Tensor batch_sizes, bool trans_b, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "weight_grad(Tensor x, Tensor grad_out, Tensor batch_sizes, bool trans_b, str backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_gmm_op = torch.ops.gmm_registry.gmm.default
_weight_grad_op = torch.ops.gmm_registry.weight_grad.default
# Looked up once: each step to a name costs a call that has just launched a kernel, its caches cold.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_GRADIENTS = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
# As torch.library.register_autograd does inside, whose own wrapper costs more than a small product.
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _needs_no_dispatch(x: Tensor, weight: Tensor) -> bool:
    """Say whether the dispatcher would only hand a call on to the kernel.

    Two passes through a Python operator cost more than a decode-sized product does.
    """
    return (
        not (_is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and forward_ad._current_level < 0
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not x.is_meta
        and not _dispatch_modes()
        and not _profiler_enabled()
    )


def _gmm(
    x: Tensor, weight: Tensor, sizes: BatchSizes, trans_b: bool, name: str, out: Tensor | None = None
) -> Tensor:
    direction: Direction = "grad_x" if trans_b else "forward"
    shape, backend, problem = plan(gmm_shape, direction, name, x, weight, sizes, trans_b)
    if out is not None and (out.shape != shape or out.dtype != x.dtype or out.device != x.device):
        raise ValueError(
            f"out must be {shape} {x.dtype} on {x.device}, got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if backend is None:
        return x.new_zeros(shape) if out is None else out.zero_()
    x, weight = x.contiguous(), weight.contiguous()
    try:
        result = backend.forward(x, weight, sizes, trans_b=trans_b, out=out)
    except NotImplementedError as error:

        def product(other: GroupedMatmulBackend) -> Tensor:
            return other.forward(x, weight, sizes, trans_b=trans_b, out=out)

        backend, result = without(backend, error, name, problem, product)
    result = checked(result, backend, shape, x.dtype)
    if out is None:
        return result.contiguous()
    if result.data_ptr() != out.data_ptr():
        raise RuntimeError(f"{backend.key} did not write to out, but returned another tensor")
    return out


def _weight_grad(x: Tensor, grad_out: Tensor, sizes: BatchSizes, trans_b: bool, name: str) -> Tensor:
    shape, backend, problem = plan(weight_grad_shape, "grad_w", name, x, grad_out, sizes, trans_b)
    if backend is None:
        return x.new_zeros(shape)
    left, right = (grad_out, x) if trans_b else (x, grad_out)
    left, right = left.contiguous(), right.contiguous()
    try:
        result = backend.weight_grad(left, right, sizes)
    except NotImplementedError as error:
        backend, result = without(
            backend, error, name, problem, lambda other: other.weight_grad(left, right, sizes)
        )
    return checked(result, backend, shape, x.dtype).contiguous()


class _Gmm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, counts: Tensor, trans_b: bool, backend: str) -> Tensor:
        with _below_autograd():
            return cast(Tensor, _gmm_op(x, weight, counts, trans_b, backend))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_for_backward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _gmm_op(grad_out, weight, counts, not ctx.trans_b, ctx.backend)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_grad_op(x, grad_out, counts, ctx.trans_b, ctx.backend)
        return grad_x, grad_weight, None, None, None


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, grad_out: Tensor, counts: Tensor, trans_b: bool, backend: str) -> Tensor:
        with _below_autograd():
            return cast(Tensor, _weight_grad_op(x, grad_out, counts, trans_b, backend))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_for_backward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor) -> tuple[Tensor | None, ...]:
        x, grad_out, counts = ctx.saved_tensors
        grad_x = grad_grad_out = None
        if ctx.needs_input_grad[0]:
            grad_x = _gmm_op(grad_out, grad_weight, counts, not ctx.trans_b, ctx.backend)
        if ctx.needs_input_grad[1]:
            grad_grad_out = _gmm_op(x, grad_weight, counts, ctx.trans_b, ctx.backend)
        return grad_x, grad_grad_out, None, None, None


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """Keep of two operands those that a gradient needs: the other's. A frozen weight keeps no rows."""
    left, right, counts, ctx.trans_b, ctx.backend = inputs
    need_left, need_right = ctx.needs_input_grad[:2]
    ctx.save_for_backward(left if need_right else None, right if need_left else None, counts)


def _kernel(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(a: Tensor, b: Tensor, counts: Tensor, trans_b: bool, backend: str) -> Tensor:
        return compute(a, b, BatchSizes.carried_by(counts), trans_b, backend)

    return kernel


def _differentiable(op: Any, function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    def kernel(a: Tensor, b: Tensor, counts: Tensor, trans_b: bool, backend: str) -> Tensor:
        wants_grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if wants_grad or forward_ad._current_level >= 0:  # forward mode is not there, and autograd says so
            return cast(Tensor, function.apply(a, b, counts, trans_b, backend))
        with _below_autograd():
            return cast(Tensor, op(a, b, counts, trans_b, backend))

    return kernel


_library.impl("gmm", _kernel(_gmm), "CompositeExplicitAutograd")
_library.impl("gmm", _differentiable(_gmm_op, _Gmm), "Autograd")
torch.library.register_fake(
    "gmm_registry::gmm",
    lambda x, weight, counts, trans_b, backend: x.new_empty(gmm_shape(x, weight, counts, trans_b)),
    lib=_library,
)
_library.impl("weight_grad", _kernel(_weight_grad), "CompositeExplicitAutograd")
_library.impl("weight_grad", _differentiable(_weight_grad_op, _WeightGrad), "Autograd")
torch.library.register_fake(
    "gmm_registry::weight_grad",
    lambda x, grad_out, counts, trans_b, backend: x.new_empty(
        weight_grad_shape(x, grad_out, counts, trans_b)
    ),
    lib=_library,
)
