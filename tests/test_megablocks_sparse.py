"""The block-sparse backend: as a grouped matmul, and its products on their own.

The products are tested three ways: as torch operations, as Triton kernels on CUDA, and as Triton kernels
under Triton's interpreter on the CPU. The last needs a variable set before triton is imported, so one test
starts this module again in a process of its own.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from hardware import backend_or_skip
from interpreter import run_interpreted
from torch.utils._python_dispatch import TorchDispatchMode

from gmm_backends import _triton as requirements
from gmm_backends.megablocks_sparse import CudaMegablocksSparse, blocks
from gmm_backends.megablocks_sparse.products import DTYPES
from gmm_registry import (
    BackendKey,
    BackendUnavailableError,
    BatchSizes,
    Problem,
    explain,
    get_backend,
    gmm,
)
from gmm_registry.contract import BLOCK, GroupedMatmulBackend, Topology
from gmm_registry.testing import (
    BackendParityTests,
    Case,
    compare,
    reference_gmm,
    reference_grads,
)
from gmm_registry.testing.parity import differences, expected, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HARDWARE = pytest.mark.hardware
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")  # triton 3.9
needs_triton = pytest.mark.skipif(
    bool(requirements.missing_triton()), reason="; ".join(requirements.missing_triton())
)


def cuda() -> GroupedMatmulBackend:
    return backend_or_skip("cuda", "megablocks_sparse")


# --- as a grouped matmul --------------------------------------------------------------------------


class TestMegablocksSparseOnCpu(BackendParityTests):
    device, impl, required, width = "cpu", "megablocks_sparse", True, BLOCK


@HARDWARE
class TestMegablocksSparseOnCuda(BackendParityTests):
    device, impl, width = "cuda", "megablocks_sparse", BLOCK


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=HARDWARE)])
def backend(request):
    return cuda() if request.param == "cuda" else get_backend("cpu", "megablocks_sparse")


COUNTS = {
    "first empty": (0, 200, 31),
    "middle empty": (5, 0, 0, 130),
    "last empty": (300, 7, 0),
    "one group": (150,),
    "groups of one": (1,) * 5,
    "about a block": (127, 128, 129),
    "whole blocks": (128, 384, 256),
    "a tile spans groups": (64, 1, 63, 0, 129),  # DeepGEMM 450
}


@pytest.mark.parametrize(("k", "n", "trans_b"), [(128, 384, False), (384, 256, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_matches_the_reference(backend, counts, k, n, dtype, trans_b):
    case = Case("sparse", counts, k, n, dtype, trans_b)
    inputs = case.inputs()
    found = differences(run(backend, case, inputs), expected(case, inputs), case)
    assert {name for name, difference in found.items() if not difference.passed} == set()


@pytest.mark.parametrize(("k", "n"), [(192, 128), (128, 192), (192, 192)])
def test_refuses_what_is_no_multiple_of_the_block(backend, k, n):
    """megablocks 114: a width of 192 ran with a block of 128 assumed."""
    reasons = ["inner or outer dimension 192 is no multiple of the block, 128"]
    assert backend.rejections(Problem(backend.device, None, torch.float32, 8, 2, k, n)) == reasons
    x, weight = torch.ones(8, k, device=backend.device), torch.ones(2, k, n, device=backend.device)
    with pytest.raises(BackendUnavailableError, match="192 is no multiple of the block, 128"):
        gmm(x, weight, [4, 4], backend="megablocks_sparse")
    with pytest.raises(ValueError, match=r"width 192 .* multiples of the block, 128"):
        Topology.of_groups(torch.tensor([128, 256]), 192, backend.device)


def test_names_the_dtype_it_refuses(backend):
    (reason,) = backend.rejections(Problem(backend.device, None, torch.float64, 8, 2, 128, 128))
    assert "not torch.float64" in reason


def test_comes_after_what_need_not_pad():
    """It is there to be asked for; torch's own grouped_mm and, on the CPU, the loop are faster."""
    problem = Problem("cpu", None, torch.float32, rows=8, groups=2, k=128, n=128)
    ranked = [verdict.key.impl for verdict in explain("cpu", problem).verdicts]
    assert ranked.index("megablocks_sparse") > ranked.index("eager")
    assert CudaMegablocksSparse().priority(problem) < 10


