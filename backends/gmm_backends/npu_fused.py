"""npu.npu_fused: torch_npu's grouped matmul, on Ascend NPUs.

The operator sees by its strides that an operand is transposed, and multiplies it where it lies.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gmm_backends._out import deliver
from gmm_backends._refusals import not_importable, other_dtype
from gmm_backends.npu_companions import NpuCompanions
from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_GROUPS = 1024
_WIDEST = 65535  # the last dimension of an operand, and forward and backward have K and N there


class NpuFused(NpuCompanions, GroupedMatmulBackend):
    """npu_grouped_matmul, for the product and for both gradients."""

    def rejections(self, problem: Problem) -> list[str]:
        if problem.device != "npu":
            return [f"torch_npu computes on npu, not on {problem.device}"]
        reasons = [*self._missing, *other_dtype(problem, "npu_grouped_matmul", _DTYPES)]
        if problem.groups > _MOST_GROUPS:
            reasons.append(f"{problem.groups} groups; npu_grouped_matmul takes at most {_MOST_GROUPS}")
        if problem.groups != 1:
            widths = dict.fromkeys((problem.k, problem.n))
            wide = [width for width in widths if width > _WIDEST]
            reasons += [f"inner or outer dimension {width}; it takes at most {_WIDEST}" for width in wide]
            if problem.rows == 1 and 1 in widths:
                reasons.append("one row of width 1; npu_grouped_matmul takes a 1 x 1 operand for transposed")
        return reasons

    @cached_property
    def _missing(self) -> list[str]:
        """What is wrong with torch_npu, which is imported here; found once for each instance."""
        install = "pip install 'gmm_registry[npu]'"
        if missing := not_importable("torch_npu", install, "is CANN's set_env.sh sourced?"):
            return missing
        operator = getattr(torch.ops.npu, "npu_grouped_matmul", None)
        # Builds of one version differ, so the operator itself is asked what it takes.
        if operator is None or "group_list_type" not in str(operator.default._schema):
            return [f"this torch_npu has no npu_grouped_matmul with group_list_type, update it: {install}"]
        return []

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch_sizes: BatchSizes,
        *,
        trans_b: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        import torch_npu

        counts = _counts(batch_sizes, x.device)
        if trans_b:
            weight = weight.transpose(1, 2)  # a view
        if len(counts) == 1:  # its documentation excludes lists of one count
            return torch.matmul(x, weight[0], out=out)
        product: Tensor = torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )[0]
        return deliver(product, out)

    def weight_grad(
        self,
        x: Tensor,
        grad_out: Tensor,
        batch_sizes: BatchSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        import torch_npu

        counts = _counts(batch_sizes, x.device)
        if len(counts) == 1:
            product = torch.matmul(x.T, grad_out)[None]
        elif not x.shape[0]:  # it would launch nothing, and return what is in memory
            product = x.new_zeros(len(counts), x.shape[1], grad_out.shape[1])
        elif accumulate and out is not None and _adds_to(out, x):
            # Atlas A2 and A3 take ends, whatever its argument group_list_type says.
            torch_npu.npu_grouped_matmul_add_(out, x, grad_out, counts.cumsum(0))
            return out
        else:
            product = torch_npu.npu_grouped_matmul(
                [x.T], [grad_out], group_list=counts, split_item=3, group_type=2, group_list_type=1
            )[0]
        return deliver(product, out, accumulate)


def _counts(batch_sizes: BatchSizes, device: torch.device) -> Tensor:
    """Return the counts on the device, after the host saw them: rows left out would stay unwritten."""
    _ = batch_sizes.host  # waits, once a layer, for counts that were made on the device
    return batch_sizes.on(device)


def _adds_to(out: Tensor, x: Tensor) -> bool:
    """Say whether npu_grouped_matmul_add_ takes these: half precision, added to packed fp32."""
    half = x.dtype != torch.float32 and out.dtype == torch.float32
    return half and out.is_contiguous() and hasattr(torch.ops.npu, "npu_grouped_matmul_add_")
