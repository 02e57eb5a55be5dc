"""The routed experts of Qwen3.5 MoE and its like: two 3-D weights, two grouped products, nothing else.

Shape letters: T tokens, K choices a token, E experts, F expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from gmm_registry.layers.companions import companions_for
from gmm_registry.layers.permute import permute, sort_by_expert, unpermute
from gmm_registry.layers.products import GroupedProducts


def routed_glu(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    activation: Callable[[Tensor], Tensor] = F.silu,
    backend: str | None = None,
    use_companions: bool = True,
) -> Tensor:
    """Compute ``sum over k of weights[t, k] * (act(x @ gate) * (x @ up)) @ down`` of the chosen experts.

    The router, a shared expert and everything else of the model stay as they are.

    Args:
        x: tokens, (T, H).
        gate_up: (E, H, 2 F), the gate's columns first. transformers' ``gate_up_proj`` lies the other way:
            give ``gate_up_proj.transpose(1, 2)``, which is not copied.
        down: (E, F, H); transformers' ``down_proj.transpose(1, 2)``.
        weights: routing weights, (T, K).
        experts: ids from 0 to E - 1, (T, K).
        activation: of the gate.
        backend: as in `gmm`.
        use_companions: where the backend has kernels for the steps around its products.

    Returns:
        (T, H), the dtype of x.

    Source: ``Qwen3_5MoeExperts`` of transformers 5.24.
    """
    permutation = sort_by_expert(experts, gate_up.shape[0])
    first = gate_up.mT
    companions = companions_for(x, first, permutation, backend) if use_companions else None
    products = GroupedProducts(permutation.batch_sizes, backend, companions)
    rows = permute(x, permutation, companions=companions)
    inner = products.glu(products.expand(rows, first), activation)
    rows = products.contract(inner, down)
    return unpermute(rows, permutation, weights, companions=companions)
