"""cuda.triton: its plain kernels on the CPU under Triton's interpreter, and every kernel on a GPU.

The kernels for Hopper have no interpreter. Here it is shown that they compile for that chip; what they
compute is tested where one is.
"""

import sys

import pytest
import torch
from hardware import backend_or_skip
from interpreter import run_interpreted
from triton_operands import DTYPES, dirty, operands, outer, product

from gmm_backends import _cuda, _triton, triton_grouped
from gmm_registry import BatchSizes, Problem, gmm
from gmm_registry.ops import weight_grad
from gmm_registry.testing import compare

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")  # triton 3.9
needs_triton = pytest.mark.skipif(bool(_triton.missing_triton()), reason="; ".join(_triton.missing_triton()))


@pytest.fixture
def backend():
    return backend_or_skip("cuda", "triton")


# --- without a GPU --------------------------------------------------------------------------------


def ordinary(**changes):
    shape = {"rows": 65536, "groups": 256, "k": 2048, "n": 1024}
    return Problem("cuda", 0, **{"dtype": torch.bfloat16, **shape, **changes})


@pytest.mark.parametrize(
    ("changes", "hopper"),
    [
        ({}, 50),
        ({"direction": "grad_x"}, 50),
        ({"direction": "grad_x", "skew": 2}, 18),
        ({"direction": "grad_x", "skew": 4}, 50),
        ({"direction": "grad_x", "skew": 2, "rows": 512}, 50),
        ({"n": 6144}, 50),
        ({"n": 6144, "skew": 8}, 18),
        ({"n": 6144, "skew": 16}, 50),
        ({"n": 4096, "direction": "grad_w"}, 18),
        ({"n": 4096, "direction": "grad_w", "rows": 512}, 50),
        ({"direction": "grad_w"}, 50),
        ({"dtype": torch.float32}, 5),
    ],
)
def test_the_table_of_an_h200(monkeypatch, changes, hopper):
    """On other GPUs the shape makes no difference: nothing was measured there."""
    backend = triton_grouped.TritonGrouped()
    ampere = 5 if hopper == 5 else 15
    for capability, priority in (((9, 0), hopper), ((8, 0), ampere), ((10, 0), 5), (None, 5)):
        monkeypatch.setattr(_cuda, "capability", lambda *_, found=capability: found)
        assert backend.priority(ordinary(**changes)) == priority


@pytest.fixture
def on_hopper(monkeypatch):
    """Let every CUDA device be one, while nothing is known yet of the kernels for it."""
    known = (triton_grouped._hopper_kernels, triton_grouped._gluon_is_known)
    monkeypatch.setattr(_cuda, "capability", lambda *_: (9, 0))
    for function in known:
        function.cache_clear()
    yield torch.device("cuda", 0)
    for function in known:
        function.cache_clear()


@pytest.mark.parametrize(
    ("installed", "known"), [((3, 9), True), (None, True), ((3, 10), False), ((4, 0), False)]
)
def test_a_triton_that_nobody_tried_gets_the_plain_kernels(on_hopper, monkeypatch, caplog, installed, known):
    """Some versions of Triton compiled warp-specialised code that computed something else."""
    imported = []
    monkeypatch.setattr(triton_grouped, "import_module", imported.append)
    monkeypatch.setattr(triton_grouped, "triton_version", lambda: installed)
    triton_grouped._hopper_kernels(on_hopper)
    assert bool(imported) == known
    assert triton_grouped.TritonGrouped().priority(ordinary()) == (50 if known else 15)
    assert ("tried up to triton 3.9" in caplog.text) != known


def test_kernels_for_hopper_that_cannot_be_imported_are_a_warning(on_hopper, monkeypatch, caplog):
    def fail(name):
        raise TypeError("aggregate() takes no arguments")

    monkeypatch.setattr(triton_grouped, "import_module", fail)
    assert triton_grouped._hopper_kernels(on_hopper) is None
    assert "the plain Triton kernels are used on cuda:0" in caplog.text
    assert "TypeError: aggregate() takes no arguments" in caplog.text


def test_a_triton_that_cannot_be_imported_is_a_late_refusal(monkeypatch):
    triton_grouped._plain_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "gmm_backends.triton_grouped.launch_plain", None)
    with pytest.raises(NotImplementedError, match="triton cannot be imported"):
        triton_grouped._kernels(1, torch.empty(1, 8))


