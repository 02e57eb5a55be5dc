"""Memory of a device that is host memory in truth: how the CPU gets at it, and a log of what happened there.

It serves the simulated device, and the real torch_npu on stubbed CANN libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_WAITING = {  # the host must know their result, or its shape
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::unique_dim",
}


@dataclass(frozen=True)
class Event:
    """An operator that ran on the device, or a copy across its border."""

    name: str
    kind: str  # "kernel", "to device", "to host"
    read: frozenset[int]  # where the memory of its inputs begins
    numbers: int  # elements of its results, or of what crossed
    non_blocking: bool = False  # whether a copy was asked for that nobody waits for


@dataclass
class Log:
    """What happened while it was open."""

    events: list[Event] = field(default_factory=list)

    def launches(self, prefix: str) -> list[str]:
        """Return the names of the operators that begin like this, in order."""
        return [event.name for event in self.events if event.name.startswith(prefix)]

    def crossings(self, kind: str) -> list[Event]:
        """Return what went "to device", or "to host": for each of these the host waits."""
        return [event for event in self.events if event.kind == kind]

    def reading(self, tensor: Tensor) -> list[str]:
        """Return the names of the operators that read a tensor's memory; a view does not."""
        return [event.name for event in self.events if tensor.untyped_storage().data_ptr() in event.read]


_logs: list[Log] = []


@contextmanager
def record() -> Iterator[Log]:
    """Note what happens inside the block."""
    log = Log()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def note(name: str, kind: str, inputs: Any, numbers: int, non_blocking: bool = False) -> None:
    """Add an event to every log that is open."""
    if _logs:
        read = frozenset(t.untyped_storage().data_ptr() for t in tree_leaves(inputs) if is_npu(t))
        for log in _logs:
            log.events.append(Event(name, kind, read, numbers, non_blocking))


def is_npu(value: object) -> bool:
    """Say whether a value is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == "npu"


def host(value: Any) -> Any:
    """See a tensor of the device as a CPU tensor on the same memory; return anything else as it is."""
    if not is_npu(value):
        return value
    memory = value.untyped_storage()
    seen = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("cpu"), memory.nbytes()
    )
    return torch.empty(0, dtype=value.dtype).set_(seen, value.storage_offset(), value.shape, value.stride())


def device(tensor: Tensor) -> Tensor:
    """Make a tensor of the device with the numbers and strides of a CPU tensor; that is not noted."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    host(made).copy_(tensor)
    return made


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device or across its border."""
    kinds = {(True, True): "kernel", (False, True): "to device", (True, False): "to host"}
    note("copy", kinds[is_npu(source), is_npu(target)], [source], source.numel(), non_blocking)
    host(target).copy_(host(source))
    return target


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one of torch's operators on the memory of its tensors, all of which must be the device's."""
    arguments = op._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    for tensor in tree_leaves(given):
        if isinstance(tensor, Tensor) and tensor.dim() and not is_npu(tensor):
            raise RuntimeError(f"{op.name()}: expected all tensors on npu:0, but one is on {tensor.device}")
    seen = {name: tree_map(_on_host, value) for name, value in given.items()}
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    targets = {name: given[name] for name in written if isinstance(given.get(name), Tensor)}
    for name, target in targets.items():
        if not target.numel():
            seen[name] = torch.empty(target.shape, dtype=target.dtype)  # an `out` that may have to grow
    values = list(seen.values())
    result = op(*values[: len(args)], **dict(list(seen.items())[len(args) :]))
    for name, target in targets.items():
        if target.shape != seen[name].shape:
            host(target.resize_(seen[name].shape)).copy_(seen[name])
    kind = "to host" if op.name() in _WAITING else "kernel"
    numbers = sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
    note(op.name(), kind, [value for name, value in given.items() if name not in written], numbers)
    if targets:
        return next(iter(targets.values())) if len(targets) == 1 else tuple(targets.values())
    return tree_map(lambda value: device(value) if isinstance(value, Tensor) else value, result)


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else host(value)
