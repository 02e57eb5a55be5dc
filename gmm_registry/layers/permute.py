"""Take tokens to rows that are sorted by expert, and weighted rows back to tokens.

Shape letters: T tokens, K choices a token, E experts, H hidden, R rows: T * K, and more where each expert's
rows are padded to whole blocks, fewer where choices belong to somebody else's experts.

Three functions on the same indices are each other's derivatives, so all of them can be differentiated again:
    permute  rows[r] = weight of r * x[token of r]            (R, H)
    combine  out[t] = sum over k of weights[t, k] * rows[row of (t, k)]   (T, H)
    dot      dots[t, k] = <rows[row of (t, k)], x[t]>         (T, K)
They only gather with ``x[index]``: no atomics, so the same input gives the same bits, and no index_select,
whose backward fails on Ascend NPUs. A value that is not there (padding, a foreign choice) is masked, never
multiplied by 0: what lies in its place may be NaN (transformers 48205). Offsets are torch's, 64 bits wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gmm_registry.contract import BatchSizes, Companions
from gmm_registry.layers.router import count_sorted

_GATHERED = 2**26  # numbers gathered at once, 128 MiB in bf16


@dataclass(frozen=True, eq=False)
class Permutation:
    """Say which (token, choice) each row holds, and where each went. Indices are int64, on one device."""

    token: Tensor  # (R,): the token of each row; -1 in padding
    slot: Tensor  # (R,): the (token, choice) of each row, as token * K + choice; -1 in padding
    slot_row: Tensor  # (T, K): the row where each (token, choice) went; -1 if it was dropped
    batch_sizes: BatchSizes  # real rows of each expert, (E,)
    row_counts: BatchSizes  # rows of each expert with padding, (E,); without padding the same object
    foreign: bool  # whether choices may have been dropped

    @property
    def rows(self) -> int:
        """R, with padding."""
        return self.token.shape[0]

    @property
    def padded(self) -> bool:
        """Whether each expert's rows were filled up to a multiple of a block."""
        return self.row_counts is not self.batch_sizes

    @property
    def padded_counts(self) -> Tensor:
        """Rows of each expert with padding, (E,) int64 on the CPU. Waits for the device without padding."""
        return self.row_counts.host

    def per_row(self, weights: Tensor) -> Tensor:
        """Sort one number a choice (T, K) to one a row (R,); 0 in padding."""
        return _per_row(weights, self.slot, self.padded)

    def per_choice(self, values: Tensor) -> Tensor:
        """Bring one number a row (R,) back to its choice (T, K); 0 where it was dropped."""
        return _per_choice(values, self.slot_row, self.foreign)


def sort_by_expert(
    experts: Tensor, num_experts: int, *, block: int = 1, foreign: bool = False
) -> Permutation:
    """Sort the choices by expert; those of one expert stay in order.

    With the defaults nothing waits for the device and no number leaves it. Padding and foreign ids decide how
    many rows there are, so each of them brings the counts to the host, once.

    Args:
        experts: ids from 0 to E - 1, (T, K) integers.
        num_experts: E.
        block: fill each expert's rows up to a multiple of this.
        foreign: drop every choice whose id is not from 0 to E - 1, as another rank's; without it such an id
            is an error.

    Raises:
        ValueError: the shape or ``block`` does not fit, or an id is not from 0 to E - 1. Where the host sees
            no counts, such an id is found by `gmm`: the counts do not sum to R.
        TypeError: the ids are not integers.

    >>> permutation = sort_by_expert(torch.tensor([[1, 0], [1, 2]]), 3)
    >>> permutation.token.tolist(), permutation.slot_row.tolist(), permutation.batch_sizes
    ([0, 0, 1, 1], [[1, 0], [2, 3]], BatchSizes([1, 2, 1]))
    """
    _check_experts(experts, block)
    ids = experts.flatten()
    if foreign:
        ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    ordered, slot = ids.sort(stable=True)
    counts = count_sorted(ordered, num_experts)
    sizes = row_counts = BatchSizes(counts) if counts.is_cpu else BatchSizes.from_device(counts)
    if (counts.is_cpu or block > 1) and not foreign and not torch.compiler.is_compiling():
        _check_range(ids, sizes.host)
    kept = int(sizes.host.sum()) if foreign else len(ids)
    slot, row = slot[:kept], torch.arange(kept, device=ids.device)
    held = slot  # by each row
    if block > 1:
        row_counts = BatchSizes(_round_up(sizes.host, block))
        padding = _round_up(counts, block) - counts
        before = padding.cumsum(0) - padding  # rows of padding before each expert
        row = row + before[ordered[:kept].long()]
        held = torch.full((int(row_counts.host.sum()),), -1, device=ids.device)
        held[row] = slot
    slot_row = torch.full_like(ids, -1, dtype=torch.int64)
    slot_row[slot] = row
    token = held.div(experts.shape[1], rounding_mode="floor")
    return Permutation(token, held, slot_row.view(experts.shape), sizes, row_counts, foreign)


