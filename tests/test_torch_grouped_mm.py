"""What any.torch_grouped_mm does around torch's grouped_mm; the contract itself is in test_backends.py."""

import pytest
import torch
from torch.nn import functional as F

from gmm_backends import torch_grouped_mm
from gmm_registry import BatchSizes, get_backend, gmm
from gmm_registry.testing import compare, reference_gmm, reference_grads

pytestmark = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason=f"torch {torch.__version__} has no grouped_mm"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strides", [(37, 1), (0, 1), (32, 1)])
def test_one_row_of_any_stride(dtype, strides):
    """A contiguous tensor may have any stride along a dimension of size 1, and grouped_mm looks at it."""
    x = torch.randn(64).to(dtype).as_strided((1, 32), strides).requires_grad_()
    weight = torch.randn(2, 32, 16).to(dtype).requires_grad_()
    counts = torch.tensor([0, 1])
    out = gmm(x, weight, counts, backend="torch_grouped_mm")
    assert compare(out, reference_gmm(x, weight, counts), dtype).passed
    got = torch.autograd.grad(out.sum(), (x, weight))
    for gradient, want in zip(got, reference_grads(x, weight, counts, torch.ones_like(out)), strict=True):
        assert compare(gradient, want, dtype).passed


@pytest.mark.parametrize("width", [16, 12])
def test_an_empty_group_has_no_gradient_where_the_kernel_leaves_it(monkeypatch, width):
    """Pytorch 172439: Blackwell's kernel writes what it finds."""
    grouped_mm = F.grouped_mm

    def leave(a, b, offs):
        product = grouped_mm(a, b, offs=offs)
        if b.dim() == 2:
            product[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return product

    monkeypatch.setattr(F, "grouped_mm", leave)
    monkeypatch.setattr(torch_grouped_mm, "_leaves_empty_groups", lambda device: True)
    backend, sizes = get_backend("cpu", "torch_grouped_mm"), BatchSizes([0, 3, 0, 2])
    x, grad_out = torch.randn(5, width), torch.randn(5, width)
    want = reference_grads(x, torch.ones(4, width, width), sizes.host, grad_out)[1]
    assert compare(backend.weight_grad(x, grad_out, sizes), want, torch.float32).passed
    main_grad = torch.zeros(4, width, width)
    backend.weight_grad(x, grad_out, sizes, out=main_grad, accumulate=True)
    assert compare(main_grad, want, torch.float32).passed


@pytest.mark.parametrize(
    ("device", "hip", "capability", "leaves"),
    [
        ("cpu", None, None, False),
        ("cuda", None, (8, 0), False),
        ("cuda", None, (9, 0), False),
        ("cuda", None, (10, 0), True),
        ("cuda", None, (12, 0), True),
        ("cuda", "6.4", (9, 4), True),
    ],
)
def test_where_the_kernel_leaves_an_empty_group(monkeypatch, device, hip, capability, leaves):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert torch_grouped_mm._leaves_empty_groups(torch.device(device)) is leaves
