"""The two losses of a router, and who collects them from the layers of a model.

Shape letters: T tokens, K choices a token, E experts.
"""

from __future__ import annotations

import warnings
from contextvars import ContextVar, Token
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gmm_registry.layers.arguments import Arguments

if TYPE_CHECKING:
    from typing_extensions import Self

    from gmm_registry.layers.router import Routing


def load_balancing_loss(counts: Tensor, scores: Tensor, top_k: int) -> Tensor:
    """Measure how unevenly the experts are used: ``E / (T * K) * dot(counts, mean score of each expert)``.

    1 when tokens or scores are spread evenly, whatever K is (transformers 43775); E / K at worst.

    Args:
        counts: tokens of each expert, (E,) int64.
        scores: (T, E); a row must sum to 1, so sigmoid scores are to be divided by their sum first.
        top_k: K.

    Returns:
        scalar of the scores' dtype, before any coefficient; 0 without tokens.

    Source: Fedus et al., Switch Transformers (2021), equations 4 to 6; MegaBlocks' `load_balancing_loss`.
    """
    tokens, experts = scores.shape
    if counts.shape != (experts,):
        raise ValueError(
            f"counts must be ({experts},) for scores {tuple(scores.shape)}, got {tuple(counts.shape)}"
        )
    shares = scores.sum(0) / max(tokens, 1)
    return experts / (max(tokens, 1) * top_k) * torch.dot(counts.to(scores.dtype), shares)


def router_z_loss(logits: Tensor) -> Tensor:
    """Measure how large the logits (T, E) are: the mean over tokens of ``logsumexp(logits) ** 2``.

    Returns:
        fp32 scalar, before any coefficient; 0 without tokens.

    Source: Zoph et al., ST-MoE (2022), equation 5.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """What one layer's forward left for the losses, with its graph."""

    scores: Tensor  # (T, E)
    logits: Tensor  # (T, E)
    counts: Tensor  # (E,) int64
    args: Arguments

    def load_balancing(self) -> Tensor:
        """Compute `load_balancing_loss`, on scores that sum to 1 for each token."""
        scores = self.scores
        if self.args.moe_router_score == "sigmoid":
            # As DeepSeek-V3 does, arXiv 2412.19437, equations 17 to 20.
            scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        return load_balancing_loss(self.counts, scores, self.args.moe_top_k)

    def z_loss(self) -> Tensor:
        """Compute `router_z_loss`."""
        return router_z_loss(self.logits)

    def total(self) -> Tensor:
        """Add up both, each with the layer's coefficient."""
        total = self.scores.new_zeros(())
        if self.args.moe_loss_weight:
            total = total + self.args.moe_loss_weight * self.load_balancing()
        if self.args.moe_zloss_weight:
            total = total + self.args.moe_zloss_weight * self.z_loss()
        return total


class LossCollector:
    """Collect the routers' losses from every MoE layer that runs in training mode inside the block.

    It belongs to the thread or task that opened the block; of two nested ones the inner collects. A forward
    that only recomputes (activation checkpointing) is not collected again. Each block starts empty. Under
    torch.compile a layer inside the block breaks the graph.

    Args:
        num_layers: divide by this many instead of by the layers that ran. Under pipeline parallelism give
            the whole model's number: the stages' losses then add up to the model's.

    >>> from gmm_registry.layers import dMoE
    >>> model = dMoE(Arguments(hidden_size=8, ffn_hidden_size=16, moe_num_experts=4, dtype=torch.float32))
    >>> with LossCollector() as losses:
    ...     _ = model(torch.randn(6, 8))
    >>> losses.total().backward()
    >>> bool(model.router.layer.weight.grad.any())
    True
    """

    def __init__(self, num_layers: int | None = None) -> None:
        self._num_layers = num_layers
        self._records: list[LayerRecord] = []
        self._tokens: list[Token[LossCollector | None]] = []

    def __enter__(self) -> Self:
        self._records = []
        self._tokens.append(_collector.set(self))
        _count_open(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _count_open(-1)
        _collector.reset(self._tokens.pop())

    @property
    def records(self) -> tuple[LayerRecord, ...]:
        """What was collected, in the order in which the layers ran."""
        return tuple(self._records)

    def load_balancing(self) -> Tensor:
        """Average `load_balancing_loss` over the layers, without coefficients; 0 if none ran."""
        return self._mean([record.load_balancing() for record in self._records])

    def z_loss(self) -> Tensor:
        """Average `router_z_loss` over the layers, without coefficients; 0 if none ran."""
        return self._mean([record.z_loss() for record in self._records])

    def total(self) -> Tensor:
        """Average over the layers the sum of both losses, each times its coefficient; 0 if none ran.

        The coefficients are each layer's ``moe_loss_weight`` and ``moe_zloss_weight``.
        """
        return self._mean([record.total() for record in self._records])

    def _mean(self, values: list[Tensor]) -> Tensor:
        if not values:
            return torch.zeros(())
        return torch.stack(values).sum() / (self._num_layers or len(values))


_collector: ContextVar[LossCollector | None] = ContextVar("gmm_registry_loss_collector", default=None)
# How many blocks are open on any thread. torch.compile guards on a module global, but cannot read a context
# variable, and a model compiled without a collector shall stay one graph.
_open = 0
_lock = Lock()


def _count_open(change: int) -> None:
    global _open
    with _lock:
        _open += change


def record(routing: Routing, counts: Tensor, args: Arguments) -> None:
    """Hand what a layer computed to the collector whose block is open, if there is one.

    A layer calls this in training mode only.

    Args:
        routing: of the layer's tokens, with gradients.
        counts: tokens of each expert, (E,) int64.
        args: the layer's options.
    """
    if not _open:
        return
    collector = _collector.get()
    # Inside a backward pass a forward can only be a recomputation: torch.utils.checkpoint itself tells by
    # this id that it is in one.
    if collector is None or torch._C._current_graph_task_id() != -1:
        return
    if not torch.is_grad_enabled():
        warnings.warn(
            "an MoE layer ran in training mode without gradients, so its losses have none: under reentrant "
            "activation checkpointing use checkpoint(..., use_reentrant=False)",
            stacklevel=2,
        )
    collector._records.append(LayerRecord(routing.scores, routing.logits, counts, args))
