"""The rows of each group, held once, in every form that a backend wants. E is the number of groups."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from gmm_registry.accelerator import current_stream, synchronize

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_FORMS = "_gmm_registry_forms"
_MAX_ROWS = 2**31 - 1  # `ends` and `offsets` are int32, as torch and the CUDA kernels want them


class BatchSizes:
    """Hold the rows of each group once, and every form of them that a backend asks for.

    Give one `BatchSizes` to all the grouped matmuls of a layer: each form is made at most once, and the
    counts cross between host and device at most once in each direction. On an accelerator that is so for each
    of its streams; in a CUDA graph use one that was made inside.

    Args:
        counts: rows of each group, (E,): a CPU int64 or int32 tensor, or ints. They are copied.

    Raises:
        TypeError: counts are not integers.
        ValueError: counts are not one-dimensional, or lie on a device (see `from_device`).

    >>> BatchSizes([2, 0, 3]).offsets("cpu").tolist()
    [0, 2, 2, 5]
    """

    def __init__(self, counts: Tensor | Iterable[int]) -> None:
        if isinstance(counts, Tensor):
            if counts.device.type not in ("cpu", "meta"):
                raise ValueError(
                    f"batch_sizes are on {counts.device}; give them on the CPU, or say that they come "
                    "from the device with BatchSizes.from_device(counts)"
                )
            self._hold(_int64_copy(counts))
        else:
            self._hold(_from_ints(counts))

    @classmethod
    def from_device(cls, counts: Tensor, *, gathered: bool = False) -> BatchSizes:
        """Take counts (E,), int64 or int32, where they are, without waiting for the device.

        The host sees them when a backend first asks for `host`; that waits, and checks them. A backend
        that never asks leaves the check to the device: on CUDA an assertion there ends the process.

        Args:
            counts: (E,).
            gathered: a collective wrote them. Then an accelerator other than CUDA is waited for after all,
                before they are copied: its collectives may run on a stream that a copy does not wait for,
                as HCCL's do.
        """
        if not isinstance(counts, Tensor):
            raise TypeError(f"counts from a device are a tensor there, not {type(counts).__name__}")
        if gathered and not counts.is_cuda:
            synchronize(counts.device)
        self = cls.__new__(cls)
        self._hold(_int64_copy(counts))
        return self

    @classmethod
    def of(cls, batch_sizes: BatchSizes | Tensor | Iterable[int]) -> BatchSizes:
        """Return ``batch_sizes`` itself if it is one already, else make one of it."""
        return batch_sizes if isinstance(batch_sizes, BatchSizes) else cls(batch_sizes)

    @classmethod
    def carried_by(cls, counts: Tensor) -> BatchSizes:
        """Find the forms again from the tensor that passed through a torch operator."""
        self = cls.__new__(cls)
        self.counts = counts
        forms = getattr(counts, _FORMS, None)
        self._forms = {} if forms is None else forms
        return self

    def _hold(self, counts: Tensor) -> None:
        self.counts = counts
        self._forms: dict[object, Any] = {}
        if not torch.compiler.is_compiling():
            # A torch operator takes tensors only; the forms travel through it on the counts. They hold
            # no reference back to the counts, so nothing waits for the garbage collector.
            setattr(counts, _FORMS, self._forms)

    def __len__(self) -> int:
        return self.counts.shape[0]

    def __repr__(self) -> str:
        return f"BatchSizes({self.counts.tolist() if self.counts.is_cpu else self.counts})"

    @property
    def host(self) -> Tensor:
        """The counts on the CPU, (E,) int64. Waits for the device if they were made there."""
        return self.on(_CPU)

    @property
    def skew(self) -> int | None:
        """Rows of the longest group over the mean, up to the next power of two; None for device counts.

        >>> BatchSizes([2, 0, 4]).skew
        2
        """
        skew = self._forms.get("skew")  # asked for at each call
        return skew if skew or not self.counts.is_cpu else self.derived("skew", self._skew)

    def on(self, device: torch.device | str) -> Tensor:
        """The counts on ``device``, (E,) int64."""
        device = _indexed(device)
        if device == self.counts.device:
            return self.counts  # not kept among the forms, which must not refer to it
        return self._form("counts", device, self._to)

    def ends(self, device: torch.device | str) -> Tensor:
        """Where each group ends, (E,) int32 on ``device``: torch's ``offs``."""
        return self._form("ends", device, lambda d: self.on(d).cumsum(0, dtype=torch.int32))

    def offsets(self, device: torch.device | str) -> Tensor:
        """Where each group starts and the last ends, (E + 1,) int32 on ``device``."""
        return self._form("offsets", device, lambda d: pad(self.ends(d), (1, 0)))

    def _form(self, name: str, device: torch.device | str, make: Callable[[torch.device], Tensor]) -> Tensor:
        device = _indexed(device)
        return self.derived(name, lambda: make(device), device)

    def _to(self, device: torch.device) -> Tensor:
        counts = self.counts.to(device)  # never non_blocking: whoever reads them would read too early
        if device.type == "cpu" and "checked" in self._forms:
            _verify(counts, self._forms["checked"])  # the first time that the host sees them
        return counts

    def _skew(self) -> int:
        sizes = self.counts.flatten().tolist()  # an operator's counts are checked later
        rows = sum(sizes)
        return 1 << (-(-max(sizes) * len(sizes) // rows) - 1).bit_length() if rows else 1

    def derived(self, key: object, make: Callable[[], _T], device: torch.device | None = None) -> _T:
        """Return what a backend makes of the counts; made once, with the forms, under a key of its own.

        Args:
            key: whose, and of what kind.
            make: makes it.
            device: where it lies, with its index, if it lies on one. It is then made once for each stream
                that asks, since no stream waits for what another is still making.
        """
        if device is not None:
            key = key, device, current_stream(device)
        if key not in self._forms:
            self._forms[key] = make()
        return cast(_T, self._forms[key])

    def check(self, rows: int) -> None:
        """Raise ValueError unless the counts are non-negative and sum to ``rows``; once per ``rows``."""
        if self._forms.get("checked") == rows:
            return
        if rows > _MAX_ROWS:
            raise ValueError(f"x has {rows} rows; at most {_MAX_ROWS} are possible")
        if self.counts.is_cpu:
            _verify(self.counts, rows)
        elif self.counts.is_cuda:
            right = (self.counts.sum() == rows) & (self.counts >= 0).all()
            torch._assert_async(
                right, f"batch_sizes have a negative count or do not sum to the {rows} rows of x"
            )
        self._forms["checked"] = rows


def _indexed(device: torch.device | str) -> torch.device:
    """Give "cuda" the index that it means now, so that "cuda" and "cuda:0" are one."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def _verify(counts: Tensor, rows: int) -> None:
    sizes = counts.tolist()
    if sizes and min(sizes) < 0:
        group = next(e for e, size in enumerate(sizes) if size < 0)
        raise ValueError(f"batch_sizes[{group}] = {sizes[group]} is negative")
    if sum(sizes) != rows:
        ends = sizes == sorted(sizes) and sizes[-1:] == [rows]
        hint = "; they look like the ends of the groups: give the rows of each" if ends else ""
        raise ValueError(f"batch_sizes sum to {sum(sizes)}, but x has {rows} rows{hint}")


def _int64_copy(counts: Tensor) -> Tensor:
    if counts.layout != torch.strided:
        raise TypeError(f"batch_sizes have the layout {counts.layout}; they must be an ordinary tensor")
    if counts.dim() != 1:
        raise ValueError(f"batch_sizes have shape {tuple(counts.shape)}; they must be (E,)")
    if counts.dtype == torch.int64:
        return counts.clone()
    if counts.dtype == torch.int32:
        return counts.to(torch.int64)
    raise TypeError(f"batch_sizes are {counts.dtype}; they must be torch.int64 or torch.int32")


def _from_ints(counts: Iterable[int]) -> Tensor:
    try:
        if isinstance(counts, (str, bytes, bytearray, set, frozenset, dict)):
            raise TypeError  # integers, or hashable ones, but not counts in an order
        sizes = [operator.index(count) for count in counts]
    except TypeError as error:
        raise TypeError(
            "batch_sizes must be a CPU int64 or int32 tensor, a list of ints or a BatchSizes, "
            f"not {type(counts).__name__} {counts!r}"
        ) from error
    if any(abs(size) > _MAX_ROWS for size in sizes):
        raise ValueError(f"batch_sizes {sizes} have an entry beyond {_MAX_ROWS}, more rows than are possible")
    return torch.tensor(sizes, dtype=torch.int64, device=_CPU)  # whatever torch's default device is
