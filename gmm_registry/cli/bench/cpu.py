"""Compare the automatic choice on this CPU with torch.nn.functional.grouped_mm, as ratios in one run.

Run ``python -m gmm_registry.cli.bench.cpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import torch
from torch.nn import functional as F

from gmm_registry import BatchSizes, Problem, environment, explain, gmm


def interleaved_medians(*functions: Callable[[], object], calls: int, repeats: int) -> list[float]:
    """Time functions in turn, so that a slow moment hits them all; return microseconds a call."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 2):
        for function, found in zip(functions, times, strict=True):
            start = perf_counter_ns()
            for _ in range(calls):
                function()
            if repeat >= 2:  # the first two warm up
                found.append((perf_counter_ns() - start) / calls / 1e3)
    return [median(found) for found in times]


def many_small_groups(dtype: torch.dtype) -> None:
    """Print the ratio for 64 groups of 16 rows, 256 x 256."""
    x = torch.randn(1024, 256).to(dtype)
    weight = torch.randn(64, 256, 256).to(dtype)
    sizes = BatchSizes([16] * 64)
    ends = sizes.ends("cpu")
    ours, theirs = interleaved_medians(
        lambda: gmm(x, weight, sizes), lambda: F.grouped_mm(x, weight, offs=ends), calls=1, repeats=15
    )
    chosen = explain("cpu", Problem.of(x, weight)).chosen
    name = str(dtype).removeprefix("torch.")
    print(
        f"{name}, 64 groups of 16 rows, 256 x 256: gmm {ours:.0f} us on {chosen}, "
        f"grouped_mm {theirs:.0f} us: {theirs / ours:.2f} times its speed"
    )


def cost_of_a_call() -> None:
    """Print what the registry adds to a tiny product."""
    x, weight, counts = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([2, 2])
    sizes = BatchSizes(counts)
    ends = sizes.ends("cpu")
    ours, theirs, ours_bare, theirs_bare = interleaved_medians(
        lambda: gmm(x, weight, sizes),
        lambda: F.grouped_mm(x, weight, offs=ends),
        lambda: gmm(x, weight, counts),
        lambda: F.grouped_mm(x, weight, offs=counts.cumsum(0, dtype=torch.int32)),
        calls=1000,
        repeats=11,
    )
    print(
        f"one call, 4 rows, 8 x 8: gmm {ours:.1f} us, grouped_mm {theirs:.1f} us: {ours / theirs:.2f} times"
    )
    print(
        f"  counts a bare tensor: gmm {ours_bare:.1f} us, cumsum and grouped_mm {theirs_bare:.1f} us: "
        f"{ours_bare / theirs_bare:.2f} times"
    )


def main() -> None:
    """Print every ratio."""
    versions = environment.describe("cpu")
    print(", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "platform", "device")))
    print(
        f"threads {torch.get_num_threads()}, "
        f"native bf16: {torch.ops.mkldnn._is_mkldnn_bf16_supported()}, "
        f"native fp16: {torch.ops.mkldnn._is_mkldnn_fp16_supported()}"
    )
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            many_small_groups(dtype)
        cost_of_a_call()


if __name__ == "__main__":
    main()
