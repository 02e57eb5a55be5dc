"""What this CPU's matrix product can do."""

import torch


def is_slow(dtype: torch.dtype) -> bool:
    """Say whether torch multiplies this dtype on this CPU without hardware for it.

    Its reference loop then runs one to two orders of magnitude below fp32, so that converting to fp32
    and back is faster; see docs/performance.md.
    """
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return False