def test_makes_the_topology_once_for_all_products(backend, monkeypatch):
    made = []
    of_groups = Topology.of_groups
    monkeypatch.setattr(Topology, "of_groups", lambda *args: made.append(args) or of_groups(*args))
    case = Case("once", (3, 0, 200), 128, 256, torch.float32)
    x, weight, counts, grad_out = case.inputs().to(backend.device)
    x.requires_grad_(), weight.requires_grad_()
    backend.gmm(x, weight, BatchSizes(counts)).backward(grad_out)
    assert len(made) == 1


# --- the products ---------------------------------------------------------------------------------


PRODUCTS = (
    [pytest.param("kernels", id="interpreter")]
    if INTERPRETED
    else [pytest.param("torch", id="torch"), pytest.param("kernels", id="cuda", marks=HARDWARE)]
)


@pytest.fixture(params=PRODUCTS)
def products(request):
    """Return the backend; its device is that of the tensors it shall have."""
    if request.param == "torch":
        return get_backend("cpu", "megablocks_sparse")
    if not INTERPRETED:
        return cuda()
    return CudaMegablocksSparse().bind(BackendKey("cuda", "megablocks_sparse"), "cpu")


def topology_of(mask: list[str], device: str) -> Topology:
    """Draw a matrix of blocks: a row a string, "x" a block."""
    there = torch.tensor([[block == "x" for block in row] for row in mask])
    rows, columns = there.nonzero(as_tuple=True)

    def offsets(along: int) -> torch.Tensor:
        return torch.nn.functional.pad(there.sum(along).cumsum(0), (1, 0))

    indices = offsets(1), rows, columns, offsets(0), columns.argsort(stable=True)
    shape = (there.shape[0] * BLOCK, there.shape[1] * BLOCK)
    return Topology(shape, *(index.to(device, torch.int32) for index in indices))


TOPOLOGIES = {
    "groups, width 128": lambda device: Topology.of_groups(torch.tensor([0, 256, 128, 0]), 128, device),
    "groups, width 256": lambda device: Topology.of_groups(torch.tensor([256, 0, 384]), 256, device),
    "groups, width 384": lambda device: Topology.of_groups(torch.tensor([128, 256]), 384, device),
    "one group": lambda device: Topology.of_groups(torch.tensor([256]), 256, device),
    "any blocks": lambda device: topology_of(["x.xx.", ".....", "xxx..", "...x.", "x...."], device),
    "odd rows, even on average": lambda device: topology_of(["x..", "xxx", "xx."], device),
}


