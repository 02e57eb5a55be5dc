"""The one step that all kernels in plain Triton share."""

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def add_product(a, b, total):
    """Add ``a @ b`` to an fp32 sum; fp32 operands are not rounded to TF32."""
    if _INTERPRETED:  # its dot takes the bits of a bf16 for an integer
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