def test_refusals(monkeypatch):
    backend = triton_grouped.TritonGrouped()
    assert any("float64" in reason for reason in backend.rejections(ordinary(dtype=torch.float64)))
    monkeypatch.setattr(_cuda, "capability", lambda *_: (7, 5))
    assert "compute capability 7.5 < 8.0" in backend.rejections(ordinary())
    monkeypatch.setattr(triton_grouped, "missing_triton", lambda: ["triton is not installed"])
    assert "triton is not installed" in triton_grouped.TritonGrouped().rejections(ordinary())


@needs_triton
def test_what_the_kernels_for_hopper_can_address():
    from gmm_backends.triton_grouped import launch_hopper

    storage = torch.empty(1024, dtype=torch.bfloat16)
    assert storage.data_ptr() % 16 == 0
    assert launch_hopper.takes(storage.view(16, 64), storage.view(2, 8, 64))
    assert not launch_hopper.takes(storage[:960].view(16, 60))  # rows of 120 bytes
    assert not launch_hopper.takes(storage[1:961].view(15, 64))  # begins at an odd address
    assert not launch_hopper.takes(storage.view(16, 64), storage[4:964].view(15, 64))
    assert launch_hopper.takes(torch.empty(16, 60))  # rows of 240 bytes


@needs_triton
@pytest.mark.parametrize("row", [8, 16, 2048, 65536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ragged_descriptor_ends_with_the_group(dtype, row):
    """The address of an element, as the hardware sums it up in 64 bits, and the bound of its rows."""
    from gmm_backends.triton_grouped import launch_hopper

    rows = torch.empty(1, row, dtype=dtype)
    described = launch_hopper._ragged(rows, (64, 64))
    start, size, column = 12_345, 777, row - 1
    for r in (0, size - 1, size, size + 50):
        place = (launch_hopper._ENDLESS, start + size, launch_hopper._ENDLESS - size + r, column)
        inside = all(at < bound for at, bound in zip(place, described.shape, strict=True))
        assert inside == (r < size)
        address = sum(at * stride for at, stride in zip(place, described.strides, strict=True))
        assert address * dtype.itemsize % 2**64 == ((start + r) * row + column) * dtype.itemsize
    assert described.strides[0] * dtype.itemsize < 2**40  # TMA's limit
    assert all(stride * dtype.itemsize % 16 == 0 for stride in described.strides[:-1])


@needs_triton
def test_a_descriptor_keeps_no_tensor_and_takes_none_for_another():
    from gmm_backends.triton_grouped import launch_hopper

    storage = torch.empty(4096, dtype=torch.bfloat16)
    one = launch_hopper._whole(storage.view(4, 16, 64), (1, 64, 256))
    assert one is launch_hopper._whole(storage.view(4, 16, 64), (1, 64, 256))
    other = launch_hopper._whole(storage.view(8, 8, 64), (1, 64, 256))
    assert (one.shape, other.shape) == ([4, 16, 64], [8, 8, 64])
    assert launch_hopper._whole(storage.half().view(4, 16, 64), (1, 64, 256)).base.dtype == torch.float16
    assert not isinstance(one.base, torch.Tensor)


class Kernel:
    """Stand in for a compiled kernel: remember how often it was compiled, and what it was called with."""

    def __init__(self, name: str) -> None:
        self.__name__, self.compiled, self.calls = name, 0, []

    def warmup(self, *args, grid, **options):
        self.compiled += 1
        number = self.compiled
        return {(*grid, 1, 1): lambda *args: self.calls.append((number, args))}


def test_a_kernel_is_compiled_once_for_each_kind_of_call(monkeypatch):
    from gmm_backends.triton_grouped import call as module

    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module._thread, "bound", True, raising=False)
    one, other = Kernel("one"), Kernel("other")
    device, second = torch.device("cuda", 0), torch.device("cuda", 1)
    bf16, fp16 = (torch.bfloat16, *module.sixteenths(16)), (torch.float16, *module.sixteenths(16))
    odd = (torch.bfloat16, *module.sixteenths(17))
    calls = [(device, (64,), bf16), (device, (64,), fp16), (device, (128,), bf16), (second, (64,), bf16)]
    for where, constants, kind in [*calls, (device, (64,), odd), *calls]:
        module.call(one, 4, where, ("x",), constants, kind, num_warps=4)
    assert one.compiled == 5
    assert [number for number, _ in one.calls] == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert one.calls[0][1] == ("x", 64)
    module.call(other, 4, device, ("x",), (64,), bf16)
    assert (one.compiled, other.compiled) == (5, 1)
    assert len({module.sixteenths(number) for number in (1, 2, 16, 17, 32)}) == 3


def test_parts_are_made_of_long_groups_only(monkeypatch):
    monkeypatch.setattr(triton_grouped, "multiprocessors", lambda device: 132)
    x = torch.empty(65536, 1, device="meta")

    def part(*shape):
        return triton_grouped._part(x, torch.empty(shape, device="meta"))

    assert part(8, 512, 512) == 4096  # 128 programs for 264
    assert part(64, 512, 512) == 0  # enough groups
    assert part(8, 4096, 4096) == 0  # enough tiles
    assert part(128, 64, 64) == 0  # 512 rows a group: nothing to part
    monkeypatch.setattr(triton_grouped, "multiprocessors", lambda device: 0)  # not known
    assert part(8, 512, 512) == 0


@needs_triton
@pytest.mark.slow
def test_the_plain_kernels_without_a_gpu():
    assert run_interpreted("tests/interpreted") >= 150


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rows_compile_for_hopper(dtype, trans_b, dynamic):
    from gmm_backends.triton_grouped import hopper_rows, launch_hopper

    deep, wide = launch_hopper._ROWS["DEEP"], launch_hopper._WIDE
    signature = {
        "x": described(dtype, 64, deep),
        "weight": described(dtype, 1, wide, deep) if trans_b else described(dtype, 1, deep, wide),
        "out": described(dtype, 1, 1, 64, wide // 2),
        **dict.fromkeys(("groups", "wide", "inner"), "i32"),
    }
    constants = {"TRANS_B": trans_b, "WIDE": wide, **launch_hopper._ROWS, "DYNAMIC": dynamic}
    compile_for_hopper(hopper_rows.rows, signature, **constants)


@needs_triton
@pytest.mark.parametrize("part", [0, 1024])
@pytest.mark.parametrize(("out", "accumulate"), [("described", False), ("*fp32", False), ("*fp32", True)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_compile_for_hopper(dtype, out, accumulate, part):
    from gmm_backends.triton_grouped import hopper_products, launch_hopper

    deep, wide = launch_hopper._PRODUCTS["DEEP"], launch_hopper._WIDE
    signature = {
        "x": described(dtype, 1, 1, deep, 64),
        "grad_out": described(dtype, 1, 1, deep, wide),
        "out": described(dtype, 1, 64, wide) if out == "described" else out,
        **dict.fromkeys(("groups", "inner", "outer"), "i32"),
    }
    compile_for_hopper(
        hopper_products.products,
        signature,
        WIDE=wide,
        **launch_hopper._PRODUCTS,
        PART=part,
        DIRECT=out != "described",
        ACCUMULATE=accumulate,
    )


def described(dtype, *block):
    from triton.experimental.gluon import language as gl

    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compile_for_hopper(kernel, signature, **constants):
    """Compile for compute capability 9.0; the tensor cores' instruction and the shared memory must fit."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature.get(name, "*i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, values, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert "cp.async.bulk.tensor" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024


# --- on a GPU -------------------------------------------------------------------------------------


KERNELS = ("launch_plain", "launch_hopper")
SHAPES = {
    "whole tiles": ((256, 128, 384), 128, 512),
    "unequal": ((300, 0, 65, 64, 1, 0, 129), 200, 264),
    "equal": ((192, 192, 192), 136, 520),
    "equal and more than multiprocessors": ((64,) * 150, 72, 320),
    "narrow": ((100, 30), 8, 8),
    "tall": ((3000,), 64, 64),
    "many": (tuple(37 * e % 90 for e in range(200)), 72, 320),
}


@pytest.fixture(params=KERNELS)
def kernels(request, backend):
    """Return one of the two launchers."""
    module = pytest.importorskip(f"gmm_backends.triton_grouped.{request.param}")
    if request.param == "launch_hopper" and triton_grouped._hopper_kernels(torch.device("cuda")) is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is no Hopper")
    return module


def dtypes_of(kernels):
    return DTYPES if kernels.__name__.endswith("plain") else DTYPES[:2]


@pytest.mark.hardware
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_kernel_on_a_gpu(kernels, shape):
    counts, k, n = shape
    sizes = BatchSizes(counts)
    for dtype in dtypes_of(kernels):
        for trans_b in (False, True):
            x, weight, grad_out = operands(counts, k, n, dtype, "cuda", trans_b)
            out = dirty(len(x), n, dtype=dtype, device="cuda")
            kernels.rows(x, weight, sizes, trans_b, out)
            assert compare(out, product(x, weight, counts, trans_b), dtype).passed
        for out_dtype in {dtype, torch.float32}:
            for accumulate in (False, True):
                out = dirty(len(counts), k, n, dtype=out_dtype, device="cuda")
                want = outer(x, grad_out, counts) / 64
                if accumulate:
                    out.fill_(1)
                    want += 1
                kernels.products(x / 64, grad_out, sizes, out, accumulate)
                assert compare(out, want, dtype).passed
            parts = dirty(len(x) // 512 + len(counts), k, n, dtype=torch.float32, device="cuda")
            kernels.products(x / 64, grad_out, sizes, parts, False, 512)
            from gmm_backends.triton_grouped import launch_plain

            launch_plain.add_parts(parts, sizes, 512, out.fill_(1), True)
            assert compare(out, outer(x, grad_out, counts) / 64 + 1, dtype).passed


@pytest.mark.hardware
def test_long_groups_are_summed_in_parts(backend):
    x, _, grad_out = operands((60_000, 0, 5_000), 64, 96, torch.bfloat16, "cuda")
    grad_out = grad_out / 64
    assert triton_grouped._part(x, x.new_empty(3, 64, 96))
    grad = weight_grad(x, grad_out, [60_000, 0, 5_000], backend="triton")
    assert compare(grad, outer(x, grad_out, (60_000, 0, 5_000)), torch.bfloat16).passed
    assert torch.equal(grad, weight_grad(x, grad_out, [60_000, 0, 5_000], backend="triton"))


@pytest.mark.hardware
def test_a_captured_step_takes_new_counts(backend):
    """Megatron 1598: counts that change between replays of a CUDA graph."""
    layouts = [(300, 0, 84, 128), (0, 512, 0, 0), (128, 128, 128, 128)]
    x, weight, grad_out = operands(layouts[0], 256, 128, torch.bfloat16, "cuda")
    x.requires_grad_(), weight.requires_grad_()
    counts = torch.tensor(layouts[0], device="cuda")

    def step():
        out = gmm(x, weight, BatchSizes.from_device(counts), backend="triton")
        return out, *torch.autograd.grad(out, (x, weight), grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [tensor.detach() for tensor in step()]
    for layout in layouts:
        counts.copy_(torch.tensor(layout))
        graph.replay()
        got = [tensor.clone() for tensor in captured]
        for replayed, eager in zip(got, step(), strict=True):
            assert torch.equal(replayed, eager)


@pytest.mark.hardware
def test_one_row_of_a_wider_tensor(kernels):
    """Its stride says nothing, and need not be a multiple of 16 bytes."""
    x = torch.randn(1, 67, device="cuda", dtype=torch.bfloat16)[:, :64]
    _, weight, _ = operands((0, 1), 64, 32, torch.bfloat16, "cuda")
    out = dirty(1, 32, dtype=torch.bfloat16, device="cuda")
    kernels.rows(x, weight, BatchSizes([0, 1]), False, out)
    assert compare(out, product(x, weight, (0, 1)), torch.bfloat16).passed


@pytest.mark.hardware
def test_the_same_bits_each_time(backend):
    counts = (700, 0, 1, 323)
    x, weight, grad_out = operands(counts, 512, 384, torch.bfloat16, "cuda")
    sizes = BatchSizes(counts)
    first = gmm(x, weight, sizes, backend="triton"), weight_grad(x, grad_out, sizes, backend="triton")
    for _ in range(10):
        assert torch.equal(gmm(x, weight, sizes, backend="triton"), first[0])
        assert torch.equal(weight_grad(x, grad_out, sizes, backend="triton"), first[1])
