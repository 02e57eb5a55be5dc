"""Time backends against one another on one problem, and check their results.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from time import perf_counter

import torch
from torch import Tensor

from gmm_registry import measure
from gmm_registry.accelerator import synchronize
from gmm_registry.contract import BackendKey, BatchSizes, Direction, GroupedMatmulBackend, Problem
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.operands import Operands, judge
from gmm_registry.registry.verdicts import describe

DISTRIBUTIONS = ("uniform", "zipf")  # groups as equal as can be, and a few that get most of the rows
REFERENCE = BackendKey("any", "eager")
_HOPELESS = 5  # times as long as the best
_TRIES = 2  # before a backend counts as hopeless, since any one call can be unlucky
_ROUNDS = 7  # that `measure.interleaved` plays at least


@dataclass(frozen=True)
class Timing:
    """One backend on one direction: milliseconds by distribution, and why it is out of the running, if so."""

    key: BackendKey
    ms: dict[str, float]
    excluded: str = ""

    @property
    def mean(self) -> float:
        """The geometric mean over the distributions."""
        return prod(self.ms.values()) ** (1 / len(self.ms)) if self.ms else inf


class Trial:
    """Random operands of a problem, and the sizes of its groups."""

    def __init__(self, problem: Problem) -> None:
        rows, groups = problem.rows, problem.groups
        device = problem.device if problem.index is None else f"{problem.device}:{problem.index}"
        self.operands = Operands.draw(rows, groups, problem.k, problem.n, problem.dtype, device)
        self.device = self.operands.x.device
        self.sizes = {name: BatchSizes(measure.group_sizes(name, rows, groups)) for name in DISTRIBUTIONS}
        for sizes in self.sizes.values():
            sizes.check(rows)  # as `gmm` does before it calls a backend

    @torch.no_grad()
    def time(
        self, direction: Direction, backends: Sequence[GroupedMatmulBackend], seconds: float
    ) -> tuple[Timing, ...]:
        """Time backends on one direction; return the fastest first."""
        end = perf_counter() + seconds
        products = {
            name: {backend.key: self._product(backend, direction, name) for backend in backends}
            for name in DISTRIBUTIONS
        }
        timings = [Timing(backend.key, {}) for backend in backends]
        for name, product in products.items():
            want = product[REFERENCE]()
            timings = [_probe(timing, name, product[timing.key], want) for timing in timings]
        if all(timing.excluded for timing in timings):  # out of memory, for one
            causes = "\n".join(f"  {timing.key}: {timing.excluded}" for timing in timings)
            raise BackendUnavailableError(f"no backend could be measured on {direction}:\n{causes}")
        least = min(timing.mean for timing in timings if not timing.excluded)
        timings = [_drop(timing, least) for timing in timings]
        racing = [timing for timing in timings if not timing.excluded]
        for left, (name, product) in zip((2, 1), products.items(), strict=True):
            share = (end - perf_counter()) / left
            if sum(timing.ms[name] for timing in racing) * _ROUNDS / 1e3 < share:  # else the tries must do
                functions = [product[timing.key] for timing in racing]
                medians = measure.interleaved(functions, self.device, seconds=share)
                racing = [_timed(timing, name, ms) for timing, ms in zip(racing, medians, strict=True)]
        dropped = [timing for timing in timings if timing.excluded]
        return tuple(sorted(racing, key=lambda timing: timing.mean) + dropped)

    def _product(
        self, backend: GroupedMatmulBackend, direction: Direction, distribution: str
    ) -> Callable[[], Tensor]:
        x, weight, grad_out = self.operands
        sizes = self.sizes[distribution]
        if direction == "grad_w":
            return partial(backend.weight_grad, x, grad_out, sizes)
        if direction == "grad_x":
            return partial(backend.forward, grad_out, weight, sizes, trans_b=True)
        return partial(backend.forward, x, weight, sizes, trans_b=False)


def _timed(timing: Timing, name: str, ms: float) -> Timing:
    return replace(timing, ms={**timing.ms, name: ms})


def _drop(timing: Timing, least: float) -> Timing:
    """Exclude a backend that would only use up the time of the others."""
    times = timing.mean / least
    if timing.excluded or times <= _HOPELESS:
        return timing
    return replace(timing, excluded=f"not measured: {times:.0f} times as long when tried")


def _probe(timing: Timing, name: str, product: Callable[[], Tensor], want: Tensor) -> Timing:
    """Check a backend's result, and time a few calls more, now that everything is compiled."""
    if timing.excluded:
        return timing
    try:
        _, wrong = judge(product, want)
        if wrong:
            return replace(timing, excluded=wrong)
        return _timed(timing, name, min(_once(product, want.device) for _ in range(_TRIES)))
    except Exception as error:  # whatever the kernel of a plugin raises, the others can be measured
        return replace(timing, excluded=f"raised {describe(error)}")


def _once(product: Callable[[], Tensor], device: torch.device) -> float:
    """Return the milliseconds of one call."""
    synchronize(device)
    begin = perf_counter()
    product()
    synchronize(device)
    return (perf_counter() - begin) * 1e3
