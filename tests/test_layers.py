"""The dMoE layer against a dense reference, in all its forms.

Tests that come from a fault somebody met name where it was reported.
"""

from itertools import product

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gmm_registry import BatchSizes, UnknownBackendError, get_backend, use_backend
from gmm_registry.layers import (
    Arguments,
    dmlp_registry,
    dMoE,
    permute,
    route,
    routed_glu,
    sort_by_expert,
    unpermute,
)
from gmm_registry.layers.companions import companions_for
from gmm_registry.registry import choice
from gmm_registry.registry.request import ENVIRONMENT
from gmm_registry.testing import compare
from gmm_registry.testing.dense import dense_moe
from gmm_registry.testing.layers import saved_bytes

SMALL = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "dtype": torch.float32,
    "device": "cpu",
    "bias": False,
    "return_bias": False,
    "init_method": lambda t: torch.nn.init.normal_(t, std=0.1),
    "output_layer_init_method": lambda t: torch.nn.init.normal_(t, std=0.1),
}
FORMS = list(product(("mlp", "glu"), ("grouped", "sparse"), (False, True)))
every_form = pytest.mark.parametrize(("mlp_type", "mlp_impl", "memory_optimized_mlp"), FORMS)


def make(seed=0, **options):
    torch.manual_seed(seed)
    return dMoE(Arguments(**{**SMALL, **options}))


def gradients(module, x, grad_out):
    """Return output and the gradients by the names of the state dict, gate and up apart."""
    x = x.detach().requires_grad_()
    out = module(x)
    module.zero_grad()
    out.backward(grad_out)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    joined = grads.pop("experts.mlp.w1v1", None)
    if joined is not None:
        grads["experts.mlp.w1"], grads["experts.mlp.v1"] = module.experts.mlp.apart(joined)
    return out.detach(), {"x": x.grad, **grads}


def beside_dense(module, x):
    """Return output and gradients, each with that of the dense reference, by name."""
    grad_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x)
    out, grads = gradients(module, x, grad_out)
    state = {name: t.detach().cpu().double().requires_grad_() for name, t in module.state_dict().items()}
    dense_x = x.detach().cpu().double().requires_grad_()
    want = dense_moe(dense_x, state, module.args)
    names = [name for name in state if name in grads]
    assert set(grads) == {"x", *names}
    wanted = torch.autograd.grad(
        want, [dense_x, *(state[n] for n in names)], grad_out.cpu().double(), allow_unused=True
    )
    pairs = {"out": (out, want)}
    for name, grad in zip(["x", *names], wanted, strict=True):
        pairs[name] = grads[name], torch.zeros_like(grads[name]) if grad is None else grad
    return pairs


def check_against_dense(module, x):
    for name, (got, want) in beside_dense(module, x).items():
        difference = compare(got, want, x.dtype)
        assert difference.passed, (name, difference)


@every_form
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"),
    [(1, 1, 5), (2, 1, 7), (2, 2, 7), (8, 1, 3), (8, 2, 20), (8, 4, 9), (8, 2, 1), (8, 2, 0)],
)
def test_equals_the_dense_reference(mlp_type, mlp_impl, memory_optimized_mlp, experts, top_k, tokens):
    """With three tokens on eight experts most of these have no rows."""
    module = make(
        mlp_type=mlp_type,
        mlp_impl=mlp_impl,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=experts,
        moe_top_k=top_k,
    )
    check_against_dense(module, torch.randn(tokens, 128))


@every_form
def test_one_expert_takes_everything(mlp_type, mlp_impl, memory_optimized_mlp):
    module = make(
        mlp_type=mlp_type,
        mlp_impl=mlp_impl,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=8,
        moe_top_k=1,
    )
    with torch.no_grad():
        module.router.layer.weight.zero_()[3] = 0.1
    check_against_dense(module, torch.rand(150, 128))


