"""cuda.quack without a GPU: the adapter on a stand-in for the package, and its refusals."""

import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import test_cuda
import torch
from hardware import backend_or_skip
from stand_in import COUNTS, StandIn, operands
from torch import Tensor

from gmm_backends import quack_gemm
from gmm_backends.quack_gemm import Quack
from gmm_registry import BatchSizes, Problem, explain, get_backend, gmm
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.testing import BackendParityTests, Case, compare, reference_gmm, reference_grads
from gmm_registry.testing.parity import differences, expected, run

PROBLEM = Problem("cuda", None, torch.bfloat16, rows=8, groups=4, k=16, n=24)


# --- the stand-in ---------------------------------------------------------------------------------


class Package(StandIn):
    """quack.gemm_interface 0.6.5 on CPU tensors: it refuses what the package does and takes what it takes.

    Where the package reads addresses and strides, and how, is in its gemm.py (_build_gemm_plan) and
    compile_utils.py (div_for_dtype).
    """

    def gemm(self, A, B, out=None, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):  # noqa: N803
        self.calls.append(SimpleNamespace(A=A, B=B, out=out, adds=False))
        shape = (len(cu_seqlens_k) - 1, A.shape[0]) if cu_seqlens_m is None else A.shape[:1]
        if out is None:
            out = A.new_full((*shape, B.shape[-1]), torch.nan)
        return self._into(out, A, B, cu_seqlens_m, cu_seqlens_k, tuned, lambda to, product: to.copy_(product))

    def gemm_add_inplace(self, A, B, out, *, cu_seqlens_k=None, tuned=True):  # noqa: N803
        self.calls.append(SimpleNamespace(A=A, B=B, out=out, adds=True))
        self._into(out, A, B, None, cu_seqlens_k, tuned, lambda to, product: to.add_(product))

    def _into(self, out, a, b, offsets_m, offsets_k, tuned, write):
        assert not tuned, "tunes for minutes"
        assert self.current[-1:] == [a.device], "compiles for the current device"
        offsets = offsets_k if offsets_m is None else offsets_m
        assert offsets.dtype == torch.int32
        assert offsets.device == a.device
        assert a.dtype == b.dtype
        assert a.dtype in (torch.bfloat16, torch.float16)
        assert out.dtype in (a.dtype, torch.float32)
        for tensor in (a, b, out, offsets):
            contiguous = [dim for dim in range(tensor.dim()) if tensor.stride(dim) == 1]
            steps = [stride for dim, stride in enumerate(tensor.stride()) if dim not in contiguous]
            assert contiguous, "no dimension lies densely"
            assert all(step and step * tensor.element_size() % 16 == 0 for step in steps), "strides"
            assert tensor.data_ptr() % 16 == 0, "Misaligned Tensor data"
        ranges = [slice(*pair) for pair in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]
        if offsets_m is None:
            assert a.stride(-2) == b.stride(-1) == 1
            assert out.shape == (len(ranges), a.shape[0], b.shape[1])
            for matrix, rows in zip(out, ranges, strict=True):  # over an empty range the sum is zero
                write(matrix, a[:, rows].float() @ b[rows].float())
        else:
            assert a.stride(-1) == out.stride(-1) == 1
            assert out.shape == (a.shape[0], b.shape[2])
            for matrix, rows in zip(b, ranges, strict=True):
                write(out[rows], a[rows].float() @ matrix.float())
        return out


@pytest.fixture
def package(monkeypatch, distribution) -> Package:
    package, module = Package(), ModuleType("quack")
    module.gemm_interface = package
    monkeypatch.setitem(sys.modules, "quack", module)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", package)
    monkeypatch.setattr(torch.cuda, "device_of", package.device_of)
    distribution("quack_kernels", {"cpu.stand_in": "gmm_backends.quack_gemm:Quack"}, version="0.6.5")
    return package


@pytest.mark.usefixtures("package", "no_gpu")
class TestOnStandIn(BackendParityTests):
    device, impl, required, width = "cpu", "stand_in", True, 8


# --- the adapter ----------------------------------------------------------------------------------


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return operands()


