"""What gmm promises whatever the backend: values, gradients, memory, refusals, transformations.

Tests that come from a fault somebody met name where it was reported.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gmm_registry
from gmm_backends.eager import Eager
from gmm_registry import BackendUnavailableError, BatchSizes, Problem, get_backend, gmm, plan
from gmm_registry.ops import gmm_into
from gmm_registry.registry import choice
from gmm_registry.testing import TOLERANCES, compare, reference_gmm, reference_grads

DTYPES = tuple(dtype for dtype in TOLERANCES if dtype != torch.float64)


@pytest.fixture(params=["eager", "torch_grouped_mm"], scope="module")
def backend(request):
    """Name each backend that must run on this CPU."""
    try:
        get_backend("cpu", request.param)
    except BackendUnavailableError as error:
        if hasattr(torch.nn.functional, "grouped_mm"):
            raise
        pytest.skip(str(error))
    return request.param


def leaves(counts, k, n, dtype=torch.float32, trans_b=False, seed=0):
    """Make x and weight that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(counts), n, k) if trans_b else (len(counts), k, n)
    x = torch.randn(sum(counts), k, generator=generator).to(dtype)
    weight = torch.randn(shape, generator=generator).to(dtype) / max(k, 1) ** 0.5
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@st.composite
def problems(draw):
    sizes = st.one_of(st.just(0), st.integers(0, 9))
    counts = draw(st.lists(sizes, min_size=1, max_size=6))
    k, n = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    dtype, trans_b = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    layout = draw(st.sampled_from(("contiguous", "transposed", "columns", "offset")))
    return counts, k, n, dtype, trans_b, layout, draw(st.integers(0, 2**16))


def laid_out(tensor, layout):
    """Put the same values into memory in another way."""
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "columns":
        return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]
    if layout == "offset":
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    return tensor


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_any_problem_equals_the_reference(backend, problem):
    counts, k, n, dtype, trans_b, layout, seed = problem
    x, weight = (
        laid_out(t.detach(), layout).requires_grad_() for t in leaves(counts, k, n, dtype, trans_b, seed)
    )
    out = gmm(x, weight, counts, trans_b, backend=backend)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    got = (out, *torch.autograd.grad(out, (x, weight), grad_out))
    counts = torch.tensor(counts)
    want = (
        reference_gmm(x, weight, counts, trans_b),
        *reference_grads(x, weight, counts, grad_out, trans_b),
    )
    for g, w in zip(got, want, strict=True):
        assert compare(g, w, dtype).passed


def test_fp64_gradients_are_exact_on_eager_and_refused_elsewhere():
    """pytorch 159547: the set of dtypes differs by backend and version."""
    x, weight = leaves([2, 0, 1], 4, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *a: gmm(*a, [2, 0, 1]), (x, weight))
    assert torch.autograd.gradgradcheck(lambda *a: gmm(*a, [2, 0, 1]), (x, weight))
    with pytest.raises(BackendUnavailableError, match="float64"):
        gmm(x, weight, [2, 0, 1], backend="torch_grouped_mm")


def test_gradients_have_the_shapes_of_their_inputs(backend):
    """pytorch 159620: the gradient had the wrong inner dimension."""
    x, weight = leaves([1, 3], 8, 16, trans_b=True)
    gmm(x, weight, torch.tensor([1, 3]), trans_b=True, backend=backend).sum().backward()
    assert x.grad.shape == (4, 8)
    assert weight.grad.shape == (2, 16, 8)


def test_transposed_leaf_gets_its_gradient_in_its_own_layout(backend):
    """vllm-ascend 12512, twinkle 205: w = leaf(2, 5, 8).transpose(1, 2)."""
    leaf = torch.randn(2, 5, 8, requires_grad=True)
    x = torch.randn(4, 8)
    out = gmm(x, leaf.transpose(1, 2), [1, 3], backend=backend)
    out.sum().backward()
    torch.testing.assert_close(out, gmm(x, leaf, [1, 3], trans_b=True, backend=backend))
    assert leaf.grad.is_contiguous()