@every_form
def test_all_options_together(mlp_type, mlp_impl, memory_optimized_mlp):
    """Biases, a shared expert with its gate, sigmoid routing with a bias, renormalised weights."""
    module = make(
        mlp_type=mlp_type,
        mlp_impl=mlp_impl,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=4,
        moe_top_k=2,
        bias=True,
        expert_bias=True,
        shared_expert=True,
        shared_expert_gate=True,
        shared_expert_weighted_sum=True,
        shared_expert_hidden_size=64,
        moe_router_score="sigmoid",
        moe_router_bias=True,
        moe_normalize_expert_weights=1,
        activation_fn=F.silu,
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("bias", "b1", "b2")):
                parameter.normal_(std=0.3)
        module.router.e_score_correction_bias.normal_(std=0.3)
    check_against_dense(module, torch.randn(11, 128))


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize(
    "activation", [F.relu, F.silu, F.gelu, torch.tanh, lambda t: t * torch.sigmoid(1.702 * t)]
)
def test_any_activation(mlp_type, activation):
    for memory_optimized_mlp in (False, True):
        module = make(
            mlp_type=mlp_type,
            memory_optimized_mlp=memory_optimized_mlp,
            activation_fn=activation,
            moe_num_experts=3,
            moe_top_k=2,
        )
        check_against_dense(module, torch.randn(6, 128))


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_all_forms_agree_in_bf16(mlp_type):
    """Sparse equals grouped, and memory optimised equals plain, from one state."""
    x = torch.randn(40, 128, dtype=torch.bfloat16)
    grad_out = torch.randn_like(x)
    found = {}
    state = None
    for mlp_impl, memory_optimized_mlp in product(("grouped", "sparse"), (False, True)):
        module = make(
            mlp_type=mlp_type,
            mlp_impl=mlp_impl,
            memory_optimized_mlp=memory_optimized_mlp,
            moe_num_experts=4,
            moe_top_k=2,
            dtype=torch.bfloat16,
        )
        state = state or module.state_dict()
        module.load_state_dict(state)
        found[mlp_impl, memory_optimized_mlp] = gradients(module, x, grad_out)
    want_out, want_grads = found["grouped", False]
    for out, grads in found.values():
        assert torch.equal(out, want_out)
        for name, grad in grads.items():
            # Three products in a row: each element carries the roundings before it, so norms are compared.
            assert (grad - want_grads[name]).norm() < 1e-2 * want_grads[name].norm(), name


@every_form
def test_recomputation_equals_none(mlp_type, mlp_impl, memory_optimized_mlp):
    """vllm 55514 in a layer: the recomputation must route as the first pass did."""
    module = make(
        mlp_type=mlp_type,
        mlp_impl=mlp_impl,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=4,
        moe_top_k=2,
    )
    x, grad_out = torch.randn(9, 128), torch.randn(9, 128)
    out, grads = gradients(module, x, grad_out)

    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    again = x.detach().requires_grad_()
    module.zero_grad()
    recomputed = Recomputed()(again)
    recomputed.backward(grad_out)
    assert torch.equal(recomputed, out)
    assert torch.equal(again.grad, grads["x"])
    assert torch.equal(module.experts.mlp.w2.grad, grads["experts.mlp.w2"])


@every_form
@pytest.mark.parametrize("frozen", ["x", "router", "first", "w2", "all but x", "all but w2"])
def test_frozen_inputs(mlp_type, mlp_impl, memory_optimized_mlp, frozen):
    """Whatever is frozen, the other gradients are those of the layer with nothing frozen."""
    module = make(
        mlp_type=mlp_type,
        mlp_impl=mlp_impl,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=4,
        moe_top_k=2,
    )
    x, grad_out = torch.randn(9, 128), torch.randn(9, 128)
    _, want = gradients(module, x, grad_out)
    parts = {
        "router": module.router.layer.weight,
        "first": module.experts.mlp.w1v1 if mlp_type == "glu" else module.experts.mlp.w1,
        "w2": module.experts.mlp.w2,
        "x": x.detach().requires_grad_(),
    }
    for name, tensor in parts.items():
        tensor.requires_grad_(name == frozen[8:] if frozen.startswith("all but") else name != frozen)
    module.zero_grad()
    module(parts["x"]).backward(grad_out)
    assert all(tensor.grad is None for tensor in parts.values() if not tensor.requires_grad)
    if parts["x"].requires_grad:
        torch.testing.assert_close(parts["x"].grad, want["x"])
    if parts["w2"].requires_grad:
        torch.testing.assert_close(parts["w2"].grad, want["experts.mlp.w2"])
    if parts["router"].requires_grad:
        torch.testing.assert_close(parts["router"].grad, want["router.layer.weight"])