@pytest.mark.usefixtures("no_gpu")
def test_writes_and_adds_where_it_is_told_to(package, inputs):
    x, weight, grad_out = inputs
    backend, sizes = get_backend("cpu", "stand_in"), BatchSizes(COUNTS)
    out = torch.full_like(grad_out, torch.nan)
    assert backend.forward(x, weight, sizes, trans_b=False, out=out) is out
    want = reference_grads(x, weight, sizes.host, grad_out)[1]
    for dtype in (torch.bfloat16, torch.float32):
        grad = torch.full_like(weight, torch.nan, dtype=dtype)
        for times in (1, 2):
            assert backend.weight_grad(x, grad_out, sizes, out=grad, accumulate=times > 1) is grad
            assert package.calls[-1].out is grad
            assert package.calls[-1].adds == (times > 1)
            assert compare(grad, times * want, torch.bfloat16).passed
    assert package.calls[0].out is out
    # Nothing was rounded to the dtype of the operands on its way into fp32.
    assert compare(grad, 2 * want, torch.float32).passed


@pytest.mark.usefixtures("no_gpu")
def test_never_writes_where_it_would_be_refused(package, inputs):
    x, weight, grad_out = inputs
    backend, sizes = get_backend("cpu", "stand_in"), BatchSizes(COUNTS)
    out = torch.empty(8, 48, dtype=x.dtype)[:, :24]
    backend.forward(x, weight, sizes, trans_b=False, out=out)
    assert compare(out, reference_gmm(x, weight, sizes.host), x.dtype).passed
    want = reference_grads(x, weight, sizes.host, grad_out)[1]
    for grad in (torch.empty(weight.numel() + 1)[1:].view(weight.shape), torch.empty(4, 24, 16).mT):
        backend.weight_grad(x, grad_out, sizes, out=grad)
        assert compare(grad, want, x.dtype).passed
        backend.weight_grad(x, grad_out, sizes, out=grad, accumulate=True)
        assert compare(grad, 2 * want, x.dtype).passed
    assert [call.out for call in package.calls] == [None] * 5


@pytest.mark.usefixtures("package", "no_gpu")
@pytest.mark.parametrize("strides", [(37, 1), (0, 1), (32, 1)])
def test_one_row_of_any_stride(strides):
    """A contiguous tensor may have any stride along a dimension of size 1."""
    x = torch.randn(64).bfloat16().as_strided((1, 32), strides)
    weight = torch.randn(32 * 24 + 40).bfloat16().as_strided((1, 32, 24), (32 * 24 + strides[0], 24, 1))
    out = gmm(x.requires_grad_(), weight.requires_grad_(), [1], backend="stand_in")
    assert compare(out, reference_gmm(x, weight, torch.tensor([1])), x.dtype).passed
    got = torch.autograd.grad(out.sum(), (x, weight))
    want = reference_grads(x, weight, torch.tensor([1]), torch.ones_like(out))
    for gradient, wanted in zip(got, want, strict=True):
        assert compare(gradient, wanted, x.dtype).passed


@pytest.mark.usefixtures("no_gpu")
def test_the_host_never_sees_the_counts(package, inputs, monkeypatch):
    x, weight, grad_out = inputs
    monkeypatch.setattr(BatchSizes, "host", property(lambda self: pytest.fail("the host asks for counts")))
    backend, sizes = get_backend("cpu", "stand_in"), BatchSizes.from_device(torch.tensor(COUNTS))
    backend.forward(x, weight, sizes, trans_b=False)
    backend.weight_grad(x, grad_out, sizes)
    assert len(package.calls) == 2


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    def install(number: str | None) -> None:
        def version(name: str) -> str:
            if number is None:
                raise quack_gemm.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(quack_gemm, "version", version)

    return install


