"""The steps around the products of an MoE layer, by torch_npu.

Shape letters: T tokens, C choices a token, R = T * C rows, H hidden, F expert width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from gmm_registry.contract import Companions

_MOST_ROWS = 2**24 - 2
_MOST_CHOICES = 512


class NpuCompanions(Companions):
    """npu_moe_token_permute, npu_moe_token_unpermute and npu_swiglu, with torch_npu's own gradients.

    What is empty never reaches them, since not every version of theirs takes it.
    """

    def companion_rejections(self, tokens: int, choices: int) -> list[str]:
        reasons = []
        if tokens * choices > _MOST_ROWS:
            reasons.append(f"{tokens * choices} rows; npu_moe_token_permute takes at most {_MOST_ROWS}")
        if choices > _MOST_CHOICES:
            reasons.append(f"{choices} choices a token; npu_moe_token_permute takes at most {_MOST_CHOICES}")
        return reasons

    def permute(self, x: Tensor, slot_row: Tensor) -> Tensor:
        import torch_npu

        if not slot_row.numel():
            return x
        # It sorts the choices by what it is given: here by their rows, all different, not by their experts,
        # since nobody promises an order of equal ones.
        rows: Tensor = torch_npu.npu_moe_token_permute(x, slot_row)[0]
        return rows

    def unpermute(self, rows: Tensor, slot_row: Tensor, weights: Tensor | None = None) -> Tensor:
        import torch_npu

        if not slot_row.numel():
            return rows
        if weights is None:  # it would take every row for a token
            weights = rows.new_ones(slot_row.shape)
        tokens: Tensor = torch_npu.npu_moe_token_unpermute(
            rows, slot_row.flatten().int(), probs=weights.to(rows.dtype)
        )
        return tokens

    def glu(self, gate_up: Tensor) -> Tensor:
        import torch_npu

        if not gate_up.numel():
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up
        inner: Tensor = torch_npu.npu_swiglu(gate_up.contiguous(), dim=-1)
        return inner