def _round_up(counts: Tensor, block: int) -> Tensor:
    return (counts + (block - 1)) // block * block


def _check_experts(experts: Tensor, block: int) -> None:
    if experts.dim() != 2:
        raise ValueError(f"experts must be (T, K), got shape {tuple(experts.shape)}")
    if experts.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"experts are {experts.dtype}; they must be torch.int64 or torch.int32")
    if block < 1:
        raise ValueError(f"block={block} must be at least 1")


def _check_range(ids: Tensor, counts: Tensor) -> None:
    """Raise ValueError for an id that no expert has; every other id was counted."""
    if counts.sum() != len(ids):
        last = len(counts) - 1
        wrong = ids[(ids < 0) | (ids > last)][0]
        raise ValueError(
            f"expert id {wrong} is not from 0 to {last}; foreign=True drops the ids of other ranks' experts"
        )


def permute(x: Tensor, permutation: Permutation, *, companions: Companions | None = None) -> Tensor:
    """Copy tokens to their rows.

    Args:
        x: (T, H).
        permutation: from `sort_by_expert`.
        companions: a backend with a kernel for this, which takes no padding and no foreign ids; None: torch.

    Returns:
        (R, H), the dtype of x; 0 in padding. The gradient of a token is the sum over its rows, taken in fp32.

    Raises:
        ValueError: x is not (T, H) for the T of the permutation, or the companions do not take it.
    """
    tokens = permutation.slot_row.shape[0]
    if x.dim() != 2 or x.shape[0] != tokens:
        raise ValueError(f"x must be (T, H) with T = {tokens}, got shape {tuple(x.shape)}")
    if companions is not None:
        return companions.permute(x, _every_row(permutation))
    return _apply(_Permute, x, None, *_indices(permutation))


def unpermute(
    rows: Tensor,
    permutation: Permutation,
    weights: Tensor | None = None,
    *,
    companions: Companions | None = None,
) -> Tensor:
    """Add up each token's rows, each times its weight.

    The sum is taken in fp32, with weights in the order of k, and rounded once. Padding is not read. How
    companions add up is theirs to say.

    Args:
        rows: (R, H).
        permutation: from `sort_by_expert`.
        weights: (T, K), used in fp32; None: all 1.
        companions: as in `permute`.

    Returns:
        (T, H), the dtype of rows; 0 for a token all of whose choices were dropped.

    Raises:
        ValueError: rows are not the R of the permutation, or weights not its (T, K), or the companions do
            not take it.
    """
    if rows.dim() != 2 or rows.shape[0] != permutation.rows:
        raise ValueError(
            f"rows must be (R, H) with R = {permutation.rows}, padding included, "
            f"got shape {tuple(rows.shape)}"
        )
    if weights is not None and weights.shape != permutation.slot_row.shape:
        raise ValueError(
            f"weights must be (T, K) = {tuple(permutation.slot_row.shape)}, got shape {tuple(weights.shape)}"
        )
    if companions is not None:
        return companions.unpermute(rows, _every_row(permutation), weights)
    if weights is not None:
        weights = weights.to(_wide(rows))
    return _apply(_Combine, rows, weights, *_indices(permutation))


def _every_row(permutation: Permutation) -> Tensor:
    """Return the row of each choice for companions, which trust that every row is there once."""
    if permutation.padded or permutation.foreign:
        raise ValueError("companions take no padding and no foreign ids: leave them out")
    return permutation.slot_row


def _indices(permutation: Permutation) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
    """Take apart what the functions below need, since autograd and torch.compile see tensors only."""
    p = permutation
    return p.token, p.slot, p.slot_row, p.padded, p.foreign


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