def test_frozen_operands_save_nothing():
    """TransformerEngine 1258: with a frozen weight, as under LoRA, no rows stay alive for a gradient."""
    x, weight = leaves([2, 3], 8, 16)
    for frozen, kept in ((weight, weight), (x, x)):
        frozen.requires_grad_(False)
        saved = []

        def save(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            gmm(x, weight, [2, 3])
        assert [t.shape for t in saved if t.is_floating_point()] == [kept.shape]
        frozen.requires_grad_(True)


def test_counts_are_copied(backend):
    """Whoever reuses the tensor of counts before the backward changes nothing."""
    x, weight = leaves([2, 3], 8, 16)
    counts = torch.tensor([2, 3])
    out = gmm(x, weight, counts, backend=backend)
    want = torch.autograd.grad(out.sum(), weight, retain_graph=True)[0]
    counts.fill_(99)
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], want)


def test_recomputation_gives_the_same(backend):
    x, weight = leaves([2, 0, 3], 8, 16)
    plain = torch.autograd.grad(gmm(x, weight, [2, 0, 3], backend=backend).sum(), (x, weight))
    out = checkpoint(lambda *a: gmm(*a, [2, 0, 3], backend=backend), x, weight, use_reentrant=False)
    for got, want in zip(torch.autograd.grad(out.sum(), (x, weight)), plain, strict=True):
        assert torch.equal(got, want)


def test_inductor_compiles_once_for_all_counts(backend):
    """prime-rl 996, transformers 47991, through the compiler that users have."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def layer(x, weight, counts):
        return torch.nn.functional.silu(gmm(x, weight, counts, backend=backend)) * 2

    x, weight = leaves([2, 0, 2], 8, 16)
    for counts in (torch.tensor([2, 0, 2]), torch.tensor([0, 1, 3])):
        out = layer(x, weight, counts)
        want = torch.nn.functional.silu(gmm(x, weight, counts, backend=backend)) * 2
        torch.testing.assert_close(out, want)
        got, wanted = (torch.autograd.grad(o.sum(), (x, weight)) for o in (out, want))
        torch.testing.assert_close(got, wanted)
    assert counter.frame_count == 1


def test_compiled_call_reports_wrong_counts():
    compiled = torch.compile(gmm, fullgraph=True, backend="aot_eager")
    x, weight = leaves([2, 2], 8, 16)
    with pytest.raises(ValueError, match="sum to 3, but x has 4 rows"):
        compiled(x, weight, torch.tensor([1, 2]))


def test_batch_sizes_pass_through_compiled_code_with_their_forms():
    compiled = torch.compile(gmm, fullgraph=True, backend="aot_eager")
    x, weight = leaves([2, 2], 8, 16)
    sizes = BatchSizes([2, 2])
    torch.testing.assert_close(compiled(x, weight, sizes), gmm(x, weight, sizes))


def test_meta_tensors_need_no_backend():
    x, weight = (tensor.to("meta") for tensor in leaves([2, 2], 8, 16))
    out = gmm(x, weight, [2, 2])
    assert out.shape == (4, 16)
    assert out.is_meta


def test_weight_and_rows_must_share_a_device():
    x, weight = leaves([2, 2], 8, 16)
    with pytest.raises(ValueError, match="x is on cpu, but weight is on meta"):
        gmm(x, weight.to("meta"), [2, 2])


def test_backend_argument_is_a_name():
    x, weight = leaves([2, 2], 8, 16)
    with pytest.raises(TypeError, match="Eager"):
        gmm(x, weight, [2, 2], backend=get_backend("cpu", "eager"))


def test_bf16_accumulates_in_fp32(backend):
    """The sum of 4096 ones is not 256, where bf16 stops counting."""
    x, weight = torch.ones(3, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, 8, dtype=torch.bfloat16)
    assert torch.equal(gmm(x, weight, [3], backend=backend), torch.full((3, 8), 4096.0).bfloat16())
    rows = torch.ones(4096, 8, dtype=torch.bfloat16)
    grad = get_backend("cpu", backend).weight_grad(rows, rows, BatchSizes([4096]))
    assert torch.equal(grad, torch.full((1, 8, 8), 4096.0).bfloat16())


def test_automatic_choice_on_this_cpu_is_the_measured_one():
    """Where the CPU multiplies a dtype natively torch's kernel is chosen, elsewhere the loop over fp32."""
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        torch.float32: True,
    }
    if not hasattr(torch.nn.functional, "grouped_mm"):
        native = dict.fromkeys(native, False)
    for dtype, is_native in native.items():
        problem = Problem("cpu", None, dtype, rows=1024, groups=64, k=256, n=256)
        chosen = gmm_registry.explain("cpu", problem).chosen
        assert chosen.impl == ("torch_grouped_mm" if is_native else "eager")


