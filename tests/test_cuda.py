"""What only a CUDA device can show."""

import subprocess
import sys

import pytest
import torch

from gmm_registry import BackendUnavailableError, BatchSizes, get_backend, gmm

pytestmark = pytest.mark.hardware


@pytest.fixture(params=["eager", "torch_grouped_mm"])
def backend(request):
    try:
        return get_backend("cuda", request.param)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def test_device_counts_need_no_synchronisation(backend):
    if backend.impl == "eager":
        pytest.skip("the loop over groups reads the counts on the host")
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    counts = torch.tensor([10, 0, 50, 4], device="cuda")
    gmm(x, weight, BatchSizes.from_device(counts), backend=backend.impl).sum().backward()
    want, x.grad, weight.grad = (x.grad, weight.grad), None, None
    torch.cuda.set_sync_debug_mode("error")
    try:
        gmm(x, weight, BatchSizes.from_device(counts), backend=backend.impl).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(x.grad, want[0])
    assert torch.equal(weight.grad, want[1])


def test_wrong_device_counts_end_the_process_with_a_message(backend):
    """pytorch 154557, torchtitan 1237, where the host never sees the counts."""
    script = f"""
import torch
from gmm_registry import BatchSizes, gmm
x = torch.ones(64, 32, device="cuda", dtype=torch.bfloat16)
weight = torch.ones(2, 32, 16, device="cuda", dtype=torch.bfloat16)
gmm(x, weight, BatchSizes.from_device(torch.tensor([1, 2], device="cuda")), backend="{backend.impl}")
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "do not sum to the 64 rows" in done.stderr or "sum to 3, but x has 64 rows" in done.stderr


def test_offsets_beyond_32_bits(backend):
    """DeepSpeed 8261, axolotl 3865: E * k * n of 2**31 and more."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of device memory")
    weight = torch.zeros(3, 32768, 32768, dtype=torch.bfloat16, device="cuda")
    weight[2, 0, 0] = 1
    x = torch.zeros(1, 32768, dtype=torch.bfloat16, device="cuda")
    x[0, 0] = 1
    with torch.no_grad():
        assert gmm(x, weight, [0, 0, 1], backend=backend.impl)[0, 0] == 1