@pytest.mark.usefixtures("fresh_registry", "no_gpu")
def test_says_how_to_install(installed):
    installed(None)
    reason = "quack-kernels is not installed: pip install 'gmm_registry[quack]'"
    assert f"\n    - {reason}\n" in str(explain("cuda", PROBLEM))
    with pytest.raises(BackendUnavailableError, match="quack-kernels is not installed"):
        get_backend("cuda", "quack")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("number", "is_old"),
    [("0.2.10", True), ("0.6.4", True), ("0.6", True), ("0.6.5", False), ("0.6.10.dev1", False)],
)
def test_says_that_it_is_too_old(installed, number, is_old):
    installed(number)
    install = "the oldest that was tested: pip install 'gmm_registry[quack]'"
    assert Quack().rejections(PROBLEM) == [f"quack-kernels {number} < 0.6.5, {install}"] * is_old


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"dtype": torch.float16}, []),
        ({"dtype": torch.float32}, ["quack takes torch.bfloat16, torch.float16, not torch.float32"]),
        (
            {"k": 12, "n": 1},
            [
                f"inner or outer dimension {width}; quack needs a multiple of 8, for rows of whole 16 bytes"
                for width in (12, 1)
            ],
        ),
        ({"rows": 2**30 + 1}, ["1073741825 rows; quack takes at most 1073741824"]),
        ({"rows": 0, "groups": 0, "k": 0, "n": 0}, []),
    ],
)
def test_says_what_it_does_not_take(installed, change, reasons):
    installed("0.6.5")
    assert Quack().rejections(replace(PROBLEM, **change)) == reasons


def test_says_what_the_device_lacks(installed, monkeypatch):
    installed("0.6.5")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    assert Quack().rejections(PROBLEM) == ["compute capability 8.9 < 9.0"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert Quack().rejections(PROBLEM) == ["this torch is for ROCm; quack needs CUDA"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("error", ["ModuleNotFoundError('cuda')", "ImportError('old')", "SystemExit('old')"])
def test_a_quack_that_cannot_be_imported_is_a_late_refusal(monkeypatch, distribution, inputs, error):
    """Automatic choice then goes on to the next backend, and `explain` says why."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    entry_points = {"cpu.stand_in": "gmm_backends.quack_gemm:Quack"}
    distribution("quack_kernels", entry_points, {"quack": f"raise {error}"}, version="0.6.5")
    x, weight, _ = inputs
    with pytest.raises(NotImplementedError, match="quack cannot be imported") as raised:
        gmm(x, weight, COUNTS, backend="stand_in")
    assert error in str(raised.value)
    assert explain("cpu", Problem.of(x, weight)).chosen.impl == "stand_in"
    assert compare(gmm(x, weight, COUNTS), reference_gmm(x, weight, torch.tensor(COUNTS)), x.dtype).passed
    report = explain("cpu", Problem.of(x, weight))
    assert report.chosen.impl != "stand_in"
    assert f"quack cannot be imported ({error})" in str(report)


def test_quack_is_not_imported_before_it_multiplies():
    script = """
import sys
import torch
from gmm_registry import Problem, explain
explain("cuda")
explain("cuda", Problem("cuda", None, torch.bfloat16, 8, 2, 128, 128))
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("quack", "cutlass")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_is_preferred_to_torch_and_not_to_our_own():
    from gmm_backends.torch_grouped_mm import TorchGroupedMm

    assert TorchGroupedMm().priority(PROBLEM) < Quack().priority(PROBLEM) < 50


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def backend():
    return backend_or_skip("cuda", "quack")


@pytest.mark.hardware
def test_device_counts_need_no_synchronisation(backend):
    test_cuda.test_device_counts_need_no_synchronisation(backend)


@pytest.mark.hardware
def test_wrong_device_counts_end_the_process_with_a_message(backend):
    test_cuda.test_wrong_device_counts_end_the_process_with_a_message(backend)


@pytest.mark.hardware
def test_offsets_beyond_32_bits(backend):
    test_cuda.test_offsets_beyond_32_bits(backend)


@pytest.mark.hardware
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_row(backend, dtype, trans_b):
    """The stride of a dimension of size 1 may be lost on the way into the kernel."""
    for counts in ((1,), (0, 1, 0)):
        case = Case("one row", counts, 64, 48, dtype, trans_b)
        inputs = case.inputs()
        found = differences(run(backend, case, inputs), expected(case, inputs), case)
        assert all(difference.passed for difference in found.values()), found
