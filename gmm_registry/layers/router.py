"""Choose for each token its experts and their weights, and count the tokens of each expert.

Shape letters: T tokens, K choices a token, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gmm_registry.layers.arguments import ROUTER_SCORES, Arguments

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Routing:
    """Where each token goes. Scores and weights are fp32, or fp64 where the logits are."""

    scores: Tensor  # (T, E): of all experts, without any selection bias; a softmax row sums to 1
    logits: Tensor  # (T, E): what the router's layer gave
    weights: Tensor  # (T, K): with which the experts' outputs are added up
    experts: Tensor  # (T, K) int64: K distinct ids below E, the best first


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    softmax_after_top_k: bool = False,
    selection_bias: Tensor | None = None,
    normalize: float | None = None,
) -> Routing:
    """Choose the ``top_k`` best experts of each token.

    The same logits give the same ids, on the same device, so a recomputation routes as the first time.
    A row with NaN gets ids like any other, and weights that are NaN.

    Args:
        logits: (T, E), any floating dtype; scores are computed in fp32.
        top_k: K, at most E.
        score: "softmax", or "sigmoid" (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        softmax_after_top_k: choose by the logits, and let the softmax run over the K chosen only.
        selection_bias: (E,), added for the choice and never part of a weight (the same section).
        normalize: divide the K weights by their p-norm with this p; None or 0: do not.

    Raises:
        ValueError: ``top_k``, ``score`` or the shape of a tensor does not fit.

    >>> routing = route(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log(), 2, normalize=1)
    >>> routing.experts, routing.weights
    (tensor([[3, 2]]), tensor([[0.5714, 0.4286]]))
    """
    _check(logits, top_k, score, softmax_after_top_k, selection_bias)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(dtype)
    scores = wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)
    values = wide if softmax_after_top_k else scores
    keys = values.detach() if selection_bias is None else values.detach() + selection_bias
    # topk orders NaN above all numbers and never gives an id twice (vllm 39391).
    experts = keys.topk(top_k, dim=-1).indices
    weights = values.gather(-1, experts)
    if softmax_after_top_k:
        weights = weights.softmax(-1)
    if normalize:
        # Sigmoid scores can all be 0 in fp32; their weights are then 0, not NaN.
        norm = torch.linalg.vector_norm(weights, normalize, dim=-1, keepdim=True)
        weights = weights / norm.clamp_min(torch.finfo(dtype).tiny)
    return Routing(scores, logits, weights, experts)


def _check(
    logits: Tensor, top_k: int, score: str, softmax_after_top_k: bool, selection_bias: Tensor | None
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must be (T, E), got shape {tuple(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k={top_k} must be from 1 to the {logits.shape[1]} experts")
    if score not in ROUTER_SCORES:
        raise ValueError(f"score={score!r} is unknown; there are {', '.join(map(repr, ROUTER_SCORES))}")
    if softmax_after_top_k and score != "softmax":
        raise ValueError(f"softmax_after_top_k=True needs score='softmax', not {score!r}")
    if selection_bias is not None and selection_bias.shape != logits.shape[1:]:
        raise ValueError(
            f"selection_bias must be ({logits.shape[1]},), got shape {tuple(selection_bias.shape)}"
        )


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert was chosen, on the device, without waiting for it.

    Exact and deterministic on every device, since it sorts and searches: histc takes no integers on some
    devices and no deterministic mode on others (transformers 43583, 45685), and bincount waits for CUDA.

    Args:
        experts: ids, integers of any shape. An id that is not from 0 to E - 1 is not counted: E means
            "not mine".
        num_experts: E.

    Returns:
        (E,) int64.
    """
    return count_sorted(experts.flatten().sort().values, num_experts)


def count_sorted(experts: Tensor, num_experts: int) -> Tensor:
    """Do `count_tokens` for ids (N,) that are in ascending order."""
    bounds = torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, bounds).diff()


class Router(nn.Module):
    """Score tokens with one linear layer, ``layer.weight`` (E, H), and choose their experts.

    With ``moe_router_bias`` it has the buffer ``e_score_correction_bias`` (E,), which stays fp32 whatever
    dtype the module is converted to: the steps that balance the load (0.001 for DeepSeek-V3) are smaller
    than bf16 resolves at 1.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        self.layer = nn.Linear(
            args.hidden_size,
            args.moe_num_experts,
            bias=False,
            device=args.device,
            dtype=args.parameter_dtype,
        )
        with torch.no_grad():
            args.init_method(self.layer.weight)
        bias = None
        if args.moe_router_bias:
            bias = torch.zeros(args.moe_num_experts, device=args.device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Module.to, .bfloat16, .half and the like all end here, also when called on a parent. What else
        # ends here (another device, to_empty) keeps the dtype, and then its result stands.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of x (..., H); T is the product of the leading dimensions."""
        args = self.args
        x = x.reshape(-1, x.shape[-1])
        if self.training and args.moe_jitter_eps:
            x = _jitter(x, args.moe_jitter_eps)
        routing = route(
            self.layer(x),
            args.moe_top_k,
            score=args.moe_router_score,
            softmax_after_top_k=args.moe_softmax_after_top_k,
            selection_bias=self.e_score_correction_bias,
            normalize=args.moe_normalize_expert_weights,
        )
        return _uniform(routing) if args.uniform_expert_assignment else routing


def _jitter(x: Tensor, eps: float) -> Tensor:
    """Multiply with noise from [1 - eps, 1 + eps]; drawn in fp32, since bf16 would leave the interval."""
    noise = torch.empty_like(x, dtype=torch.float32).uniform_(1 - eps, 1 + eps)
    return (x * noise).to(x.dtype)


def _uniform(routing: Routing) -> Routing:
    """Deal the experts out in turn, so that a benchmark needs no trained router."""
    ids = torch.arange(routing.experts.numel(), device=routing.experts.device)
    return replace(routing, experts=ids.remainder(routing.scores.shape[1]).view_as(routing.experts))
