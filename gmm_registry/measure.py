"""Time kernels against one another, and against the least time that the device allows.

Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

DISTRIBUTIONS = ("uniform", "zipf", "half_empty")
_WARM_UP = 2  # rounds: the first compiles and allocates
_LEAST = 5  # timed rounds, however slow they are
_BATCH = 100  # rounds between two looks at the budget, each of which waits for the device
_FLUSH = 2**30  # bytes; also long enough to write that the host launches the next kernel meanwhile


def interleaved(
    functions: Sequence[Callable[[], object]],
    device: torch.device | str,
    *,
    seconds: float = 1.0,
    flush: bool = True,
) -> list[float]:
    """Time functions in turn, round by round, so that clocks and heat hit them all alike.

    The order rotates from round to round. Two rounds warm up; at least five are timed, and as many as fit.

    Args:
        functions: what to time. On an accelerator they launch work on the current stream of ``device``.
        device: where they work. The CPU is timed by its clock, anything else by events of its own.
        seconds: how long the timed rounds of all functions may take together.
        flush: on an accelerator, write over the L2 cache before each call, as a model's other layers do.

    Returns:
        the median of each function, in milliseconds.

    Raises:
        ValueError: the seconds are negative or not finite.
    """
    check_seconds(seconds)
    if not functions:
        return []
    device = torch.device(device)
    cool = _flusher(device) if flush else _nothing
    places = range(len(functions))
    orders = cycle([(*places[first:], *places[:first]) for first in places])
    times: list[list[float]] = [[] for _ in functions]

    def play(rounds: int) -> int:
        """Play some rounds, add to the times, and return the nanoseconds that all of it took."""
        begin = perf_counter_ns()
        readings = []
        for order in islice(orders, rounds):
            for place in order:
                cool()
                readings.append((place, _timed(functions[place], device)))
        torch.get_device_module(device).synchronize(device)
        for place, reading in readings:
            times[place].append(reading())
        return perf_counter_ns() - begin

    play(_WARM_UP)
    for found in times:
        found.clear()
    rounds, spent = _LEAST, play(_LEAST)
    while (more := int(min(_BATCH, (seconds * 1e9 - spent) * rounds / spent))) > 0:
        spent += play(more)
        rounds += more
    return [median(found) for found in times]


def check_seconds(seconds: float) -> None:
    """Raise ValueError for a time that never ends, or is none."""
    if not 0 <= seconds < inf:
        raise ValueError(f"the seconds to measure must be finite and not negative, not {seconds}")


def _timed(function: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Call a function; return what gives its milliseconds once the device has been waited for."""
    if device.type == "cpu":
        begin = perf_counter_ns()
        function()
        taken = (perf_counter_ns() - begin) / 1e6
        return lambda: taken
    # The module's own event: torch.Event has no elapsed time on an NPU.
    module = torch.get_device_module(device)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    stream = module.current_stream(device)
    start.record(stream)
    function()
    end.record(stream)
    return lambda: float(start.elapsed_time(end))


def _flusher(device: torch.device) -> Callable[[], object]:
    """Return what writes more bytes than the device's last cache holds."""
    if device.type == "cpu":
        return _nothing
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    size = max(_FLUSH, 2 * getattr(properties, "L2_cache_size", 0))
    return torch.empty(size, dtype=torch.int8, device=device).zero_


def _nothing() -> None:
    pass


def group_sizes(distribution: str, rows: int, groups: int, seed: int = 0) -> list[int]:
    """Draw the rows of each group, (E,); they sum to ``rows`` and are the same on every machine.

    Args:
        distribution: "uniform": as equal as can be. "zipf": each row falls into the group of rank r with a
            probability proportional to 1 / r. "half_empty": half of the groups get no row, the others have
            random probabilities. Ranks and empty groups lie at random places.
        rows: R.
        groups: E.
        seed: of what is random.

    Raises:
        ValueError: there is no such distribution.

    >>> group_sizes("uniform", 7, 3)
    [3, 2, 2]
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"no distribution {distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    if distribution == "uniform":
        share, rest = divmod(rows, groups)
        return [share + (group < rest) for group in range(groups)]
    draw = random.Random(seed)  # noqa: S311  # no secret, and the same in every version of torch
    if distribution == "zipf":
        weights = [1 / rank for rank in range(1, groups + 1)]
    else:
        empty = groups // 2
        weights = [0.0] * empty + [1 - draw.random() for _ in range(groups - empty)]
    draw.shuffle(weights)
    drawn = Counter(draw.choices(range(groups), weights, k=rows))
    return [drawn[group] for group in range(groups)]


@dataclass(frozen=True)
class Ceilings:
    """What a device did at most: on a large dense product, and on a large copy, read and write counted."""

    flops_per_second: float
    bytes_per_second: float

    def least_seconds(
        self, sizes: Sequence[int], k: int, n: int, dtype: torch.dtype, *, weight_grad: bool = False
    ) -> float:
        """Return the roofline limit of one grouped product: its arithmetic or its memory traffic alone.

        The arithmetic is 2 R K N operations. Of memory, each operand is moved once: R K and R N elements,
        and K N of every group that has rows. The gradient of the weight writes all E K N, zeros too.

        Args:
            sizes: rows of each group, (E,).
            k: K.
            n: N.
            dtype: of every operand.
            weight_grad: the product is that gradient. Forward and the gradient of x are alike.

        >>> Ceilings(flops_per_second=100, bytes_per_second=8).least_seconds([1, 0], 5, 3, torch.float32)
        11.5
        """
        rows = sum(sizes)
        matrices = len(sizes) if weight_grad else sum(size > 0 for size in sizes)
        moved = (rows * (k + n) + matrices * k * n) * dtype.itemsize
        return max(2 * rows * k * n / self.flops_per_second, moved / self.bytes_per_second)


def ceilings(device: torch.device | str, dtype: torch.dtype, *, seconds: float = 1.0) -> Ceilings:
    """Measure what a device can do: a dense product in a dtype, and a copy.

    The product is 8192 x 8192 x 8192 and the copy 1 GiB on an accelerator, 1024 x 1024 x 1024 and 256 MiB on
    the CPU.
    """
    device = torch.device(device)
    size, copied = (1024, 2**28) if device.type == "cpu" else (8192, 2**30)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randn(copied // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    product_ms, copy_ms = interleaved(
        [lambda: torch.mm(a, b, out=product), lambda: target.copy_(source)], device, seconds=seconds
    )
    return Ceilings(2 * size**3 / product_ms * 1e3, 2 * copied / copy_ms * 1e3)
