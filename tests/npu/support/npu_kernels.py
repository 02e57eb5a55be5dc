"""torch_npu's operators that gmm_registry uses: schemas, and kernels that refuse more than the hardware.

What the real ones check stands in CANN's sources (aclnn_grouped_matmul.cpp, aclnn_grouped_matmul_add.cpp) and
documentation. Beyond that these refuse a layout that the real ones would copy first, options that
gmm_registry does not use, and counts that would lead past the end. What the hardware leaves unwritten is NaN.

Shape letters: R rows, E groups, K inner, N outer dimension; T tokens, C choices a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from npu_memory import device, host, is_npu, note
from torch import Tensor
from torch.nn import functional as F

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# As torch_npu 2.13 declares them; tests/npu_wheel compares.
SCHEMAS = (
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, "
    "bool transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0) "
    "-> Tensor(a!)",
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
    "bool padded_mode=False) -> (Tensor, Tensor)",
    "npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, "
    "SymInt tokens_size_0, ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor",
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
    "npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices, "
    "SymInt permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
)


def _check(fine: bool, text: str) -> None:
    if not fine:
        raise RuntimeError(f"simulated kernel: {text}")


def _check_tensors(dtypes: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        _check(is_npu(tensor), f"{name} is on {tensor.device}")
        _check(tensor.dtype in dtypes, f"{name} is {tensor.dtype}")
    _check(len({tensor.dtype for tensor in given.values()}) == 1, f"{', '.join(given)} differ in dtype")


def _read_list(group_list: Tensor | None) -> list[int]:
    """Check a list of counts or ends and read it, as the kernel does on the device."""
    _check(group_list is not None, "group_list is missing")
    assert group_list is not None
    _check(is_npu(group_list), f"group_list is on {group_list.device}")
    _check(group_list.dtype == torch.int64, f"group_list is {group_list.dtype}")
    _check(group_list.dim() == 1 and group_list.is_contiguous(), "group_list is not one packed dimension")
    _check(2 <= len(group_list) <= 1024, f"group_list has {len(group_list)} groups")
    return host(group_list).tolist()  # type: ignore[no-any-return]


def _transposed(tensor: Tensor) -> bool:
    """Decide as CANN's IsTransposeLastTwoDims does; true of 1 x 1."""
    *batch, rows, columns = tensor.shape
    *steps, down, right = tensor.stride()
    return down == 1 and right == rows and (not batch or steps[0] == rows * columns)