def test_one_groups_fp32_copy_is_all_the_memory(monkeypatch):
    """A CPU without bf16 converts a group at a time, never the whole weight."""
    import gmm_backends.eager

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                self.bytes = max(self.bytes, out.nbytes)
            return out

    monkeypatch.setattr(gmm_backends.eager, "is_slow", lambda dtype: True)
    x, weight = leaves([2] * 32, 64, 64, torch.bfloat16)
    backend = get_backend("cpu", "eager")
    with torch.no_grad(), Largest() as largest:
        backend.forward(x, weight, BatchSizes([2] * 32), trans_b=False)
    assert largest.bytes == 64 * 64 * 4


@pytest.mark.slow
def test_offsets_beyond_32_bits(backend):
    """DeepSpeed 8261, axolotl 3865: E * k * n of 2**31 and more."""
    needed = 14 * 2**30
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < needed:
        pytest.skip(f"needs {needed >> 30} GiB of memory")
    weight = torch.zeros(3, 32768, 32768, dtype=torch.bfloat16)
    weight[2, 0, 0] = 1
    x = torch.zeros(1, 32768, dtype=torch.bfloat16)
    x[0, 0] = 1
    with torch.no_grad():
        assert gmm(x, weight, [0, 0, 1], backend=backend)[0, 0] == 1


