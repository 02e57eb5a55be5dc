"""The steps around the products of an MoE layer, by torch_npu.

Shape letters: T tokens, C choices a token, R = T * C rows, H hidden, F expert width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gmm_registry.contract import Companions

_OPERATORS = ("npu_moe_token_permute", "npu_moe_token_unpermute", "npu_swiglu")
_MOST_ROWS = 2**24 - 2
_MOST_CHOICES = 512


class NpuCompanions(Companions):
    """npu_moe_token_permute, npu_moe_token_unpermute and npu_swiglu, with torch_npu's own gradients."""

    def companion_rejections(self, tokens: int, choices: int) -> list[str]:
        absent = [name for name in _OPERATORS if not hasattr(torch.ops.npu, name)]
        reasons = [f"this torch_npu has no {name}" for name in absent]
        if tokens * choices > _MOST_ROWS:
            reasons.append(f"{tokens * choices} rows; npu_moe_token_permute takes at most {_MOST_ROWS}")
        if choices > _MOST_CHOICES:
            reasons.append(f"{choices} choices a token; npu_moe_token_permute takes at most {_MOST_CHOICES}")
        return reasons

    def permute(self, x: Tensor, slot_row: Tensor) -> Tensor:
        import torch_npu

        # It sorts the choices by what it is given: here by their rows, all different, not by their experts,
        # since nobody promises an order of equal ones.
        rows: Tensor = torch_npu.npu_moe_token_permute(_differentiable(x), slot_row)[0]
        return rows

    def unpermute(self, rows: Tensor, slot_row: Tensor, weights: Tensor | None = None) -> Tensor:
        import torch_npu

        if weights is None:  # it would take every row for a token
            weights = rows.new_ones(slot_row.shape)
        tokens: Tensor = torch_npu.npu_moe_token_unpermute(
            _differentiable(rows), slot_row.flatten().int(), probs=_differentiable(weights.to(rows.dtype))
        )
        return tokens

    def glu(self, gate_up: Tensor) -> Tensor:
        import torch_npu

        inner: Tensor = torch_npu.npu_swiglu(_differentiable(gate_up.contiguous()), dim=-1)
        return inner


def _differentiable(tensor: Tensor, times: int = 1) -> Tensor:
    """Let an operator's input be differentiated so often, and raise at the next time.

    torch_npu's gradients have no derivative: asked for one, they warn and leave it out. And torch's own
    once_differentiable is not asked where another way leads to the tensor that is differentiated by.
    """
    return cast(Tensor, _Differentiable.apply(tensor, times))  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, times: int) -> Tensor:
        ctx.times = times
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not ctx.times:
            raise RuntimeError(
                "torch_npu's permute, unpermute and swiglu are differentiable once; "
                "layers do without them if use_companions=False"
            )
        return _differentiable(grad, ctx.times - 1), None
