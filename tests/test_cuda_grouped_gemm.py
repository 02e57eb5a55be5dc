"""cuda.cuda_grouped_gemm without a GPU: the adapter on a stand-in for the package, and its refusals."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from stand_in import COUNTS, StandIn, operands
from torch import Tensor

from gmm_backends.cuda_grouped_gemm import CudaGroupedGemm
from gmm_registry import BatchSizes, Problem, explain, get_backend
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.registry import refresh
from gmm_registry.testing import BackendParityTests, compare, reference_gmm, reference_grads

BUILD = "grouped_gemm needs a multiple of 8 where it was built with CUTLASS"
LARGE = "up to 2147483648 elements in a group; grouped_gemm takes at most 2147483647"
PROBLEM = Problem("cuda", None, torch.bfloat16, rows=8, groups=4, k=16, n=24)
INSTALL = "grouped_gemm is not installed: pip install --no-build-isolation 'gmm_registry[grouped-gemm]'"


# --- the stand-in ---------------------------------------------------------------------------------


class Package(StandIn):
    """grouped_gemm 0.3.0 on CPU tensors: it refuses, overlooks and leaves unwritten what the package does.

    Its checks are those of csrc/grouped_gemm.cu; the 16 bytes are those that a build with CUTLASS needs.
    """

    def gmm(self, a, b, batch_sizes, trans_a=False, trans_b=False, c=None):
        self.calls.append(SimpleNamespace(a=a, b=b, c=c, trans_a=trans_a, trans_b=trans_b))
        assert self.current[-1:] == [a.device], "computes on the current device"
        assert not (trans_a and trans_b)
        assert type(batch_sizes) is Tensor
        assert batch_sizes.is_cpu
        assert batch_sizes.dtype == torch.int64
        assert a.dim() == batch_sizes.dim() + 1 == 2
        assert b.dim() == (2 if trans_a else 3)
        groups, (k, n) = len(batch_sizes), (b.shape[2], b.shape[1]) if trans_b else b.shape[-2:]
        if c is None:
            c = a.new_full((groups, a.shape[1], n) if trans_a else (a.shape[0], n), torch.nan)
        for tensor in (a, b, c):
            assert tensor.dtype == torch.bfloat16
            assert trans_a or tensor.is_contiguous()  # with trans_a it does not look
            assert (tensor.data_ptr() | 2 * tensor.shape[-1]) % 16 == 0, "misaligned address"
        if trans_a:
            assert a.shape[0] == b.shape[0]
            assert c.shape == (groups, a.shape[1], n)
        else:
            assert k == a.shape[1]
            assert groups == b.shape[0]
        a, b, written = (_as_contiguous(tensor) for tensor in (a, b, c))
        start = 0
        for group, size in enumerate(batch_sizes.tolist()):
            rows = slice(start, start := start + size)
            if trans_a and size:  # of a product over nothing cuBLAS promises no result
                written[group] = (a[rows].mT.float() @ b[rows].float()).bfloat16()
            elif size:
                matrix = b[group].mT if trans_b else b[group]
                written[rows] = (a[rows].float() @ matrix.float()).bfloat16()
        return c


def _as_contiguous(tensor: Tensor) -> Tensor:
    """What a kernel that counts from a tensor's address sees of it."""
    shape = tensor.shape
    return tensor.as_strided(shape, [shape[dim + 1 :].numel() for dim in range(len(shape))])


class OnCpu(CudaGroupedGemm):
    """The adapter, for tensors on the CPU in place of CUDA."""

    def rejections(self, problem: Problem) -> list[str]:
        return super().rejections(replace(problem, device="cuda"))


@pytest.fixture
def package(monkeypatch, distribution) -> Package:
    package, module = Package(), ModuleType("grouped_gemm")
    module.backend = package
    monkeypatch.setitem(sys.modules, "grouped_gemm", module)
    monkeypatch.setattr(torch.cuda, "device_of", package.device_of)
    monkeypatch.setattr(CudaGroupedGemm, "_home", None)
    distribution("stand-in", {"cpu.stand_in": f"{__name__}:OnCpu"})
    return package


@pytest.mark.usefixtures("package")
class TestOnStandIn(BackendParityTests):
    device, impl, required, width = "cpu", "stand_in", True, 8


# --- the adapter ----------------------------------------------------------------------------------


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return operands()


def test_writes_where_it_is_told_to(package, inputs):
    x, weight, grad_out = inputs
    backend, sizes = get_backend("cpu", "stand_in"), BatchSizes(COUNTS)
    out, grad = torch.full_like(grad_out, torch.nan), torch.full_like(weight, torch.nan)
    backend.forward(x, weight, sizes, trans_b=False, out=out)
    backend.weight_grad(x, grad_out, sizes, out=grad)
    assert [call.c is given for call, given in zip(package.calls, (out, grad), strict=True)] == [True] * 2
    assert [call.trans_a for call in package.calls] == [False, True]
    assert not grad[[1, 3]].any()


def strided(like: Tensor) -> Tensor:
    return like.new_full((*like.shape, 2), torch.nan)[..., 0]


def shifted(like: Tensor) -> Tensor:
    return like.new_full((like.numel() + 1,), torch.nan)[1:].view(like.shape)


