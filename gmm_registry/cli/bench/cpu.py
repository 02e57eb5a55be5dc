"""Compare the automatic choice on this CPU with torch.nn.functional.grouped_mm, as ratios in one run.

Run ``python -m gmm_registry.cli.bench.cpu``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from gmm_registry import BatchSizes, Problem, environment, explain, gmm
from gmm_registry.contract import dtype_name
from gmm_registry.measure import interleaved


def microseconds(*functions: Callable[[], object], calls: int = 1) -> list[float]:
    """Time functions in turn, each repeated ``calls`` times, and return what one call takes."""

    def repeated(function: Callable[[], object]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(calls):
                function()

        return repeat

    return [1e3 * ms / calls for ms in interleaved([repeated(function) for function in functions], "cpu")]


def many_small_groups(dtype: torch.dtype) -> None:
    """Print the ratio for 64 groups of 16 rows, 256 x 256."""
    x = torch.randn(1024, 256).to(dtype)
    weight = torch.randn(64, 256, 256).to(dtype)
    sizes = BatchSizes([16] * 64)
    ends = sizes.ends("cpu")
    ours, theirs = microseconds(lambda: gmm(x, weight, sizes), lambda: F.grouped_mm(x, weight, offs=ends))
    chosen = explain("cpu", Problem.of(x, weight)).chosen
    name = dtype_name(dtype)
    print(
        f"{name}, 64 groups of 16 rows, 256 x 256: gmm {ours:.0f} us on {chosen}, "
        f"grouped_mm {theirs:.0f} us: {theirs / ours:.2f} times its speed"
    )


def cost_of_a_call() -> None:
    """Print what the registry adds to a tiny product."""
    x, weight, counts = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([2, 2])
    sizes = BatchSizes(counts)
    ends = sizes.ends("cpu")
    ours, theirs, ours_bare, theirs_bare = microseconds(
        lambda: gmm(x, weight, sizes),
        lambda: F.grouped_mm(x, weight, offs=ends),
        lambda: gmm(x, weight, counts),
        lambda: F.grouped_mm(x, weight, offs=counts.cumsum(0, dtype=torch.int32)),
        calls=1000,
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