def _derivative(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call a function inside a backward; differentiably only where a second derivative may be asked for.

    The compiler never asks for one, and does not trace every function inside a function's backward.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _apply(function, *args)
    return cast(Tensor, function.forward(*args))


def _result(tensor: Tensor) -> Tensor:
    """Return from a function's forward what the last operation may not have made.

    That operation may have worked in place or been a cast to the same dtype. The compiler of torch 2.11 then
    makes gradients of 0. The copy is fused away.
    """
    return tensor.clone() if torch.compiler.is_compiling() else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype to accumulate in: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _per_row(weights: Tensor, slot: Tensor, padded: bool) -> Tensor:
    if not padded:
        return weights.flatten()[slot]
    return weights.flatten()[slot.clamp(min=0)].masked_fill(slot < 0, 0)


def _per_choice(values: Tensor, slot_row: Tensor, foreign: bool) -> Tensor:
    if not foreign:
        return values[slot_row]
    if not values.shape[0]:
        return values.new_zeros(slot_row.shape)
    return values[slot_row.clamp(min=0)].masked_fill(slot_row < 0, 0)


def _take(rows: Tensor, row: Tensor, foreign: bool) -> Tensor:
    """Gather rows (..., H) by their numbers (...); 0 for a choice that was dropped."""
    if not foreign:
        return rows[row]
    return rows[row.clamp(min=0)].masked_fill_((row < 0)[..., None], 0)


def _by_choice(per_choice: Tensor) -> tuple[Tensor, ...]:
    """Split (T, K) into K times (T,), each contiguous: torch gathers faster by such an index."""
    return per_choice.T.contiguous().unbind()


def _parts(slot_row: Tensor, hidden: int) -> tuple[Tensor, ...]:
    """Split the tokens, so that what is gathered for each part stays small beside all rows."""
    if torch.compiler.is_compiling():
        return (slot_row,)  # else the graph would hold for this number of parts only
    tokens = _GATHERED // max(1, slot_row.shape[1] * hidden)
    return cast(tuple[Tensor, ...], slot_row.split(max(1, tokens)))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weights: Tensor | None,
        token: Tensor,
        slot: Tensor,
        slot_row: Tensor,
        padded: bool,
        foreign: bool,
    ) -> Tensor:
        rows = x[token.clamp(min=0)] if padded else x[token]
        if weights is not None:
            rows *= _per_row(weights, slot, padded)[:, None]  # in fp32, rounded once to the dtype of x
        if padded:
            rows.masked_fill_((token < 0)[:, None], 0)
        return _result(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, *indices = _saved(ctx)
        grad_x = _derivative(_Combine, grad_rows, weights, *indices) if ctx.needs_input_grad[0] else None
        grad_weights = _derivative(_Dot, grad_rows, x, *indices) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weights, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        rows: Tensor,
        weights: Tensor | None,
        token: Tensor,
        slot: Tensor,
        slot_row: Tensor,
        padded: bool,
        foreign: bool,
    ) -> Tensor:
        tokens, hidden, dtype = slot_row.shape[0], rows.shape[1], _wide(rows)
        if not rows.shape[0]:
            return rows.new_zeros(tokens, hidden)
        if weights is None:
            parts = _parts(slot_row, hidden)
            sums = [_take(rows, part, foreign).sum(1, dtype=dtype).to(rows.dtype) for part in parts]
            return torch.cat(sums)
        if foreign:
            weights = weights.masked_fill(slot_row < 0, 0)
        total = rows.new_zeros(tokens, hidden, dtype=dtype)
        for row, weight in zip(_by_choice(slot_row), _by_choice(weights), strict=True):
            total.addcmul_(_take(rows, row, foreign), weight[:, None])
        return _result(total.to(rows.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, *indices = _saved(ctx)
        grad_rows = _derivative(_Permute, grad_out, weights, *indices) if ctx.needs_input_grad[0] else None
        grad_weights = _derivative(_Dot, rows, grad_out, *indices) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weights, None, None, None, None, None


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(
        rows: Tensor,
        x: Tensor,
        token: Tensor,
        slot: Tensor,
        slot_row: Tensor,
        padded: bool,
        foreign: bool,
    ) -> Tensor:
        dtype = _wide(rows)
        if not rows.shape[0]:
            return rows.new_zeros(slot_row.shape, dtype=dtype)
        wide = x.to(dtype)
        dots = [(_take(rows, row, foreign) * wide).sum(-1) for row in _by_choice(slot_row)]
        result = torch.stack(dots, dim=1)
        return result.masked_fill(slot_row < 0, 0) if foreign else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_dots: Tensor) -> tuple[Tensor | None, ...]:
        rows, x, *indices = _saved(ctx)
        grad_rows = _derivative(_Permute, x, grad_dots, *indices) if ctx.needs_input_grad[0] else None
        grad_x = _derivative(_Combine, rows, grad_dots, *indices) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_x, None, None, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """Keep of two operands those that a gradient needs, the other's, and the indices."""
    left, right, token, slot, slot_row, ctx.padded, ctx.foreign = inputs
    need_left, need_right = ctx.needs_input_grad[:2]
    ctx.save_for_backward(left if need_right else None, right if need_left else None, token, slot, slot_row)


def _saved(ctx: Any) -> tuple[Any, ...]:
    return *ctx.saved_tensors, ctx.padded, ctx.foreign
