"""A pytest plugin: the real torch_npu, with kernels on the CPU in place of CANN's.

torch_npu keeps its Python interface, schemas, dispatch, gradients and fake kernels. What would launch a
kernel of CANN's is replaced: torch's operators by those of the CPU, torch_npu's own by the strict ones of
tests/npu. The memory is the host's, see stub_cann.c.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch_npu  # noqa: F401  # the device
from npu_kernels import FORWARD_FOR_GRADIENT, KERNELS
from npu_memory import compute, copy
from torch import Tensor

# These only allocate, or look at sizes and strides, or are made of others.
_KEPT = ("empty", "resize_", "set_", "record_stream", "_pin_memory", "pin_memory", "is_pinned", "_to_copy")

_aten = torch.library.Library("aten", "IMPL")
_npu = torch.library.Library("npu", "IMPL")


def _matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Do for matrices what torch_npu has as one operator, and the CPU for nested tensors only."""
    need_self, need_other = mask
    return grad @ other.mT if need_self else None, self.mT @ grad if need_other else None


def _replace_kernels() -> int:
    replaced = 0
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace != "aten" or packet.startswith(_KEPT):
            continue
        operator: Any = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None or operator.is_view or packet == "matmul_backward":
            continue
        _aten.impl(rest, copy if rest == "copy_" else partial(compute, operator), "PrivateUse1")
        replaced += 1
    _aten.impl("matmul_backward", _matmul_backward, "PrivateUse1")
    for name, kernel in {**KERNELS, **FORWARD_FOR_GRADIENT}.items():
        _npu.impl(name, kernel, "PrivateUse1")
    return replaced


REPLACED = _replace_kernels()