def _packed(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (_transposed(tensor) and tensor.mT.is_contiguous())


# --- grouped matmul ----------------------------------------------------------------------------------


def _grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    _check(group_type is not None, "Requires manual passing group_type, current is None.")
    _check(len(x) <= 128 and len(weight) <= 128, "a list of tensors is longer than 128")
    _check(len(x) == len(weight) == 1, "more than one x or weight")
    _check(group_type in (0, 2) and split_item in (2, 3), f"group_type={group_type}, split_item={split_item}")
    _check(group_list_type == 1 and act_type == 0, "group_list holds no counts, or there is an activation")
    _check(all(value is None for value in others.values()), f"not used so far: {others}")
    (left,), (right,) = x, weight
    _check_tensors(_FLOATS, x=left, weight=right)
    counts = _read_list(group_list)
    _check(min(counts) >= 0, f"a count is negative: {counts}")
    _check(_packed(left) and _packed(right), "an operand would be copied first")
    result = (_rows_by_matrix if group_type == 0 else _columns_by_rows)(left, right, counts)
    note("npu::npu_grouped_matmul", "kernel", [left, right, group_list], result.numel())
    return [device(result)]


def _rows_by_matrix(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Multiply (R, K) by (E, K, N) to (R, N)."""
    _check(x.dim() == 2 and weight.dim() == 3, "shapes are not (R, K) and (E, K, N)")
    _check(x.numel() == 1 or not _transposed(x), "x can not be transposed")
    _check(x.shape[1] == weight.shape[1] and len(counts) == weight.shape[0], "shapes do not fit")
    last = x.shape[1], weight.shape[1 if _transposed(weight) else 2]
    _check(max(last) <= 65535, f"inner axes {last}")
    _check(sum(counts) <= x.shape[0], f"{counts} are more than {x.shape[0]} rows")
    out = torch.full((x.shape[0], weight.shape[2]), torch.nan, dtype=x.dtype)
    start = 0
    for count, matrix in zip(counts, host(weight), strict=True):
        rows = slice(start, start + count)
        out[rows] = (host(x)[rows].float() @ matrix.float()).to(x.dtype)
        start += count
    return out


def _columns_by_rows(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Multiply (K, R), transposed, by (R, N), group by group, to (E, K, N)."""
    _check(x.dim() == 2 and weight.dim() == 2, "shapes are not (K, R) and (R, N)")
    _check(_transposed(x), "tensor in x should be transposed")
    _check(not _transposed(weight), "x and weight can not be transposed at the same time")
    _check(x.shape[1] == weight.shape[0], "shapes do not fit")
    last = x.shape[0], weight.shape[1]
    _check(max(last) <= 65535, f"inner axes {last}")
    _check(sum(counts) <= x.shape[1], f"{counts} are more than {x.shape[1]} rows")
    if not x.shape[1]:
        return torch.full((len(counts), *last), torch.nan, dtype=x.dtype)  # nothing is launched
    return _outer_products(host(x), host(weight), counts).to(x.dtype)


def _outer_products(x: Tensor, rows: Tensor, counts: list[int]) -> Tensor:
    used = sum(counts)
    pairs = zip(x[:, :used].split(counts, 1), rows[:used].split(counts), strict=True)
    return torch.stack([left.float() @ right.float() for left, right in pairs])


def _grouped_matmul_add(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """Add x.T @ weight, group by group. The list is of ends, whatever its type: so on Atlas A2 and A3."""
    _check(transpose_x and not transpose_weight and group_type == 2, "only x is transposed, group_type is 2")
    _check_tensors((torch.float16, torch.bfloat16), x=x, weight=weight)
    _check_tensors((torch.float32,), input=input)
    ends = _read_list(group_list)
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    _check(min(counts) >= 0 and ends[-1] <= x.shape[0], f"{ends} are no ends of groups in {x.shape[0]} rows")
    _check(x.is_contiguous() and weight.is_contiguous() and input.is_contiguous(), "an operand is not packed")
    _check(input.shape == (len(ends), x.shape[1], weight.shape[1]), f"input is {tuple(input.shape)}")
    _check(x.shape[0] == weight.shape[0] > 0, "shapes do not fit")
    host(input).add_(_outer_products(host(x).T, host(weight), counts))
    note("npu::npu_grouped_matmul_add_", "kernel", [input, x, weight, group_list], input.numel())
    return input


# --- permute and unpermute ---------------------------------------------------------------------------


def _permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Sort the choices by what ``indices`` say; equal ones in reverse, since no order of them is promised."""
    _check_tensors(_FLOATS, tokens=tokens)
    _check_tensors((torch.int64,), indices=indices)
    _check(num_out_tokens is None and not padded_mode, "not used so far")
    _check(tokens.dim() == indices.dim() == 2 and len(tokens) == len(indices), "shapes do not fit")
    _check(0 < indices.numel() < 2**24 - 1 and indices.shape[1] <= 512, f"indices are {tuple(indices.shape)}")
    keys = host(indices).flatten()
    _check(0 <= int(keys.min()) <= int(keys.max()) < 2**24 - 1, "an index is out of range")
    first = len(keys) - 1 - keys.flip(0).argsort(stable=True)
    note("npu::npu_moe_token_permute", "kernel", [tokens, indices], len(keys) * tokens.shape[1])
    return device(host(tokens)[first // indices.shape[1]]), device(first.argsort().int())


def _permute_grad(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,  # noqa: N803
    padded_mode: bool = False,
) -> Tensor:
    _check_tensors(_FLOATS, grad_permuted_tokens=grad_permuted_tokens)
    _check(tokens_size_0 * num_topK == len(grad_permuted_tokens) and not padded_mode, "shapes do not fit")
    rows = host(grad_permuted_tokens)[_positions(sorted_indices)].float()
    inputs = [grad_permuted_tokens, sorted_indices]
    note("npu::npu_moe_token_permute_grad_v2", "kernel", inputs, tokens_size_0 * rows.shape[1])
    return device(rows.view(tokens_size_0, num_topK, -1).sum(1).to(tokens_dtype))


def _positions(sorted_indices: Tensor) -> Tensor:
    _check_tensors((torch.int32,), sorted_indices=sorted_indices)
    position: Tensor = host(sorted_indices).long()
    every = torch.arange(position.numel())
    _check(position.dim() == 1 and torch.equal(position.sort().values, every), "an index is not there once")
    return position


def _unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """Add up each token's rows; without ``probs`` every row is a token."""
    rows = permuted_tokens
    _check(not padded_mode and restore_shape is None, "not used so far")
    _check_tensors(_FLOATS, permuted_tokens=rows, probs=probs)
    position = _positions(sorted_indices)
    _check(rows.dim() == 2 and rows.numel() > 0 and len(rows) == len(position), "shapes do not fit")
    note("npu::npu_moe_token_unpermute", "kernel", [rows, sorted_indices, probs], rows.numel())
    if probs is None:
        return device(host(rows)[position])
    _check(probs.dim() == 2 and probs.numel() == len(rows) and probs.shape[1] <= 512, "probs do not fit")
    weighted = host(rows)[position].float().view(*probs.shape, -1) * host(probs).float()[..., None]
    return device(weighted.sum(1).to(rows.dtype))


def _unpermute_for_backward(permuted_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _unpermute(permuted_tokens, *args, **kwargs), permuted_tokens


def _unpermute_grad(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    grad = grad_unpermuted_tokens
    _check_tensors(_FLOATS, grad_unpermuted_tokens=grad, probs=probs, permuted_tokens=permuted_tokens)
    _check(probs is not None and permuted_tokens is not None, "not used so far")
    assert probs is not None
    position = _positions(sorted_indices)
    wide = host(grad).float()[:, None]  # (T, 1, H)
    grad_rows = torch.empty(permuted_tokens_size_0, grad.shape[1])
    grad_rows[position] = (wide * host(probs).float()[..., None]).flatten(0, 1)
    rows = host(permuted_tokens)[position].float().view(*probs.shape, -1)
    grad_probs = (rows * wide).sum(-1)
    inputs = [grad, sorted_indices, probs, permuted_tokens]
    note("npu::npu_moe_token_unpermute_grad_v2", "kernel", inputs, grad_rows.numel() + grad_probs.numel())
    return device(grad_rows.to(permuted_tokens_dtype)), device(grad_probs.to(probs.dtype))


# --- SwiGLU ------------------------------------------------------------------------------------------


def _check_swiglu(input: Tensor, dim: int) -> None:
    _check_tensors(_FLOATS, input=input)
    _check(dim == -1, "not used so far")
    _check(input.numel() > 0 and input.is_contiguous() and input.shape[-1] % 2 == 0, "input does not fit")


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    _check_swiglu(input, dim)
    gate, up = host(input).float().chunk(2, -1)
    note("npu::npu_swiglu", "kernel", [input], gate.numel())
    return device((F.silu(gate) * up).to(input.dtype))


def _swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    _check_swiglu(input, dim)
    _check_tensors(_FLOATS, grad_output=grad_output, input=input)
    gate, up = host(input).float().chunk(2, -1)
    grad, share = host(grad_output).float(), gate.sigmoid()
    grad_gate = grad * up * share * (1 + gate * (1 - share))
    note("npu::npu_swiglu_backward", "kernel", [grad_output, input], input.numel())
    return device(torch.cat([grad_gate, grad * gate * share], -1).to(input.dtype))


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_grouped_matmul": _grouped_matmul,
    "npu_grouped_matmul_add_": _grouped_matmul_add,
    "npu_moe_token_permute": _permute,
    "npu_moe_token_permute_grad_v2": _permute_grad,
    "npu_moe_token_unpermute": _unpermute,
    "npu_moe_token_unpermute_grad_v2": _unpermute_grad,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
}
# The real package's own step between `npu_moe_token_unpermute` and its gradient.
FORWARD_FOR_GRADIENT: dict[str, Callable[..., Any]] = {"_npu_moe_token_unpermute": _unpermute_for_backward}
