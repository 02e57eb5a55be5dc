"""The reference of a dMoE layer: fp64, token by token, nothing sorted, grouped or padded.

Shape letters: T tokens, K choices a token, E experts, F expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gmm_registry.layers.arguments import Arguments


def dense_moe(x: Tensor, state: Mapping[str, Tensor], args: Arguments) -> Tensor:
    """Compute a dMoE layer's output, bias added, by a loop over tokens; differentiable by autograd.

    Args:
        x: (T, H) of any floating dtype.
        state: the layer's state dict, as MegaBlocks names it.
        args: the layer's arguments; jitter and uniform assignment are not for a reference.

    Returns:
        (T, H) fp64.
    """
    x, state = x.double(), {name: tensor.double() for name, tensor in state.items()}
    probabilities, experts = _route(x @ state["router.layer.weight"].T, state, args)
    rows = []
    for token, weights, choices in zip(x, probabilities, experts.tolist(), strict=True):
        row = torch.zeros_like(token)
        for weight, expert in zip(weights, choices, strict=True):
            row = row + weight * _expert(token, state, args, expert)
        rows.append(row)
    out = torch.stack(rows) if rows else x * 0
    if args.shared_expert:
        out = _add_shared(x, out, state, args)
    return out + state["experts.bias"] if args.bias else out


def _route(logits: Tensor, state: Mapping[str, Tensor], args: Arguments) -> tuple[Tensor, Tensor]:
    top_k = args.moe_top_k
    if args.moe_softmax_after_top_k:
        values, experts = logits.sort(dim=-1, descending=True, stable=True)
        weights, experts = values[:, :top_k].softmax(-1), experts[:, :top_k]
    else:
        scores = logits.sigmoid() if args.moe_router_score == "sigmoid" else logits.softmax(-1)
        selection = scores + state.get("router.e_score_correction_bias", torch.zeros(()))
        experts = selection.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
        weights = scores.gather(1, experts)
    if args.moe_normalize_expert_weights:
        p = float(args.moe_normalize_expert_weights)
        weights = weights / weights.abs().pow(p).sum(-1, keepdim=True).pow(1 / p)
    return weights, experts


def _expert(token: Tensor, state: Mapping[str, Tensor], args: Arguments, expert: int) -> Tensor:
    def matrix(name: str) -> Tensor:
        return state[f"experts.mlp.{name}"].view(args.moe_num_experts, -1, args.hidden_size)[expert]

    first = matrix("w1") @ token
    second = matrix("v1") @ token if args.mlp_type == "glu" else None
    if args.expert_bias:
        bias = state["experts.mlp.b1"][expert]
        first = first + bias[: args.ffn_hidden_size]
        second = None if second is None else second + bias[args.ffn_hidden_size :]
    inner = args.activation_fn(first) if second is None else args.activation_fn(first) * second
    out = matrix("w2").T @ inner
    return out + state["experts.mlp.b2"][expert] if args.expert_bias else out


def _add_shared(x: Tensor, routed: Tensor, state: Mapping[str, Tensor], args: Arguments) -> Tensor:
    def linear(name: str) -> Callable[[Tensor], Tensor]:
        weight, bias = state[f"shared_expert.{name}.weight"], state.get(f"shared_expert.{name}.bias")
        return lambda t: torch.nn.functional.linear(t, weight, bias)

    inner = linear("up_proj")(x)
    if args.mlp_type == "glu":
        inner = args.activation_fn(linear("gate_proj")(x)) * inner
    else:
        inner = args.activation_fn(inner)
    shared = linear("down_proj")(inner)
    if args.shared_expert_gate:
        shared = linear("shared_expert_gate")(x).sigmoid() * shared
    if args.shared_expert_weighted_sum:
        share = 1 / (args.moe_top_k + 1)
        return share * shared + (1 - share) * routed
    return shared + routed
