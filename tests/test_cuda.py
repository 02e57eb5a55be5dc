"""What only a CUDA device can show."""

import subprocess
import sys

import pytest
import torch
from hardware import backend_or_skip
from test_layers import FORMS, check_against_dense, make

from gmm_registry import BatchSizes, gmm

pytestmark = pytest.mark.hardware


@pytest.fixture(params=["eager", "torch_grouped_mm", "triton", "quack"])
def backend(request):
    return backend_or_skip("cuda", request.param)


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


def test_a_stream_reads_no_form_that_another_is_still_making(backend):
    if backend.impl == "eager":
        pytest.skip("the loop over groups reads the counts on the host")
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16)
    counts = torch.tensor([10, 0, 50, 4], device="cuda")
    want = gmm(x, weight, BatchSizes.from_device(counts), backend=backend.impl)  # compiles
    sizes = BatchSizes.from_device(counts)
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2**31)  # more than a second
        gmm(x, weight, sizes, backend=backend.impl)
    with torch.cuda.stream(free):
        got = gmm(x, weight, sizes, backend=backend.impl)
    free.synchronize()
    assert not busy.query()
    assert torch.equal(got, want)
    torch.cuda.synchronize()


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


@pytest.fixture
def cuda():
    return backend_or_skip("cuda").device


@pytest.mark.parametrize(("mlp_type", "mlp_impl", "memory_optimized_mlp"), FORMS)
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(1, 1, 5), (8, 2, 20), (8, 4, 40), (8, 2, 0)])
def test_layers_equal_the_dense_reference(
    cuda, mlp_type, mlp_impl, memory_optimized_mlp, experts, top_k, tokens
):
    module = make(
        mlp_type=mlp_type,
        mlp_impl=mlp_impl,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=experts,
        moe_top_k=top_k,
        device=cuda,
    )
    check_against_dense(module, torch.randn(tokens, 128, device=cuda))


def bf16_layer(backend, **arguments):
    if backend.impl == "eager":
        pytest.skip("the loop over groups reads the counts on the host")
    return make(
        mlp_type="glu",
        moe_num_experts=8,
        moe_top_k=2,
        device="cuda",
        dtype=torch.bfloat16,
        backend=backend.impl,
        **arguments,
    )


@pytest.mark.parametrize("memory_optimized_mlp", [False, True])
def test_a_grouped_layer_needs_no_synchronisation(backend, memory_optimized_mlp):
    module = bf16_layer(backend, memory_optimized_mlp=memory_optimized_mlp)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module(x).sum().backward()  # what is made once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("memory_optimized_mlp", [False, True])
def test_a_captured_layer_routes_anew_at_each_replay(backend, memory_optimized_mlp):
    """Megatron 1598: the counts of a CUDA graph are those of the replay, forward and backward."""
    module = bf16_layer(backend, memory_optimized_mlp=memory_optimized_mlp)
    x = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = (x, *module.parameters())

    def step():
        out = module(x)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # what is made once is not captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(512, 128, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        for got, want in zip(replayed, step(), strict=True):
            assert torch.equal(got, want)


def test_a_layer_gives_the_same_bits_each_time(cuda):
    module = make(mlp_type="glu", moe_num_experts=8, moe_top_k=4, device=cuda, backend="torch_grouped_mm")
    x = torch.randn(512, 128, device=cuda)
    first = module(x)
    for _ in range(5):
        assert torch.equal(module(x), first)
