"""What stand-ins for packages that compute on CUDA share."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

COUNTS = [3, 0, 5, 0]


class StandIn:
    """A package on CPU tensors: it notes its calls, and knows which device is the current one."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.current: list[torch.device] = []

    @contextmanager
    def device_of(self, tensor: Tensor):
        """Do `torch.cuda.device_of`."""
        self.current.append(tensor.device)
        yield
        self.current.pop()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and grad_out for `COUNTS`."""
    return tuple(torch.randn(shape).bfloat16() for shape in ((8, 16), (4, 16, 24), (8, 24)))