@pytest.mark.parametrize(("gated", "want"), [(False, 0.731059), (True, 0.731059)])
def test_glu_flag_is_heeded(gated, want):
    """sonic-moe 2: no GLU, silu, x = w1 = w2 = 1 is 0.731059; a GLU with up = 2 is twice that."""
    args = Arguments(
        hidden_size=1,
        ffn_hidden_size=1,
        moe_num_experts=1,
        mlp_type="glu" if gated else "mlp",
        activation_fn=F.silu,
        dtype=torch.float32,
        device="cpu",
    )
    mlp = dmlp_registry.get(args)
    state = {"w1": torch.ones(1, 1), "w2": torch.ones(1, 1)}
    if gated:
        state["v1"] = torch.full((1, 1), 2.0)
    mlp.load_state_dict(state)
    out = mlp(torch.ones(1, 1), [1])
    assert out.item() == pytest.approx(2 * want if gated else want, abs=1e-6)


def test_routing_weight_comes_after_the_activation():
    """TensorRT-LLM 3492: weight .5, x = w1 = w2 = 1, silu is 0.365529."""
    module = make(hidden_size=1, ffn_hidden_size=1, moe_num_experts=2, moe_top_k=1, activation_fn=F.silu)
    with torch.no_grad():
        module.router.layer.weight.zero_()
        module.experts.mlp.w1.fill_(1)
        module.experts.mlp.w2.fill_(1)
    assert module(torch.ones(1, 1)).item() == pytest.approx(0.365529, abs=1e-6)


def test_gate_and_up_are_one_product(monkeypatch):
    import gmm_registry.layers.products as products

    calls = []
    gmm = products.gmm
    monkeypatch.setattr(products, "gmm", lambda *a, **k: calls.append(a[1].shape) or gmm(*a, **k))
    module = make(mlp_type="glu", moe_num_experts=4, moe_top_k=2)
    module(torch.randn(9, 128))
    assert calls == [(4, 256, 128), (4, 128, 128)]


def test_the_callers_gradient_is_left_alone():
    """Upstream writes into grad_output."""
    for mlp_type, mlp_impl in product(("mlp", "glu"), ("grouped", "sparse")):
        args = Arguments(
            **{**SMALL, "mlp_type": mlp_type, "mlp_impl": mlp_impl, "memory_optimized_mlp": True},
            moe_num_experts=2,
        )
        mlp = dmlp_registry.get(args)
        x, grad_out = torch.randn(256, 128, requires_grad=True), torch.randn(256, 128)
        kept = grad_out.clone()
        mlp(x, [128, 128]).backward(grad_out)
        assert torch.equal(grad_out, kept)
        module = dMoE(args)
        module(x).backward(grad_out)
        assert torch.equal(grad_out, kept)


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_rows_that_are_sorted_already(mlp_type):
    """`dmlp_registry.get` gives a module that takes rows and counts, as MegaBlocks' does."""
    found = []
    for mlp_impl, memory_optimized_mlp in product(("grouped", "sparse"), (False, True)):
        torch.manual_seed(0)
        args = Arguments(
            **{**SMALL, "mlp_type": mlp_type, "mlp_impl": mlp_impl},
            memory_optimized_mlp=memory_optimized_mlp,
            moe_num_experts=3,
        )
        x = torch.randn(384, 128, requires_grad=True)
        mlp = dmlp_registry.get(args)
        out = mlp(x, BatchSizes([128, 0, 256]))
        found.append((out, *torch.autograd.grad(out.sum(), (x, mlp.w2))))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_block_sparse_rows_must_be_padded():
    """megablocks 114: a block size was assumed; here the message names it."""
    mlp = dmlp_registry.get(Arguments(**SMALL, mlp_impl="sparse", moe_num_experts=2))
    with pytest.raises(ValueError, match=r"\[100, 28\].*128"):
        mlp(torch.randn(128, 128), [100, 28])


def test_padding_leaves_no_trace():
    """torchtitan 1651: the padded sizes were lost by the next stage."""
    experts = torch.tensor([[0]] * 5 + [[1]] * 3)
    x = torch.randn(8, 16, requires_grad=True)
    permutation = sort_by_expert(experts, 2, block=16)
    rows = permute(x, permutation)
    assert permutation.row_counts.host.tolist() == [16, 16]
    assert rows.shape == (32, 16)
    assert not rows[5:16].any()
    assert not rows[19:].any()


