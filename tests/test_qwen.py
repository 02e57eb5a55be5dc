"""The routed-expert path of Qwen3.5 MoE against transformers' own block."""

import torch
from qwen import blocks, losses


def test_output_and_gradients_equal_transformers():
    theirs, ours = blocks()
    x, grad_out = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    found = []
    for block in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out = block(leaf)
        out.backward(grad_out)
        found.append((out, leaf.grad, {name: p.grad for name, p in block.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert found[1][2]["experts.gate_up_proj"].is_contiguous()
    assert not found[1][2]["experts.gate_up_proj"].isnan().any()


def test_ten_training_steps_lose_alike():
    theirs, ours = blocks()
    want, got = losses(theirs), losses(ours)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert got[-1] < got[0]


def test_the_shared_expert_makes_no_grouped_product(monkeypatch):
    import gmm_registry.layers.products as module

    calls = []
    gmm = module.gmm
    monkeypatch.setattr(module, "gmm", lambda *a, **k: calls.append(a[1].shape) or gmm(*a, **k))
    _, ours = blocks()
    ours(torch.randn(2, 9, 32))
    assert calls == [(8, 32, 32), (8, 16, 32)]
