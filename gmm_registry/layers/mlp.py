"""The experts' MLP and GLU on rows that are sorted by expert, grouped or block-sparse.

Parameters are named and laid out as MegaBlocks saves them: w1, v1 and w2 as (E * F, H).
Shape letters: T tokens, K choices a token, R rows, E experts, F expert width, H hidden.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gmm_registry.block_sparse import BLOCK, BlockSparseProducts
from gmm_registry.contract import BatchSizes, Companions, autocast
from gmm_registry.layers.arguments import Arguments
from gmm_registry.layers.companions import companions_for
from gmm_registry.layers.memory_optimized import Path, experts, memory_optimized_experts
from gmm_registry.layers.permute import Permutation
from gmm_registry.layers.products import GroupedProducts, Products, SparseProducts
from gmm_registry.registry import get_backend
from gmm_registry.registry.discovery import find
from gmm_registry.registry.request import requested


class ExpertMLP(nn.Module):
    """Give every expert ``act(x @ w1.T) @ w2``.

    Args:
        args: sizes, initialisation, activation, `memory_optimized_mlp`, `backend`.

    Raises:
        UnknownBackendError: no installed package offers ``args.backend``.
    """

    block: ClassVar[int] = 1  # each expert's rows must come in multiples of this

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        if args.backend is not None:
            find(None, args.backend)
        self._make_weights()
        options = self._options()
        wide = len(self._first()) // args.moe_num_experts
        if args.expert_bias:
            self.b1 = nn.Parameter(torch.zeros(args.moe_num_experts, wide, **options))
            self.b2 = nn.Parameter(torch.zeros(args.moe_num_experts, args.hidden_size, **options))
        else:
            self.register_parameter("b1", None)
            self.register_parameter("b2", None)

    def _options(self) -> dict[str, Any]:
        return {"device": self.args.device, "dtype": self.args.parameter_dtype}

    def _weight(self, init: Any) -> nn.Parameter:
        args = self.args
        weight = torch.empty(args.moe_num_experts * args.ffn_hidden_size, args.hidden_size, **self._options())
        with torch.no_grad():
            init(weight)
        return nn.Parameter(weight)

    def _make_weights(self) -> None:
        self.w1 = self._weight(self.args.init_method)
        self.w2 = self._weight(self.args.output_layer_init_method)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return what rows and inner are multiplied with, (E, F or 2 F, H) and (E, F, H)."""
        experts, hidden = self.args.moe_num_experts, self.args.hidden_size
        return self._first().view(experts, -1, hidden), self.w2.view(experts, -1, hidden)

    def _first(self) -> nn.Parameter:
        return self.w1

    def activate(self, products: Products, inner: Tensor, bias: Tensor | None) -> Tensor:
        """Apply bias and activation to the first product."""
        return self.args.activation_fn(inner if bias is None else products.add_bias(inner, bias))

    def products(
        self, batch_sizes: BatchSizes, device: torch.device, companions: Companions | None = None
    ) -> Products:
        """Return the products for rows of these counts."""
        return GroupedProducts(batch_sizes, self.args.backend, companions)

    def forward(self, x: Tensor, batch_sizes: BatchSizes | Tensor) -> Tensor:
        """Compute rows that are sorted by expert.

        Args:
            x: (R, H).
            batch_sizes: rows of each expert, (E,); multiples of `block`.

        Returns:
            (R, H).
        """
        return self._run(x, None, BatchSizes.of(batch_sizes), None)

    def experts(self, x: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
        """Compute from tokens to tokens: permute, multiply, weigh and add up.

        Args:
            x: (T, H).
            weights: (T, K).
            permutation: made with this layer's `block`.

        Returns:
            (T, H).
        """
        return self._run(x, weights, permutation.row_counts, permutation)

    def _run(
        self, x: Tensor, weights: Tensor | None, counts: BatchSizes, permutation: Permutation | None
    ) -> Tensor:
        x, first, second = map(autocast, (x, *self.weights()))
        companions = None
        if permutation is not None and self.args.use_companions:
            companions = companions_for(x, first, permutation, self.args.backend)
        products = self.products(counts, x.device, companions)

        def activate(inner: Tensor, bias: Tensor | None) -> Tensor:
            return self.activate(products, inner, bias)

        run = memory_optimized_experts if self.args.memory_optimized_mlp else experts
        b1, b2 = (None if bias is None else autocast(bias) for bias in (self.b1, self.b2))
        return run(Path(products, activate, permutation), x, weights, first, second, b1, b2)


class ExpertGLU(ExpertMLP):
    """Give every expert ``(act(x @ w1.T) * (x @ v1.T)) @ w2``.

    Gate and up are one parameter, ``w1v1`` (E * 2 F, H), each expert's gate above its up, so that they are
    one product; a state dict has them apart, as MegaBlocks has.
    """

    def _make_weights(self) -> None:
        gate, up = self._weight(self.args.init_method), self._weight(self.args.init_method)
        self.w1v1 = nn.Parameter(self._join(gate.detach(), up.detach()))
        self.w2 = self._weight(self.args.output_layer_init_method)
        self.register_state_dict_post_hook(_save_apart)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_apart)  # type: ignore[no-untyped-call]

    def _join(self, gate: Tensor, up: Tensor) -> Tensor:
        shape = (self.args.moe_num_experts, self.args.ffn_hidden_size, self.args.hidden_size)
        return torch.cat([gate.view(shape), up.view(shape)], dim=1).flatten(0, 1)

    def apart(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Split ``w1v1`` or its gradient (E * 2 F, H) into w1 and v1, (E * F, H)."""
        hidden = self.args.hidden_size
        gate, up = joined.view(self.args.moe_num_experts, 2, -1, hidden).unbind(1)
        return gate.reshape(-1, hidden), up.reshape(-1, hidden)

    def _first(self) -> nn.Parameter:
        return self.w1v1

    def activate(self, products: Products, inner: Tensor, bias: Tensor | None) -> Tensor:
        return products.glu(
            inner if bias is None else products.add_bias(inner, bias), self.args.activation_fn
        )


def _save_apart(module: ExpertGLU, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}w1"], state[f"{prefix}v1"] = module.apart(state.pop(f"{prefix}w1v1"))


def _load_apart(
    module: ExpertGLU,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    names = [f"{prefix}w1", f"{prefix}v1"]
    there = [name for name in names if name in state]
    for name in there:
        if state[name].shape != module.w2.shape:
            errors.append(f"{name} must be {tuple(module.w2.shape)}, not {tuple(state[name].shape)}")
    if len(there) == 1:
        errors.append(f"of {' and '.join(names)} only {there[0]} is there")
    parts = [state.pop(name) for name in there]
    if len(parts) == 2 and all(part.shape == module.w2.shape for part in parts):
        state[f"{prefix}w1v1"] = module._join(*parts)


class _Sparse(ExpertMLP):
    """The block-sparse formulation of a layer."""

    block = BLOCK

    def products(
        self, batch_sizes: BatchSizes, device: torch.device, companions: Companions | None = None
    ) -> Products:
        asked = self.args.backend or requested(None, device)
        backend = get_backend(device, asked or "megablocks_sparse")
        if not isinstance(backend, BlockSparseProducts):
            raise ValueError(f"{backend.key} has no block-sparse products; mlp_impl='sparse' needs them")
        return SparseProducts(batch_sizes.host, backend)


class GroupedMLP(ExpertMLP):
    """`ExpertMLP` on any gmm backend."""


class GroupedGLU(ExpertGLU):
    """`ExpertGLU` on any gmm backend."""


class SparseMLP(_Sparse, ExpertMLP):
    """`ExpertMLP` on block-sparse products."""


class SparseGLU(_Sparse, ExpertGLU):
    """`ExpertGLU` on block-sparse products."""