@pytest.mark.parametrize("mlp_impl", ["grouped", "sparse"])
def test_memory_optimised_glu_keeps_its_input_and_gate_and_up(mlp_impl):
    tokens, experts, top_k, width, hidden = 1024, 4, 2, 256, 128
    options = {"mlp_type": "glu", "mlp_impl": mlp_impl, "moe_num_experts": experts, "moe_top_k": top_k}
    options["ffn_hidden_size"] = width
    x = torch.randn(tokens, hidden, requires_grad=True)
    plain = saved_bytes(make(**options), x)
    module = make(memory_optimized_mlp=True, **options)
    optimised = saved_bytes(module, x)
    rows = tokens * top_k
    if mlp_impl == "sparse":
        counts = sort_by_expert(module.router(x).experts, experts, block=128).row_counts
        rows = int(counts.host.sum())
    routing = tokens * (4 * experts * 4 + top_k * 5 * 8)  # scores and logits; ids, weights and places
    assert optimised <= x.nbytes + rows * 2 * width * 4 + routing
    assert optimised < 0.6 * plain


def test_checkpoints_have_megablocks_names_and_layouts():
    """The shapes that MegaBlocks 0.10 saves for these arguments; ours load with strict=True, and back."""
    module = make(
        mlp_type="glu", moe_num_experts=4, moe_top_k=2, bias=True, shared_expert=True, ffn_hidden_size=256
    )
    shapes = {
        "router.layer.weight": (4, 128),
        "experts.bias": (128,),
        "experts.mlp.w1": (1024, 128),
        "experts.mlp.v1": (1024, 128),
        "experts.mlp.w2": (1024, 128),
        "shared_expert.up_proj.weight": (256, 128),
        "shared_expert.up_proj.bias": (256,),
        "shared_expert.gate_proj.weight": (256, 128),
        "shared_expert.gate_proj.bias": (256,),
        "shared_expert.down_proj.weight": (128, 256),
        "shared_expert.down_proj.bias": (128,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == shapes
    theirs = {name: torch.randn(shape) for name, shape in shapes.items()}
    module.load_state_dict(theirs, strict=True)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    assert set(theirs) == set(shapes)  # loading took nothing from the caller's dict


def test_a_glu_checkpoint_that_does_not_fit_is_named():
    module = make(mlp_type="glu", moe_num_experts=2)
    state = module.state_dict()
    name = "experts.mlp.v1"
    with pytest.raises(RuntimeError, match=r"experts\.mlp\.v1 must be \(256, 128\), not \(256, 64\)"):
        module.load_state_dict({**state, name: state[name][:, :64]})
    with pytest.raises(RuntimeError, match=r"w1 and experts\.mlp\.v1 only experts\.mlp\.w1 is there"):
        module.load_state_dict({key: tensor for key, tensor in state.items() if key != name})


def test_returns_the_output_bias_apart_on_request():
    x = torch.randn(2, 3, 128)
    together = make(bias=True, moe_num_experts=2)
    apart = make(bias=True, moe_num_experts=2, return_bias=True)
    with torch.no_grad():
        together.experts.bias.fill_(1)
        apart.experts.bias.fill_(1)
    out, bias = apart(x)
    torch.testing.assert_close(out + bias, together(x))
    assert out.shape == x.shape


def test_autocast_runs_the_experts_in_its_type():
    module = make(mlp_type="glu", moe_num_experts=4, moe_top_k=2)
    x = torch.randn(9, 128, requires_grad=True)
    for mlp_impl, memory_optimized_mlp in product(("grouped", "sparse"), (False, True)):
        other = make(
            mlp_type="glu",
            mlp_impl=mlp_impl,
            memory_optimized_mlp=memory_optimized_mlp,
            moe_num_experts=4,
            moe_top_k=2,
        )
        with torch.autocast("cpu", torch.bfloat16):
            out = other(x)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert other.experts.mlp.w2.grad.dtype == torch.float32
        torch.testing.assert_close(out.float(), module(x), rtol=3e-2, atol=3e-2)


def test_backend_is_pinned_by_name():
    x = torch.randn(9, 128)
    automatic, eager = make(moe_num_experts=4), make(moe_num_experts=4, backend="eager")
    torch.testing.assert_close(automatic(x), eager(x))
    with pytest.raises(UnknownBackendError, match="did you mean 'eager'"):
        make(backend="egaer")


def test_the_sparse_way_does_not_pass_over_a_name():
    module = make(mlp_impl="sparse", moe_num_experts=4)
    with use_backend("eager"), pytest.raises(ValueError, match=r"any\.eager has no block-sparse products"):
        module(torch.randn(9, 128))


def test_module_works_after_to():
    module = make(mlp_type="glu", moe_num_experts=4, moe_top_k=2).to(torch.bfloat16)
    assert module(torch.randn(600, 128).bfloat16()).dtype == torch.bfloat16


def test_input_that_does_not_fit_is_refused():
    module = make(moe_num_experts=4)
    with pytest.raises(ValueError, match=r"\(\.\.\., 128\), got shape \(3, 64\)"):
        module(torch.randn(3, 64))
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        module(torch.randn(3, 128).bfloat16())


def test_expert_parallelism_is_refused_for_now():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="no expert parallelism"):
            make(moe_expert_model_parallelism=True)
    finally:
        torch.distributed.destroy_process_group()


FELLOW = """
import torch
from torch.nn import functional as F

from gmm_backends.eager import Eager
from gmm_registry.contract import Companions


class Fellow(Companions, Eager):
    calls = []

    def rejections(self, problem):
        return ["neither fp64 nor fp16"] if problem.dtype in (torch.float64, torch.float16) else []

    def priority(self, problem):
        return 50

    def companion_rejections(self, tokens, choices):
        return ["more than 3 choices"] if choices > 3 else []

    def permute(self, x, slot_row):
        self.calls.append("permute")
        assert x.numel()
        return x[slot_row.flatten().argsort() // slot_row.shape[1]]

    def unpermute(self, rows, slot_row, weights=None):
        self.calls.append("unpermute")
        rows = rows[slot_row]
        return (rows if weights is None else rows * weights.to(rows.dtype)[..., None]).sum(1)

    def glu(self, gate_up):
        self.calls.append("glu")
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
"""


@pytest.fixture
def calls(distribution):
    """Return the steps that a backend with companions was asked for; it is somebody else's, and the best."""
    distribution("fellow", {"cpu.fellow": "fellow:Fellow"}, {"fellow": FELLOW})
    return get_backend("cpu", "fellow").calls


FUSIBLE = {"mlp_type": "glu", "moe_num_experts": 4, "moe_top_k": 2, "activation_fn": F.silu}


class TestCompanions:
    """The steps around the products, where a backend has kernels for them."""

    @pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
    @pytest.mark.parametrize("memory_optimized_mlp", [False, True])
    @pytest.mark.parametrize("expert_bias", [False, True])
    @pytest.mark.parametrize("tokens", [7, 1, 0])
    def test_equal_the_dense_reference(self, calls, mlp_type, memory_optimized_mlp, expert_bias, tokens):
        """What is empty is not for them, and still the router gets a gradient."""
        options = {**FUSIBLE, "mlp_type": mlp_type, "memory_optimized_mlp": memory_optimized_mlp}
        module = make(**options, expert_bias=expert_bias)
        if expert_bias:
            with torch.no_grad():
                module.experts.mlp.b1.normal_(std=0.3), module.experts.mlp.b2.normal_(std=0.3)
        check_against_dense(module, torch.randn(tokens, 128))
        glu = ["glu"] if mlp_type == "glu" else []
        again = ["permute", *glu, "permute", "unpermute"] if memory_optimized_mlp else []
        assert calls == (["permute", *glu, "unpermute", *again] if tokens else [])

    @pytest.mark.parametrize("activation", [F.silu, torch.nn.SiLU(), F.gelu, lambda t: F.silu(t)])
    def test_routed_glu(self, calls, activation):
        """glu is silu's only, and a function that may be another is not called silu."""
        tensors = torch.randn(9, 16), torch.randn(4, 16, 24) / 4, torch.randn(4, 12, 16) / 4, torch.rand(9, 2)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        experts = torch.rand(9, 4).topk(2).indices
        grad_out = torch.randn(9, 16)
        out = routed_glu(*leaves, experts, activation=activation)
        glu = activation is F.silu or isinstance(activation, torch.nn.SiLU)
        assert calls == (["permute", "glu", "unpermute"] if glu else ["permute", "unpermute"])
        got = out, *torch.autograd.grad(out, leaves, grad_out)
        calls.clear()
        want = routed_glu(*leaves, experts, activation=activation, use_companions=False)
        assert calls == []
        torch.testing.assert_close(got, (want, *torch.autograd.grad(want, leaves, grad_out)))

    @pytest.mark.parametrize(
        "options",
        [
            {"mlp_impl": "sparse"},
            {"backend": "eager"},
            {"use_companions": False},
            {"moe_top_k": 4},  # their own refusal
            {"dtype": torch.float64},  # the backend's, so that another computes
        ],
        ids=str,
    )
    def test_are_not_called_where_the_layer_cannot_use_them(self, calls, options):
        module = make(**{**FUSIBLE, **options})
        module(torch.randn(7, 128, dtype=module.args.parameter_dtype))
        assert calls == []

    def test_are_not_called_where_another_backend_is_asked_for(self, calls, monkeypatch):
        module, x = make(**FUSIBLE), torch.randn(7, 128)
        with use_backend("eager"):
            module(x)
        monkeypatch.setenv(ENVIRONMENT, "eager")
        module(x)
        assert calls == []
        monkeypatch.setenv(ENVIRONMENT, "fellow")
        module(x)
        assert calls == ["permute", "glu", "unpermute"]

    def test_are_not_called_for_rows_that_are_sorted_already(self, calls):
        module = make(**FUSIBLE)
        module.experts.mlp(torch.randn(7, 128), [2, 0, 3, 2])
        assert calls == []

    def test_are_not_needed_on_meta(self):
        """Where no backend computes, none is looked for in vain."""
        args = Arguments(**{**SMALL, **FUSIBLE, "device": "meta"})
        assert dMoE(args)(torch.empty(7, 128, device="meta")).shape == (7, 128)

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
    def test_are_not_called_in_compiled_code(self, calls):
        module, x = make(**FUSIBLE), torch.randn(7, 128)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        out = compiled(x)
        assert calls == []
        assert torch.equal(out, make(**FUSIBLE, use_companions=False)(x))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_go_by_the_type_of_autocast(self, calls, dtype):
        """That is the type of the products, and their backend does not take fp16."""
        tensors = torch.randn(7, 8), torch.randn(4, 8, 8), torch.randn(4, 4, 8), torch.rand(7, 2)
        with torch.autocast("cpu", dtype):
            assert routed_glu(*tensors, torch.rand(7, 4).topk(2).indices).dtype == dtype
            make(**FUSIBLE)(torch.randn(7, 128))
        assert calls == (2 * ["permute", "glu", "unpermute"] if dtype == torch.bfloat16 else [])

    @pytest.mark.parametrize("transposed", [False, True])
    def test_are_chosen_with_the_problem_of_the_first_product(self, calls, transposed):
        """So that one answer serves both, whatever way the weight lies."""
        gate_up = torch.randn(4, 24, 8).transpose(1, 2) if transposed else torch.randn(4, 8, 24)
        choice._choose.cache_clear()
        routed_glu(
            torch.randn(7, 8),
            gate_up,
            torch.randn(4, 12, 8),
            torch.rand(7, 2),
            torch.rand(7, 4).topk(2).indices,
        )
        assert calls == ["permute", "glu", "unpermute"]
        assert choice._choose.cache_info().misses == 2  # one for each product

    @pytest.mark.parametrize("options", [{"block": 16}, {"foreign": True}], ids=str)
    def test_refuse_padding_and_foreign_ids(self, calls, options):
        """Their kernels would read rows that are not there."""
        routing = route(torch.randn(5, 4), 2)
        permutation = sort_by_expert(routing.experts, 4, **options)
        assert companions_for(torch.randn(5, 8), torch.randn(4, 8, 8), permutation, "fellow") is None
        companions = get_backend("cpu", "fellow")
        with pytest.raises(ValueError, match="no padding and no foreign ids"):
            permute(torch.randn(5, 8), permutation, companions=companions)
        with pytest.raises(ValueError, match="no padding and no foreign ids"):
            unpermute(torch.randn(permutation.rows, 8), permutation, routing.weights, companions=companions)
        assert calls == []

    def test_tensors_that_do_not_fit_are_refused_before_them(self, calls):
        experts = torch.tensor([[0], [1]])
        weights = torch.ones(2, 1)
        with pytest.raises(ValueError, match=r"T = 2, got shape \(3, 8\)"):
            routed_glu(torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 4, 8), weights, experts)
        with pytest.raises(ValueError, match=r"weights must be \(T, K\) = \(2, 1\)"):
            routed_glu(torch.randn(2, 8), torch.randn(2, 8, 8), torch.randn(2, 4, 8), weights.T, experts)
        assert "unpermute" not in calls
        with pytest.raises(ValueError, match=r"weight must be \(E, N, K\), got shape \(8, 2\)"):
            routed_glu(torch.randn(2, 8), torch.randn(2, 8), torch.randn(2, 4, 8), weights, experts)
