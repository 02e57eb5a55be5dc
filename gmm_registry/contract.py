"""The contract: what a grouped matmul takes and gives, and what a backend must offer.

Shape letters: R rows, E groups (experts), K inner and N outer dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from gmm_registry.batch_sizes import BatchSizes
from gmm_registry.block_sparse import BLOCK, BlockSparseProducts, Topology

__all__ = [
    "BLOCK",
    "Accepted",
    "BackendKey",
    "BatchSizes",
    "BlockSparseProducts",
    "Companions",
    "Direction",
    "GroupedMatmulBackend",
    "Problem",
    "Rejected",
    "Topology",
    "Verdict",
    "autocast",
    "dtype_name",
    "prepare",
]


class BackendKey(NamedTuple):
    """Name a backend: the device type it serves (``any``: wherever torch runs) and its implementation."""

    device: str
    impl: str

    @classmethod
    def parse(cls, text: str) -> BackendKey:
        """Read ``device.impl``; raise ValueError for anything else."""
        device, dot, impl = text.partition(".")
        if not (device and dot and impl):
            raise ValueError(f"{text!r} is not of the form 'device.impl'")
        return cls(device, impl)

    def __str__(self) -> str:
        return f"{self.device}.{self.impl}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as files and reports do: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


Direction: TypeAlias = Literal["forward", "grad_x", "grad_w"]


@dataclass(frozen=True)
class Problem:
    """Describe one grouped matmul, as far as choosing a backend needs it.

    The weight is (groups, k, n) as it lies in memory, row-major. ``direction`` says which product with it is
    meant: rows (R, k) by it ("forward"), rows (R, n) by its transpose ("grad_x", and so a forward with
    ``trans_b``), or rows by rows ("grad_w"). ``skew`` tells how unequal the groups are. A backend may rank
    itself by these two in `priority`. What `rejections` answers must hold for all of them: it is asked about
    "forward" only, and not told the skew.
    """

    device: str  # device type: "cuda"
    index: int | None  # which of them; None: the current one
    dtype: torch.dtype
    rows: int
    groups: int
    k: int
    n: int
    direction: Direction = "forward"
    skew: int | None = None  # as `BatchSizes.skew`

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes | Tensor | Iterable[int] | None = None,
        trans_b: bool = False,
    ) -> Problem:
        """Describe the call ``gmm(x, weight, batch_sizes, trans_b)``, under autocast if that is on.

        Without ``batch_sizes`` the skew is not known, as it is not for counts from the device.

        Raises:
            ValueError: x is not (R, K) or weight not three-dimensional, or the counts are none.
            TypeError: their dtypes differ.
        """
        x, weight, sizes, trans_b = prepare(x, weight, () if batch_sizes is None else batch_sizes, trans_b)
        if x.dim() != 2 or weight.dim() != 3:
            raise ValueError(
                f"x must be (R, K) and weight (E, K, N), got {tuple(x.shape)} and {tuple(weight.shape)}"
            )
        if x.dtype != weight.dtype:
            raise TypeError(f"x is {x.dtype}, but weight is {weight.dtype}")
        groups, k, n = weight.shape
        direction: Direction = "grad_x" if trans_b else "forward"
        skew = None if batch_sizes is None else sizes.skew
        return cls(x.device.type, x.device.index, x.dtype, x.shape[0], groups, k, n, direction, skew)

    def __str__(self) -> str:
        where = self.device if self.index is None else f"{self.device}:{self.index}"
        weight = f"({self.groups}, {self.k}, {self.n})"
        what = f"{dtype_name(self.dtype)}, {self.rows} rows, weight {weight} on {where}"
        return what if self.direction == "forward" else f"{what}, {self.direction}"


@dataclass(frozen=True)
class Accepted:
    """A backend that takes the problem, and how it ranks: the highest priority is chosen."""

    key: BackendKey
    priority: int


@dataclass(frozen=True)
class Rejected:
    """A backend that does not take the problem, and every reason why."""

    key: BackendKey
    priority: int
    reasons: tuple[str, ...]


Verdict: TypeAlias = Accepted | Rejected


def _row_major(weight: Tensor, trans_b: bool) -> tuple[Tensor, bool]:
    """See a transposed weight as what lies in memory, so that no backend has to copy it."""
    if weight.dim() == 3 and weight.mT.is_contiguous():
        return weight.mT, not trans_b
    return weight, trans_b


def prepare(
    x: Tensor, weight: Tensor, batch_sizes: BatchSizes | Tensor | Iterable[int], trans_b: bool
) -> tuple[Tensor, Tensor, BatchSizes, bool]:
    """Turn the arguments of a user's call into those of the torch operator."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        raise TypeError(f"x and weight must be tensors, not {type(x).__name__} and {type(weight).__name__}")
    if not isinstance(trans_b, bool):
        raise TypeError(f"trans_b must be a bool, not {type(trans_b).__name__} {trans_b!r}")
    if torch._C._is_any_autocast_enabled():  # quicker than asking for the device's
        x, weight = autocast(x), autocast(weight)
    if not weight.is_contiguous():
        weight, trans_b = _row_major(weight, trans_b)
    return x, weight, BatchSizes.of(batch_sizes), trans_b


def autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast, if it is on, does for torch.matmul: every floating type but fp64."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64 and _autocasts(tensor):
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))
    return tensor


def _autocasts(tensor: Tensor) -> bool:
    device = tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)  # torch raises for meta


class GroupedMatmulBackend(ABC):
    """Implement this class to add a backend; offer it under an entry point named ``device.impl``.

    The registry makes one instance for each device type that the backend serves. Core validates,
    differentiates and casts; `forward` and `weight_grad` receive checked, contiguous, non-empty tensors
    of one dtype on one device, that of a `Problem` for which `rejections` was empty.
    """

    key: BackendKey
    device: str

    def bind(self, key: BackendKey, device: str) -> GroupedMatmulBackend:
        """Tell the instance its name and the device type it serves; the registry does this."""
        self.key, self.device = key, device
        return self

    def __repr__(self) -> str:
        bound = f"{self.key} on {self.device}" if hasattr(self, "key") else "not bound"
        return f"<{type(self).__name__}: {bound}>"

    @property
    def impl(self) -> str:
        """The implementation's name, the second half of the key."""
        return self.key.impl

    @abstractmethod
    def rejections(self, problem: Problem) -> list[str]:
        """Say why this backend cannot do ``problem``, forward and backward; an empty list means it can.

        State the fact and the need in each reason ("compute capability 8.0 < 9.0"). Do not raise, and
        import no more than the answer needs. The answer is cached per problem.
        """

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply each group's rows with its matrix.

        Args:
            x: (R, K).
            weight: (E, K, N), or (E, N, K) with ``trans_b``.
            out: (R, N) of any strides, written in place and returned, if given.

        Returns:
            (R, N), the dtype of x.
        """

    @abstractmethod
    def weight_grad(
        self,
        x: Tensor,
        grad_out: Tensor,
        batch_sizes: BatchSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Give ``x_e.T @ grad_out_e`` for each group, exactly zero for an empty one.

        Args:
            x: (R, K).
            grad_out: (R, N).
            out: (E, K, N) of the dtype of x or fp32 (a Megatron-style ``main_grad``), of any strides,
                written in place and returned, if given.
            accumulate: add to ``out`` instead of overwriting it.

        Returns:
            (E, K, N).
        """

    def priority(self, problem: Problem) -> int:
        """Rank this backend among those that accept ``problem``; the highest is chosen.

        The loop over groups has 0 and torch's own grouped_mm 10; a backend made for one device
        keeps 50 unless a measurement says otherwise.
        """
        return 50

    def gmm(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes | Tensor | Iterable[int],
        trans_b: bool = False,
    ) -> Tensor:
        """Do `gmm_registry.gmm` on this backend: checked and differentiable.

        Raises:
            ValueError: x is not on the device this backend is bound to.
            BackendUnavailableError: the backend refuses this problem.
        """
        x, weight, sizes, trans_b = prepare(x, weight, batch_sizes, trans_b)
        if x.device.type != self.device:
            raise ValueError(
                f"{self.key} is bound to {self.device}, but x is on {x.device}: "
                f"use get_backend({x.device.type!r}, {self.impl!r})"
            )
        operator = torch.ops.gmm_registry.gmm.default
        return cast(Tensor, operator(x, weight, sizes.counts, trans_b, str(self.key)))


class Companions:
    """The steps around the products of an MoE layer, as kernels; a backend that has them derives from this.

    The layers call them where their first product runs on this backend, but not in compiled code. There is no
    padding, no choice is dropped, and no tensor is empty. What is returned may be written to.
    Each step is differentiable once, by torch's autograd; a second derivative is right, or raises.
    `unpermute` may use the weights in the dtype of the rows, where `gmm_registry.layers.unpermute` uses fp32.

    Shape letters: T tokens, C choices a token, R = T * C rows, H hidden, F expert width.
    """

    @abstractmethod
    def companion_rejections(self, tokens: int, choices: int) -> list[str]:
        """Say why this cannot be done for so many, as `GroupedMatmulBackend.rejections` does.

        It is asked at every call of a layer, for all three steps.
        """

    @abstractmethod
    def permute(self, x: Tensor, slot_row: Tensor) -> Tensor:
        """Copy tokens to their rows.

        Args:
            x: (T, H).
            slot_row: the row of each choice, (T, C) int64: every number below R once.

        Returns:
            (R, H).
        """

    @abstractmethod
    def unpermute(self, rows: Tensor, slot_row: Tensor, weights: Tensor | None = None) -> Tensor:
        """Add up each token's rows, each times its weight.

        Args:
            rows: (R, H).
            slot_row: as in `permute`.
            weights: (T, C); None: all 1.

        Returns:
            (T, H).
        """

    @abstractmethod
    def glu(self, gate_up: Tensor) -> Tensor:
        """Give ``silu(gate) * up``, (R, F), for rows that hold both, (R, 2 F), the gate first."""