@pytest.mark.parametrize("make", [strided, shifted])
def test_never_writes_where_it_would_go_wrong(package, inputs, make):
    x, weight, grad_out = inputs
    backend, sizes = get_backend("cpu", "stand_in"), BatchSizes(COUNTS)
    out, grad = make(grad_out), make(weight)
    assert backend.forward(x, weight, sizes, trans_b=False, out=out) is out
    assert backend.weight_grad(x, grad_out, sizes, out=grad) is grad
    assert [call.c for call in package.calls] == [None, None]
    assert compare(out, reference_gmm(x, weight, sizes.host), x.dtype).passed
    want = reference_grads(x, weight, sizes.host, grad_out)[1]
    assert compare(grad, want, x.dtype).passed
    backend.weight_grad(x, grad_out, sizes, out=grad, accumulate=True)
    assert compare(grad, 2 * want, x.dtype).passed
    assert package.calls[-1].c is None


def test_accumulates_nothing_for_an_empty_group(package, inputs):
    x, weight, grad_out = inputs
    main_grad = torch.ones(weight.shape)
    backend = get_backend("cpu", "stand_in")
    backend.weight_grad(x, grad_out, BatchSizes(COUNTS), out=main_grad, accumulate=True)
    assert torch.equal(main_grad[[1, 3]], torch.ones(2, 16, 24))
    assert not torch.equal(main_grad[0], torch.ones(16, 24))


# --- the fork -------------------------------------------------------------------------------------


@pytest.fixture
def fork(package, distribution) -> Package:
    distribution("nv_grouped_gemm", {}, version="1.1.4.post8")
    return package


@pytest.mark.usefixtures("fork")
def test_the_fork_serves_one_device_of_a_process(monkeypatch, inputs):
    x, weight, _ = inputs
    out = get_backend("cpu", "stand_in").gmm(x, weight, COUNTS)
    assert compare(out, reference_gmm(x, weight, torch.tensor(COUNTS)), x.dtype).passed
    monkeypatch.setattr(CudaGroupedGemm, "_home", torch.device("cuda:1"))
    with pytest.raises(NotImplementedError, match=r"nv_grouped_gemm made .* on cuda:1 and cannot use cpu"):
        get_backend("cpu", "stand_in").gmm(x, weight, COUNTS)


@pytest.mark.usefixtures("package")
def test_the_original_serves_every_device(monkeypatch, inputs):
    x, weight, _ = inputs
    monkeypatch.setattr(CudaGroupedGemm, "_home", torch.device("cuda:1"))
    get_backend("cpu", "stand_in").gmm(x, weight, COUNTS)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_registry", "no_gpu")
def test_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grouped_gemm", None)  # as if it were not installed
    assert f"\n    - {INSTALL}\n" in str(explain("cuda", PROBLEM))
    with pytest.raises(BackendUnavailableError, match="grouped_gemm is not installed"):
        get_backend("cuda", "cuda_grouped_gemm")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "ModuleNotFoundError('No module named grouped_gemm_backend', name='grouped_gemm_backend')",
            "ModuleNotFoundError: No module named grouped_gemm_backend",
        ),
        (
            "ImportError('grouped_gemm_backend.so: undefined symbol:\\n _ZN3c10')",
            "ImportError: grouped_gemm_backend.so: undefined symbol: _ZN3c10",
        ),
        ("SystemExit('no driver')", "SystemExit: no driver"),
    ],
)
def test_says_why_it_cannot_be_imported_and_tries_once(monkeypatch, distribution, error, text):
    monkeypatch.delitem(sys.modules, "grouped_gemm", raising=False)
    module = f"""
from pathlib import Path
with Path(__file__).with_suffix(".count").open("a") as count:
    count.write(".")
raise {error}
"""
    imports = distribution("grouped_gemm", {}, {"grouped_gemm": module}) / "grouped_gemm.count"
    CudaGroupedGemm().rejections(replace(PROBLEM, device="cpu"))
    assert not imports.exists()
    for _ in range(3):
        report = str(explain("cuda", PROBLEM))
    assert f"    - grouped_gemm cannot be imported (was it built for this torch?): {text}\n" in report
    assert imports.read_text() == "."
    refresh()
    explain("cuda", PROBLEM)
    assert imports.read_text() == ".."


@pytest.mark.usefixtures("package", "no_gpu")
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"device": "cpu"}, ["grouped_gemm computes on cuda, not on cpu"]),
        ({"dtype": torch.float16}, ["grouped_gemm takes torch.bfloat16, not torch.float16"]),
        ({"k": 12, "n": 12}, [f"inner or outer dimension 12; {BUILD}"]),
        ({"k": 8, "n": 4}, [f"inner or outer dimension 4; {BUILD}"]),
        ({"rows": 2**28, "k": 8, "n": 8}, [LARGE]),
        ({"k": 2**16, "n": 2**15}, [LARGE]),
        ({"rows": 0, "k": 0, "n": 0, "groups": 0}, []),
    ],
)
def test_says_what_it_does_not_take(change, reasons):
    assert CudaGroupedGemm().rejections(replace(PROBLEM, **change)) == reasons


@pytest.mark.usefixtures("package")
def test_says_what_the_device_lacks(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert CudaGroupedGemm().rejections(PROBLEM) == ["compute capability 7.5 < 8.0"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert CudaGroupedGemm().rejections(PROBLEM) == ["this torch is for ROCm; grouped_gemm needs CUDA"]


@pytest.mark.usefixtures("package")
def test_is_preferred_to_the_loop_only():
    from gmm_backends.eager import Eager
    from gmm_backends.megablocks_sparse import CudaMegablocksSparse

    priority = CudaGroupedGemm().priority(PROBLEM)
    assert Eager().priority(PROBLEM) < priority < CudaMegablocksSparse().priority(PROBLEM)
