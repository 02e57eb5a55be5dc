"""What only the real torch_npu can show: its schemas, its fake kernels, its import without CANN."""

import os
import subprocess
import sys

import pytest
import torch
import torch_npu
from npu_kernels import SCHEMAS
from real_npu import REPLACED
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gmm_registry import BatchSizes, get_backend, gmm
from gmm_registry.testing import CASES

MINDSPEED = CASES[:4]  # of its test of grouped_matmul, pull request 2664
EMPTY = [case for case in CASES if "empty" in case.name]


def test_is_the_real_package():
    assert torch_npu.__version__.startswith("2.13.0")
    assert torch_npu._C.__file__.endswith(".so")
    assert REPLACED > 1000
    assert torch.empty(1, device="npu").device == torch.device("npu", 0)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_schema_is_that_of_the_simulated_device(schema):
    ours = torch._C.parse_schema(f"npu::{schema}")
    theirs = getattr(torch.ops.npu, ours.name.removeprefix("npu::")).default._schema
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("case", [*MINDSPEED, *EMPTY], ids=lambda case: case.name)
def test_fused_agrees_with_eager(case):
    """As MindSpeed-MM's own test compares, and backward too."""
    assert len(EMPTY) >= 5
    results = []
    for backend in ("npu_fused", "eager"):
        x, weight, counts, grad_out = case.inputs().to("npu")
        out = gmm(x.requires_grad_(), weight.requires_grad_(), counts, case.trans_b, backend=backend)
        out.backward(grad_out)
        results.append((out.detach().cpu(), x.grad.cpu(), weight.grad.cpu()))
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-2, atol=1e-2)
    empty = [group for group, count in enumerate(case.counts) if not count]
    assert not results[0][2][empty].any()


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="npu")


def check(tensor, *shape, dtype=torch.bfloat16):
    assert isinstance(tensor, FakeTensor)
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, "npu")


def test_fake_kernels_of_the_products(fake):
    """torch_npu's own, which torch.compile asks for shapes."""
    backend = get_backend("npu")
    x, weight, grad_out = fake(20, 16), fake(3, 16, 24), fake(20, 24)
    sizes = BatchSizes.from_device(fake(3, dtype=torch.int64))
    check(backend.forward(x, weight, sizes, trans_b=False), 20, 24)
    check(backend.forward(grad_out, weight, sizes, trans_b=True), 20, 16)
    check(backend.weight_grad(x, grad_out, sizes), 3, 16, 24)
    main_grad = fake(3, 16, 24, dtype=torch.float32)
    assert backend.weight_grad(x, grad_out, sizes, out=main_grad, accumulate=True) is main_grad


def test_fake_kernels_of_the_companions(fake):
    backend = get_backend("npu")
    slot_row = fake(10, 2, dtype=torch.int64)
    rows = backend.permute(fake(10, 16), slot_row)
    check(rows, 20, 16)
    check(backend.unpermute(rows, slot_row, fake(10, 2)), 10, 16)
    check(backend.unpermute(rows, slot_row), 10, 16)
    check(backend.glu(fake(20, 32)), 20, 16)


def run_python(source, **environment):
    done = subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_is_imported_only_when_an_npu_is_asked_about():
    source = """
import sys
from gmm_registry import explain, gmm, list_backends
assert "npu.npu_fused" in map(str, list_backends("npu"))
explain("cpu")
print("torch_npu" in sys.modules)
explain("npu")
print("torch_npu" in sys.modules)
"""
    lines = run_python(source).splitlines()
    assert [line for line in lines if line in ("False", "True")] == ["False", "True"]


def test_without_cann_the_reason_names_what_is_missing():
    """The package as it is, its libraries not on the loader's path."""
    report = run_python("from gmm_registry import explain; print(explain('npu'))", LD_LIBRARY_PATH="")
    assert "npu.npu_fused: refused" in report
    assert "torch_npu cannot be imported" in report
    assert "ImportError: libhccl.so: cannot open shared object file" in report
    assert "nothing can run this" in report
