"""npu.npu_fused's companions: permute, unpermute and SwiGLU, against those of gmm_registry.layers."""

import pytest
import torch
from npu_memory import record
from torch.nn import functional as F

from gmm_backends import npu_companions
from gmm_registry import get_backend
from gmm_registry.contract import Companions
from gmm_registry.layers import permute, sort_by_expert, unpermute
from gmm_registry.testing import compare

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture
def npu():
    backend = get_backend("npu")
    assert isinstance(backend, Companions)
    return backend


@pytest.fixture(params=[(7, 2), (5, 1), (1, 4)], ids=str)
def permutation(request):
    """Tokens on few experts, so that each of these has many rows."""
    tokens, choices = request.param
    torch.manual_seed(0)
    experts = torch.rand(tokens, 4).topk(choices).indices
    return sort_by_expert(experts.to("npu"), 4)


def leaf(*shape, dtype):
    return torch.randn(shape).to(dtype).to("npu").requires_grad_()


@every_dtype
def test_permute_has_the_same_bits(npu, permutation, dtype):
    """In the order of our own sort, whatever order the kernel gives to equal keys."""
    x = leaf(len(permutation.slot_row), 16, dtype=dtype)
    with record() as log:
        rows = npu.permute(x, permutation.slot_row)
    assert log.launches("npu::") == ["npu::npu_moe_token_permute"]
    want = permute(x, permutation)
    assert torch.equal(rows, want)
    grad = torch.randn(rows.shape).to(dtype).to("npu")
    (got,), (wanted,) = (torch.autograd.grad(out, x, grad) for out in (rows, want))
    assert compare(got, wanted.cpu(), dtype).passed


@every_dtype
@pytest.mark.parametrize("weighted", [True, False])
def test_unpermute(npu, permutation, dtype, weighted):
    rows = leaf(permutation.rows, 16, dtype=dtype)
    weights = leaf(*permutation.slot_row.shape, dtype=dtype) if weighted else None
    with record() as log:
        out = npu.unpermute(rows, permutation.slot_row, weights)
    assert log.launches("npu::") == ["npu::npu_moe_token_unpermute"]
    want = unpermute(rows, permutation, weights)
    assert out.dtype == want.dtype
    assert compare(out, want.cpu(), dtype).passed
    leaves = [rows] if weights is None else [rows, weights]
    grad = torch.randn(out.shape).to(dtype).to("npu")
    for got, wanted in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, want)), strict=True):
        assert compare(got, wanted.cpu(), dtype).passed


def test_unpermute_takes_fp32_weights_of_half_precision_rows(npu):
    permutation = sort_by_expert(torch.tensor([[0, 1], [1, 0]]).to("npu"), 2)
    rows = leaf(4, 8, dtype=torch.bfloat16)
    weights = leaf(2, 2, dtype=torch.float32)
    out = npu.unpermute(rows, permutation.slot_row, weights)
    assert compare(out, unpermute(rows, permutation, weights).cpu(), torch.bfloat16).passed
    out.sum().backward()
    assert weights.grad.dtype == torch.float32


@every_dtype
def test_glu(npu, dtype):
    gate_up = leaf(9, 24, dtype=dtype)
    out = npu.glu(gate_up)
    reference = gate_up.detach().cpu().double().requires_grad_()
    gate, up = reference.chunk(2, -1)
    want = F.silu(gate) * up
    assert compare(out, want, dtype).passed
    grad = torch.randn(out.shape).to(dtype)
    (got,) = torch.autograd.grad(out, gate_up, grad.to("npu"))
    (wanted,) = torch.autograd.grad(want, reference, grad.double())
    assert compare(got, wanted, dtype).passed


def test_glu_of_columns(npu):
    wide = leaf(5, 64, dtype=torch.float32)
    part = wide[:, :24]
    assert torch.equal(npu.glu(part), npu.glu(part.contiguous()))


@pytest.mark.parametrize("weighted", [True, False])
def test_a_second_derivative_raises(npu, weighted):
    """Whichever input it is asked for: torch_npu's own gradients would warn, and leave it out."""
    slot_row = torch.tensor([[0, 2], [1, 3]]).to("npu")
    x, rows, gate_up = leaf(2, 8, dtype=torch.float32), *(leaf(4, 8, dtype=torch.float32) for _ in range(2))
    weights = leaf(2, 2, dtype=torch.float32) if weighted else None
    for out, leaves in (
        (npu.permute(x, slot_row), [x]),
        (npu.unpermute(rows, slot_row, weights), [rows, weights] if weighted else [rows]),
        (npu.glu(gate_up), [gate_up]),
    ):
        for tensor in leaves:
            (grad,) = torch.autograd.grad(out.square().sum(), tensor, create_graph=True)
            with pytest.raises(RuntimeError, match=r"differentiable once.*use_companions=False"):
                torch.autograd.grad((grad * tensor).sum(), tensor)


def test_an_operator_that_is_not_there_is_a_reason(npu, monkeypatch):
    monkeypatch.setattr(npu_companions, "_OPERATORS", ("npu_swiglu", "npu_swoglu"))
    assert npu.companion_rejections(5, 2) == ["this torch_npu has no npu_swoglu"]


def test_limits_are_refused_with_a_reason(npu):
    assert npu.companion_rejections(2**14, 512) == []
    (reason,) = npu.companion_rejections(2**23, 2)
    assert "16777216 rows" in reason
    (reason,) = npu.companion_rejections(1, 513)
    assert "513 choices a token" in reason
