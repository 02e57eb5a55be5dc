"""A device named ``npu``, simulated on the CPU; whoever imports this has it for the whole process.

Its tensors are plain ``torch.Tensor`` under the dispatch key PrivateUse1, as those of the real device are.
So torch's own dispatcher, autograd, fake tensors and compiler work on them. New memory is NaN. CPU tensors
beside the device's are refused, also where the real device would move them.

SIM_NPU_DEVICES=0 in the environment: the package is there, the device is not.
"""

from __future__ import annotations

import os
from functools import partial
from types import ModuleType
from typing import Any

import torch
from npu_memory import compute, copy, is_npu
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

DEVICES = int(os.environ.get("SIM_NPU_DEVICES", "1"))
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return DEVICES > 0


def _module() -> ModuleType:
    module: Any = ModuleType("torch.npu")
    module.is_available = lambda: DEVICES > 0
    module.device_count = lambda: DEVICES
    module.current_device = lambda: 0
    module.is_initialized = lambda: True
    module.synchronize = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module._is_in_bad_fork = lambda: False
    return module


_setup_privateuseone_for_python_backend("npu", backend_module=_module(), hook=_Hook())
torch._C._accelerator_synchronizeDevice = lambda index: None  # what a guard of Python's cannot answer
_DEVICE = torch.device("npu", 0)

# What lies under each of the device's storages, which do not own their memory.
_owners: list[tuple[StorageWeakRef, torch.UntypedStorage]] = []
_sweep_at = 256


def _give_memory(target: Tensor, layout: Tensor) -> Tensor:
    """Let a tensor of the device lie where a new CPU tensor lies, and as that does."""
    global _sweep_at
    memory = layout.untyped_storage()
    memory.fill_(255)  # NaN in every floating-point type
    taken = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), _DEVICE, memory.nbytes())
    _owners.append((StorageWeakRef(taken), memory))
    if len(_owners) > _sweep_at:
        _owners[:] = [owned for owned in _owners if not owned[0].expired()]
        _sweep_at = 2 * len(_owners) + 256
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(  # type: ignore[no-any-return]
        _CPU_KERNEL, target, taken, 0, layout.shape, layout.stride()
    )


def _empty(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    layout = torch.empty(size, dtype=dtype)
    return _give_memory(torch._C._acc.create_empty_tensor((0,), layout.dtype), layout)


def _empty_strided(
    size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    layout = torch.empty_strided(size, stride, dtype=dtype)
    return _give_memory(torch._C._acc.create_empty_tensor((0,), layout.dtype), layout)


def _resize(tensor: Tensor, size: list[int], memory_format: Any = None) -> Tensor:
    if list(tensor.shape) != list(size):
        _give_memory(tensor, torch.empty(size, dtype=tensor.dtype))
    return tensor


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return copy(target, source, non_blocking)


def _any_other(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run whatever has no kernel above; torch's kernels for views only look at sizes and strides."""
    if op.is_view or op.name().startswith("aten::set_"):
        return op.redispatch(_CPU_KERNEL, *args, **kwargs)
    return compute(op, *args, **kwargs)


def _in_lower_precision(op: Any, *args: Any) -> Any:
    """Do what autocast does to a product."""

    def cast(value: Any) -> Any:
        return value.to(torch.get_autocast_dtype("npu")) if is_npu(value) else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return op(*map(cast, args))


_all = torch.library.Library("_", "IMPL")
_all.fallback(_any_other, "PrivateUse1")
_all.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
for _name, _kernel in {
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
}.items():
    _aten.impl(_name, _kernel, "PrivateUse1")
for _op in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default):
    _aten.impl(_op, partial(_in_lower_precision, _op), "AutocastPrivateUse1")