def dense(values: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Write the sparse matrix out, (M, N) fp64 on the CPU."""
    m, n = topology.shape
    tiles = torch.zeros(m // BLOCK, n // BLOCK, BLOCK, BLOCK, dtype=torch.float64)
    tiles[topology.rows.long().cpu(), topology.columns.long().cpu()] = values.double().cpu()
    return tiles.transpose(1, 2).reshape(m, n)


def uniform(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    return ((torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1) * scale).to(device, dtype)


def check_products(products, topology, hidden, dtype, **tile):
    (m, n), device = topology.shape, topology.rows.device
    x = uniform(m, hidden, dtype=dtype, device=device)
    weight = uniform(n, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    values = uniform(len(topology.rows), BLOCK, BLOCK, dtype=dtype, device=device, scale=n**-0.5)
    matrix, mask = dense(values, topology), dense(torch.ones_like(values), topology)
    got = products.sdd(x, weight, topology, **tile)
    assert got.dtype == dtype
    assert compare(dense(got, topology), x.double().cpu() @ weight.double().cpu().T * mask, dtype).passed
    got = products.dsd(values, weight, topology, **tile)
    assert got.dtype == dtype
    assert compare(got, matrix @ weight.double().cpu(), dtype).passed
    got = products.dsd_t(values, x, topology, **tile)
    assert got.dtype == dtype
    assert compare(got, matrix.T @ x.double().cpu(), dtype).passed
    assert not got.cpu()[~mask.any(0)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_products(products, topology, dtype):
    check_products(products, topology(products.device), 128, dtype)


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(1, torch.float32), (33, torch.bfloat16), (100, torch.float16), (320, torch.bfloat16)],
    ids=str,
)
def test_products_of_any_hidden_size(products, hidden, dtype):
    """H is a multiple neither of the block nor of a tile."""
    check_products(products, TOPOLOGIES["groups, width 256"](products.device), hidden, dtype)
    check_products(products, TOPOLOGIES["any blocks"](products.device), hidden, dtype)


@pytest.mark.parametrize("mask", [["..", "..", ".."], [], ["x."]], ids=["no block", "no row", "no hidden"])
def test_products_of_nothing(products, mask):
    topology = (
        topology_of(mask, products.device)
        if mask
        else Topology.of_groups(torch.tensor([0, 0]), BLOCK, products.device)
    )
    hidden = 0 if mask == ["x."] else 64
    (m, n), count = topology.shape, len(topology.rows)
    x, weight = (torch.ones(rows, hidden, device=products.device) for rows in (m, n))
    values = torch.ones(count, BLOCK, BLOCK, device=products.device)
    assert torch.equal(products.sdd(x, weight, topology), torch.zeros_like(values))
    assert torch.equal(products.dsd(values, weight, topology), torch.zeros_like(x))
    assert torch.equal(products.dsd_t(values, x, topology), torch.zeros_like(weight))


def test_products_refuse_what_does_not_fit(products):
    """A kernel would read past an end."""
    topology = Topology.of_groups(torch.tensor([128, 256]), 128, products.device)
    x, weight = (torch.ones(rows, 64, device=products.device) for rows in topology.shape)
    values = torch.ones(3, BLOCK, BLOCK, device=products.device)
    for product, operands in (
        (products.sdd, (x[:-1], weight)),
        (products.sdd, (x, weight[:, :32])),
        (products.sdd, (x[:, 0], weight[:, 0])),
        (products.dsd, (values[:2], weight)),
        (products.dsd, (values, x)),
        (products.dsd_t, (values, weight)),
        (products.dsd_t, (values.view(3, -1), x)),
    ):
        with pytest.raises(ValueError, match=r"do not fit a topology of \(384, 256\) with 3 blocks"):
            product(*operands, topology)
    with pytest.raises(TypeError, match=r"torch\.float32 and torch\.float16"):
        products.sdd(x, weight.half(), topology)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        products.sdd(x.double(), weight.double(), topology)
    with pytest.raises(ValueError, match=r"cpu and meta|cuda:0 and meta"):
        products.sdd(x, weight.to("meta"), topology)


def test_products_of_strided_operands(products):
    """An expanded gradient, as sum() gives, and columns of a wider tensor."""
    topology = Topology.of_groups(torch.tensor([128, 256]), 128, products.device)
    ones = torch.ones((), device=products.device)
    wide = uniform(256, 128, dtype=torch.float32, device=products.device)
    got = products.sdd(ones.expand(384, 64), wide[:, 64:], topology)
    x = torch.ones(384, 64, device=products.device)
    assert torch.equal(got, products.sdd(x, wide[:, 64:].clone(), topology))
    got = products.dsd(ones.expand(3, BLOCK, BLOCK), wide[:, 64:], topology)
    assert compare(got[:128], wide[:128, 64:].sum(0).expand(128, 64), torch.bfloat16).passed


def test_products_are_derivatives_of_each_other(products):
    """Of ``sum(dsd(sdd(x, w1), w2))``, by hand, against autograd through the dense matrix."""
    topology = Topology.of_groups(torch.tensor([128, 0, 256]), 128, products.device)
    (m, n), hidden = topology.shape, 64
    x = uniform(m, hidden, dtype=torch.float32, device=products.device)
    w1, w2 = (uniform(n, hidden, dtype=torch.float32, device=products.device) * s for s in (0.1, 0.2))
    values = products.sdd(x, w1, topology)
    grad_out = torch.ones_like(products.dsd(values, w2, topology))
    grad_values = products.sdd(grad_out, w2, topology)
    got = (
        products.dsd(grad_values, w1, topology),
        products.dsd_t(grad_values, x, topology),
        products.dsd_t(values, grad_out, topology),
    )
    leaves = [tensor.double().cpu().requires_grad_() for tensor in (x, w1, w2)]
    mask = dense(torch.ones_like(values), topology)
    want = torch.autograd.grad(((leaves[0] @ leaves[1].T * mask) @ leaves[2]).sum(), leaves)
    for g, w in zip(got, want, strict=True):
        assert compare(g, w, torch.float32).passed


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_grouped_matmul(products, dtype, trans_b):
    """What the adapter makes of the products, on a device where no registry would bind it."""
    x, weight, counts, grad_out = Case("raw", (0, 130, 5), 128, 256, dtype, trans_b).inputs()
    want, (_, want_grad) = (
        reference_gmm(x, weight, counts, trans_b),
        reference_grads(x, weight, counts, grad_out, trans_b),
    )
    x, weight, grad_out = (tensor.to(products.device) for tensor in (x, weight, grad_out))
    sizes = BatchSizes(counts)
    out = torch.full_like(grad_out, torch.nan)
    assert products.forward(x, weight, sizes, trans_b=trans_b, out=out) is out
    assert compare(out, want, dtype).passed
    assert torch.equal(products.forward(x, weight, sizes, trans_b=trans_b), out)
    left, right = (grad_out, x) if trans_b else (x, grad_out)
    assert compare(products.weight_grad(left, right, sizes), want_grad, dtype).passed
    for into in (
        torch.full_like(weight, torch.nan, dtype=torch.float32),
        torch.full_like(weight, torch.nan),
        torch.full_like(weight.mT.contiguous(), torch.nan).mT,
    ):
        assert products.weight_grad(left, right, sizes, out=into) is into
        assert compare(into, want_grad, dtype).passed
        products.weight_grad(left, right, sizes, out=into, accumulate=True)
        assert compare(into, 2 * want_grad, dtype).passed


def test_fp32_gradient_is_not_rounded(products):
    """An fp32 main_grad gets the fp32 sum of bf16 operands: 256 + 1 is no bf16."""
    x = torch.ones(257, BLOCK, dtype=torch.bfloat16, device=products.device)
    out = torch.zeros(1, BLOCK, BLOCK, device=products.device)
    products.weight_grad(x, x, BatchSizes([257]), out=out)
    assert torch.equal(out, torch.full_like(out, 257))


def test_torch_products_copy_one_group_at_a_time():
    """With blocks gathered for all of the sparse matrix at once, memory would grow with B * 128 * H."""
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not func.is_view:
                made.append(result.numel())
            return result

    groups, hidden = 16, 256
    topology = Topology.of_groups(torch.tensor([128] * groups), 128, "cpu")
    x = torch.ones(groups * 128, hidden, dtype=torch.bfloat16)
    values = torch.ones(groups, BLOCK, BLOCK, dtype=torch.bfloat16)
    for product, operands in ((blocks.sdd, (x, x)), (blocks.dsd, (values, x)), (blocks.dsd_t, (values, x))):
        made.clear()
        with Sizes():
            out = product(*operands, topology)
        made.remove(out.numel())
        assert max(made) <= BLOCK * max(BLOCK, hidden)


# --- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(256, 64), (128, 64), (256, 32)])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_every_tile(products, topology, n, k):
    launch = products._products()
    if launch is blocks:
        pytest.skip("torch operations have no tiles")
    tile = launch.Tile(n, k, band=2, warps=8, stages=2)
    check_products(launch, topology(products.device), 80, torch.float16, tile=tile)


@needs_triton
@pytest.mark.slow
def test_the_kernels_without_a_gpu():
    """All tests of the products, on the CPU, under Triton's interpreter."""
    assert run_interpreted(__file__, "-k", "interpreter") >= 50


TARGETS = {  # compute capability or architecture, bytes of shared memory a program may have
    "cuda 80": ("cuda", 80, 32, 163 * 1024),
    "cuda 89": ("cuda", 89, 32, 99 * 1024),
    "cuda 90": ("cuda", 90, 32, 227 * 1024),
    "cuda 100": ("cuda", 100, 32, 227 * 1024),
    "hip gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_kernels_compile_and_fit(target, dtype, monkeypatch, tmp_path):
    """Compiling needs no GPU; what the interpreter takes, the compiler of an architecture may not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gmm_backends.megablocks_sparse import kernels, launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    *architecture, shared = target
    tile = launch.fitting(dtype, shared)
    element = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = dict.fromkeys(("x", "weight", "values", "dense", "out"), element)
    types |= dict.fromkeys(("rows", "columns", "offsets", "blocks", "sources"), "*i32")
    types |= dict.fromkeys(("hidden", "tall", "cells"), "i32")
    common = {"BLOCK": BLOCK, "K": tile.k, "BAND": tile.band, "EVEN": False}
    summed = {**common, "N": tile.n, "ACCUMULATE": True}
    for kernel, constants, stages in (
        (kernels.sdd, {**common, "WIDE": tile.n // BLOCK}, tile.stages),
        (kernels.sdd, {**common, "WIDE": 1}, tile.stages),
        (kernels.dsd, {**summed, "TRANSPOSED": False, "blocks": None}, 2 * tile.stages - 1),
        (kernels.dsd, {**summed, "TRANSPOSED": True}, 2 * tile.stages - 1),
    ):
        signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if signature[name] == element or name == "hidden"
        }
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget(*architecture),
            options={"num_warps": tile.warps, "num_stages": stages},
        )
        assert compiled.metadata.shared <= shared


OVER_31_BITS = {
    "values": ([128 * 1025], 128 * 128, 64),
    "rows * hidden": ([128 * 1025], 128, 129 * 128),
    "groups * width * hidden": ([0] * 1024 + [128], 128, 129 * 128),  # DeepSpeed 8261, axolotl 3865
}


@HARDWARE
@pytest.mark.parametrize(("counts", "width", "hidden"), OVER_31_BITS.values(), ids=OVER_31_BITS)
def test_offsets_beyond_31_bits(counts, width, hidden):
    backend = cuda()
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    topology = Topology.of_groups(torch.tensor(counts), width, "cuda")
    m, n = topology.shape
    assert max(len(topology.rows) * BLOCK * BLOCK, m * hidden, n * hidden) > 2**31
    x, weight = (torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda") for rows in (m, n))
    x[-1, -1] = weight[-1, -1] = 1
    values = backend.sdd(x, weight, topology)
    for result in (values, backend.dsd(values, weight, topology), backend.dsd_t(values, x, topology)):
        assert result.flatten()[-1] == 1
        assert torch.count_nonzero(result) == 1


STK = """
import sys
import stk
import torch
inputs, outputs = sys.argv[1:]
x, weight, shape, rows, columns, offsets = torch.load(inputs)
data = torch.empty(len(rows), 128, 128, dtype=x.dtype, device=x.device)
topology = stk.Matrix(shape, data, rows.short(), columns.short(), offsets)
sparse = stk.ops.sdd(x, weight.t(), topology)
torch.save([sparse.data, stk.ops.dsd(sparse, weight), stk.ops.dsd(sparse.t(), x)], outputs)
"""


@HARDWARE
def test_equals_stk(tmp_path):
    """The library of the paper, in a process of its own: on a newer triton its kernels end the process."""
    backend = cuda()
    topology = Topology.of_groups(torch.tensor([256, 0, 128, 384]), 256, "cuda")
    x, weight = (
        uniform(rows, 256, dtype=torch.float16, device="cuda", scale=1 / 16) for rows in topology.shape
    )
    inputs, outputs = tmp_path / "inputs", tmp_path / "outputs"
    torch.save((x, weight, topology.shape, topology.rows, topology.columns, topology.offsets), inputs)
    command = [sys.executable, "-c", STK, str(inputs), str(outputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"stk does not work here: {(done.stderr.strip() or 'killed').splitlines()[-1]}")
    values = backend.sdd(x, weight, topology)
    ours = values, backend.dsd(values, weight, topology), backend.dsd_t(values, x, topology)
    for got, want in zip(ours, torch.load(outputs), strict=True):
        assert compare(got, want, torch.float16).passed


# --- triton: optional, and imported late ----------------------------------------------------------


def test_triton_is_not_imported_before_it_multiplies():
    script = """
import sys
import torch
from gmm_registry import Problem, explain, get_backend, gmm, list_backends
list_backends()
for device in ("cpu", "cuda"):
    explain(device)
    explain(device, Problem(device, None, torch.float32, 8, 2, 128, 128))
gmm(torch.ones(4, 128), torch.ones(2, 128, 128), [1, 3], backend="megablocks_sparse")
print(sorted(name for name in sys.modules if name.partition(".")[0] == "triton"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def refusals() -> list[str]:
    return CudaMegablocksSparse().rejections(Problem("cuda", None, torch.bfloat16, 8, 2, 128, 128))


@pytest.mark.usefixtures("no_gpu")
def test_says_that_triton_is_missing(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    assert refusals() == ["triton is not installed: pip install 'gmm_registry[triton]'"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", object())  # has no __spec__
    assert refusals() == ["triton is not installed: pip install 'gmm_registry[triton]'"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("installed", "reasons"),
    [
        ({"triton": "3.5.1"}, ["triton 3.5.1 < 3.6, which torch 2.10 brings"]),
        ({"pytorch-triton-rocm": "3.4.0+git1"}, ["triton 3.4.0+git1 < 3.6, which torch 2.10 brings"]),
        ({"triton": "3.6.0"}, []),
        ({"triton": "3.10.0"}, []),
        ({"triton": "4.0"}, []),
        ({"triton": "unknown"}, []),
        ({}, []),
    ],
)
def test_says_that_triton_is_too_old(monkeypatch, installed, reasons):
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(requirements, "find_spec", lambda name: name)
    monkeypatch.setattr(requirements, "version", version)
    assert refusals() == reasons


def test_names_the_compute_capability(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    assert "compute capability 7.5 < 8.0" in refusals()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not any("capability" in reason for reason in refusals())


def test_a_triton_that_cannot_be_imported_is_a_late_refusal(monkeypatch, tmp_path):
    """Automatic choice then goes on to the next backend."""
    (tmp_path / "triton.py").write_text("raise SystemExit('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("triton", *(f"gmm_backends.megablocks_sparse.{name}" for name in ("kernels", "launch"))):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for name in ("kernels", "launch"):
        monkeypatch.delattr(f"gmm_backends.megablocks_sparse.{name}", raising=False)
    topology = Topology.of_groups(torch.tensor([128]), 128, "cpu")
    with pytest.raises(NotImplementedError, match=r"triton cannot be imported .*no driver"):
        CudaMegablocksSparse().sdd(torch.ones(128, 8), torch.ones(128, 8), topology)
