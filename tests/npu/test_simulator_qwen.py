"""transformers' Qwen3.5 MoE block on the CPU against the same block with our experts on the device."""

import sys
from pathlib import Path

import torch
import torch_npu
from npu_memory import record

torch_npu.npu_fusion_attention = None  # which transformers imports, and this block does not call
sys.path.insert(0, str(Path(__file__).parents[1]))
from qwen import blocks, losses  # noqa: E402

GMM = "npu::npu_grouped_matmul"


def test_output_and_gradients_equal_transformers():
    theirs, ours = blocks()
    ours.to("npu")
    x, grad_out = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    found = []
    for block, device in ((theirs, "cpu"), (ours, "npu")):
        leaf = x.to(device, copy=True).requires_grad_()
        with record() as log:
            out = block(leaf)
            out.backward(grad_out.to(device))
        grads = {name: parameter.grad.cpu() for name, parameter in block.named_parameters()}
        found.append((out.detach().cpu(), leaf.grad.cpu(), grads))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert log.launches(GMM) == [GMM] * 6  # the shared expert makes none
    for companion in ("npu_moe_token_permute", "npu_swiglu", "npu_moe_token_unpermute"):
        assert log.launches("npu::").count(f"npu::{companion}") == 1


def test_ten_training_steps_lose_alike():
    theirs, ours = blocks()
    want, got = losses(theirs), losses(ours.to("npu"), "npu")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert got[-1] < got[0]
