"""The dropless Mixture-of-Experts layer: route, permute, two products with the experts, unpermute.

Source: Gale et al., MegaBlocks (2022); parameter names and options of its package, version 0.10.
Shape letters: T tokens, K choices a token, E experts, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmm_registry.contract import autocast
from gmm_registry.layers import dmlp_registry
from gmm_registry.layers.arguments import Arguments
from gmm_registry.layers.losses import record
from gmm_registry.layers.permute import sort_by_expert
from gmm_registry.layers.router import Router, Routing
from gmm_registry.layers.shared_expert import SharedExpert


class Experts(nn.Module):
    """The routed experts and the output bias they share."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        self.mlp = dmlp_registry.get(args)
        if args.bias:
            bias = torch.zeros(args.hidden_size, device=args.device, dtype=args.parameter_dtype)
            self.bias = nn.Parameter(bias)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute tokens (T, H) as routed, giving (T, H) without the output bias."""
        permutation = sort_by_expert(routing.experts, self.args.moe_num_experts, block=self.mlp.block)
        if self.training:
            record(routing, permutation.batch_sizes.on(x.device), self.args)
        return self.mlp.experts(x, routing.weights, permutation)


class dMoE(nn.Module):  # noqa: N801 (MegaBlocks' name)
    """A dropless MoE layer, on any device that a backend serves.

    >>> layer = dMoE(
    ...     Arguments(
    ...         hidden_size=16,
    ...         ffn_hidden_size=32,
    ...         moe_num_experts=4,
    ...         moe_top_k=2,
    ...         dtype=torch.float32,
    ...         return_bias=False,
    ...     )
    ... )
    >>> layer(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        if args.moe_expert_model_parallelism:
            raise ValueError(
                "moe_expert_model_parallelism=True: this version has no expert parallelism; "
                "dMoE keeps all experts on each rank"
            )
        self.args = args
        self.router = Router(args)
        self.experts = Experts(args)
        self.shared_expert = SharedExpert(args) if args.shared_expert else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Compute tokens.

        Args:
            x: (..., H).

        Returns:
            (..., H); with ``args.return_bias`` and ``args.bias`` a pair of it, without the output bias
            added, and that bias (H,).

        Raises:
            ValueError: x is not (..., H).
            TypeError: the dtype of x is not that of the layer, and autocast is off.
        """
        x = autocast(x)
        self._check(x)
        tokens = x.reshape(-1, x.shape[-1])
        out = self.experts(tokens, self.router(tokens))
        if self.shared_expert is not None:
            out = self.shared_expert.add(self.shared_expert(tokens), out)
        out = out.view(x.shape)
        bias = self.experts.bias
        if bias is None:
            return out
        return (out, bias) if self.args.return_bias else out + bias

    def _check(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.args.hidden_size,):
            raise ValueError(f"x must be (..., {self.args.hidden_size}), got shape {tuple(x.shape)}")
        dtype = autocast(self.router.layer.weight).dtype
        if x.dtype != dtype:
            raise TypeError(
                f"x is {x.dtype}, but the layer is {dtype}: cast one, or give Arguments a dtype "
                "(fp16=True is MegaBlocks' default)"
            )
