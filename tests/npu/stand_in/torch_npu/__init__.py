"""A stand-in for torch_npu 2.13: the device, simulated, and the operators that gmm_registry uses.

Like the real package it is imported by ``import torch``, through the entry point beside it.
"""

from __future__ import annotations

from typing import Any

import sim_npu  # noqa: F401  # the device
import torch
from npu_kernels import KERNELS, SCHEMAS
from torch import Tensor

__version__ = "2.13.0"

_library = torch.library.Library("npu", "DEF")
for _schema in SCHEMAS:
    _library.define(_schema)
for _name, _kernel in KERNELS.items():
    _library.impl(_name, _kernel, "PrivateUse1")

_ops = torch.ops.npu
npu_grouped_matmul = _ops.npu_grouped_matmul
npu_grouped_matmul_add_ = _ops.npu_grouped_matmul_add_
npu_moe_token_permute = _ops.npu_moe_token_permute
npu_moe_token_unpermute = _ops.npu_moe_token_unpermute
npu_swiglu = _ops.npu_swiglu


def _autoload() -> None:
    """Do nothing: what `import torch` calls after the import of this package."""


# The gradients that torch_npu has; npu_grouped_matmul has none.


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, indices = inputs[:2]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.arguments = len(tokens), tokens.dtype, indices.shape[1]


def _permute_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (sorted_indices,) = ctx.saved_tensors
    return _ops.npu_moe_token_permute_grad_v2(grad, sorted_indices, *ctx.arguments), None, None, None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, sorted_indices, probs = ctx.saved_tensors
    grad_rows, grad_probs = _ops.npu_moe_token_unpermute_grad_v2(
        grad, sorted_indices, len(rows), rows.dtype, probs, permuted_tokens=rows
    )
    return grad_rows, None, grad_probs, None, None


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _ops.npu_swiglu_backward(grad, *ctx.saved_tensors), None


for _name, _backward, _save in (
    ("npu_moe_token_permute", _permute_backward, _save_permute),
    ("npu_moe_token_unpermute", _unpermute_backward, _save_unpermute),
    ("npu_swiglu", _swiglu_backward, _save_swiglu),
):
    torch.library.register_autograd(f"npu::{_name}", _backward, setup_context=_save, lib=_library)