def test_a_call_without_gradients_is_seen_by_modes_and_transformations(backend):
    """Where nobody listens the dispatcher is left out; where somebody does it must not be."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight = (tensor.detach() for tensor in leaves([2, 3], 8, 16))
    want = gmm(x, weight, [2, 3], backend=backend)

    class Seen(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names += (func.name(),)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        gmm(x, weight, [2, 3], backend=backend)
    assert "gmm_registry::gmm" in seen.names
    graph = make_fx(lambda a: gmm(a, weight, [2, 3], backend=backend))(x).graph
    assert torch.ops.gmm_registry.gmm.default in {node.target for node in graph.nodes}
    with torch.profiler.profile() as profile:
        gmm(x, weight, [2, 3], backend=backend)
    assert "gmm_registry::gmm" in {event.name for event in profile.events()}
    torch.testing.assert_close(
        torch.vmap(lambda a: gmm(a, weight, [2, 3], backend=backend))(x[None])[0], want
    )


def test_forward_mode_is_refused_rather_than_zero(backend):
    x, weight = (tensor.detach() for tensor in leaves([2, 3], 8, 16))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="jvp"):
            gmm(dual, weight, [2, 3], backend=backend)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.jvp(lambda a: gmm(a, weight, [2, 3], backend=backend), (x,), (x,))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda a: gmm(a, weight, [2, 3], backend=backend).sum())(x)


def test_a_faulty_call_changes_no_later_choice():
    x, weight = leaves([2, 3], 8, 16)
    for counts in (torch.tensor([2, 3], device="meta"), [2, 4]):
        with pytest.raises(ValueError, match="batch_sizes"):
            gmm(x, weight, counts)
    assert gmm(x, weight, [2, 3]).shape == (5, 16)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"batch_sizes": BatchSizes([2, 4])}, "batch_sizes"),
        ({"batch_sizes": BatchSizes([6, -1])}, "batch_sizes"),
        ({"batch_sizes": BatchSizes([2, 3, 0])}, "batch_sizes"),
        ({"batch_sizes": BatchSizes(torch.tensor([2, 3], device="meta"))}, "batch_sizes"),
        ({"x": torch.ones(5, 8).double()}, "float64"),
        ({"x": torch.ones(5, 8, device="meta")}, "meta"),
        ({"x": torch.ones(5, 8).to_sparse()}, "sparse"),
        ({"weight": torch.ones(2, 8, 16).half()}, "float16"),
        ({"weight": torch.ones(2, 8, 16, device="meta")}, "meta"),
        ({"weight": torch.ones(2, 8, 16).to_sparse()}, "sparse"),
        ({"trans_b": True}, "K = 8"),
        ({"backend": "egaer"}, "egaer"),
    ],
    ids=str,
)
def test_a_call_is_checked_though_it_resembles_an_earlier_one(change, error):
    """What a call has found out is kept for later ones, and only for those that it holds for."""
    right = {"x": torch.ones(5, 8), "weight": torch.ones(2, 8, 16), "batch_sizes": BatchSizes([2, 3])}
    for _ in range(2):
        assert gmm(**right).shape == (5, 16)
        with pytest.raises((ValueError, TypeError, gmm_registry.UnknownBackendError), match=error):
            gmm(**right | change)


@pytest.mark.parametrize("counts", [torch.tensor([[2, 3]]), torch.tensor(5)], ids=str)
def test_the_operators_check_their_counts_as_well(counts):
    x, weight = torch.ones(5, 8), torch.ones(2, 8, 16)
    with pytest.raises(ValueError, match="batch_sizes have shape"):
        torch.ops.gmm_registry.gmm(x, weight, counts, False, "")
    with pytest.raises(ValueError, match="batch_sizes have shape"):
        torch.ops.gmm_registry.weight_grad(x, torch.ones(5, 16), counts, False, "")


def test_out_is_returned_whatever_its_strides(backend):
    x, weight = (tensor.detach() for tensor in leaves([2, 3], 8, 16))
    out = torch.full((16, 5), torch.nan).T
    assert gmm_into(out, x, weight, [2, 3], backend=backend) is out
    torch.testing.assert_close(out, gmm(x, weight, [2, 3], backend=backend))


def test_a_backend_that_leaves_out_alone_is_at_fault(monkeypatch):
    monkeypatch.setattr(Eager, "forward", lambda *args, out=None, **kwargs: torch.zeros(5, 16))
    x, weight = (tensor.detach() for tensor in leaves([2, 3], 8, 16))
    with pytest.raises(RuntimeError, match="did not write to out"):
        gmm_into(torch.zeros(5, 16), x, weight, [2, 3], backend="eager")


def test_only_so_much_is_kept_of_earlier_calls(monkeypatch):
    monkeypatch.setattr(choice, "kept", {})
    monkeypatch.setattr(plan, "_MOST", 3)
    for rows in range(1, 9):
        assert gmm(torch.ones(rows, 2), torch.ones(1, 2, 2), [rows]).shape == (rows, 2)
        assert len(choice.kept) <= 3


def test_a_rank_without_rows_refuses_what_the_others_refuse():
    x, weight = torch.randn(0, 8), torch.randn(2, 8, 16)
    with pytest.raises(gmm_registry.UnknownBackendError):
        gmm(x, weight, [0, 0], backend="egaer")


@pytest.mark.parametrize("trans_b", [1, "eager", None])
def test_trans_b_is_a_bool(trans_b):
    x, weight = leaves([2, 3], 8, 8)
    with torch.no_grad(), pytest.raises(TypeError, match="trans_b"):
        gmm(x, weight, [2, 3], trans_b)


def test_sparse_tensors_are_refused():
    x, weight = (tensor.detach() for tensor in leaves([2, 3], 8, 16))
    with pytest.raises(TypeError, match="sparse"):
        gmm(x.to_sparse(), weight, [2, 3])


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # the default from torch 2.10 on
def test_counts_made_on_the_way_compile():
    """bincount's length is not known to the compiler; it is the number of groups all the same."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, weight, experts):
        return gmm(x, weight, BatchSizes.from_device(torch.bincount(experts, minlength=3)))

    x, weight = leaves([2, 0, 3], 8, 16)
    out = layer(x, weight, torch.tensor([0, 0, 2, 2, 2]))
    torch.testing.assert_close(out, gmm(x, weight, [2, 0, 3]))
