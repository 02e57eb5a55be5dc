"""dMoE layers on npu.npu_fused, against the same layers on the CPU with the loop over groups."""

from collections import Counter
from itertools import product

import pytest
import torch
from npu_memory import record
from test_layers import beside_dense, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gmm_registry import use_backend
from gmm_registry.layers import Arguments, LossCollector, dMoE, routed_glu
from gmm_registry.registry.discovery import find
from gmm_registry.testing import compare
from gmm_registry.testing.language_model import train
from gmm_registry.testing.layers import layer_parity

GMM = "npu::npu_grouped_matmul"
PERMUTE, PERMUTE_GRAD = "npu::npu_moe_token_permute", "npu::npu_moe_token_permute_grad_v2"
UNPERMUTE, UNPERMUTE_GRAD = "npu::npu_moe_token_unpermute", "npu::npu_moe_token_unpermute_grad_v2"
SWIGLU, SWIGLU_GRAD = "npu::npu_swiglu", "npu::npu_swiglu_backward"
OPTIONS = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "bias": False,
    "return_bias": False,
    "activation_fn": F.silu,
    "moe_normalize_expert_weights": 1,
    "dtype": torch.float32,
    "init_method": lambda t: torch.nn.init.normal_(t, std=0.1),
    "output_layer_init_method": lambda t: torch.nn.init.normal_(t, std=0.1),
}
FORMS = list(product(("glu", "mlp"), (False, True)))


def pair(**options):
    """Make one layer on the CPU and the same on the device."""
    torch.manual_seed(0)
    cpu = dMoE(Arguments(**{**OPTIONS, **options}, device="cpu", backend="eager"))
    npu = dMoE(Arguments(**{**OPTIONS, **options}, device="npu", backend="npu_fused"))
    npu.load_state_dict(cpu.state_dict())
    return cpu, npu


def step(layer, x, grad_out):
    device = next(layer.parameters()).device
    x = x.to(device, copy=True).requires_grad_()
    with LossCollector() as losses:
        out = layer(x)
    (losses.total() + (out * grad_out.to(device)).sum()).backward()
    return {"out": out, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize(("mlp_type", "memory_optimized_mlp"), FORMS)
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(4, 2, 20), (8, 2, 3), (1, 1, 5), (4, 1, 7), (4, 2, 1), (4, 2, 0)]
)
def test_equals_the_loop_on_the_cpu(mlp_type, memory_optimized_mlp, experts, top_k, tokens):
    """Output and every gradient; with three tokens on eight experts most of these have no rows."""
    cpu, npu = pair(
        mlp_type=mlp_type,
        memory_optimized_mlp=memory_optimized_mlp,
        moe_num_experts=experts,
        moe_top_k=top_k,
        moe_normalize_expert_weights=1 if top_k > 1 else None,
    )
    x, grad_out = torch.randn(tokens, 32), torch.randn(tokens, 32)
    want = step(cpu, x, grad_out)
    got = step(npu, x, grad_out)
    assert set(got) == set(want)
    for name, tensor in got.items():
        assert tensor.device.type == "npu"
        difference = compare(tensor, want[name], torch.float32)
        assert difference.passed, (name, difference)


@pytest.mark.parametrize(("mlp_type", "memory_optimized_mlp"), FORMS)
def test_with_every_option(mlp_type, memory_optimized_mlp):
    cpu, npu = pair(
        mlp_type=mlp_type,
        memory_optimized_mlp=memory_optimized_mlp,
        bias=True,
        expert_bias=True,
        shared_expert=True,
        shared_expert_gate=True,
        moe_router_score="sigmoid",
        moe_router_bias=True,
        moe_zloss_weight=0.01,
    )
    with torch.no_grad():
        for name, parameter in cpu.named_parameters():
            if name.endswith(("bias", "b1", "b2")):
                parameter.normal_(std=0.3)
    npu.load_state_dict(cpu.state_dict())
    x, grad_out = torch.randn(11, 32), torch.randn(11, 32)
    want = step(cpu, x, grad_out)
    for name, tensor in step(npu, x, grad_out).items():
        assert compare(tensor, want[name], torch.float32).passed, name


@pytest.fixture
def waits(monkeypatch):
    """Return the devices that the host waited for without reading from them."""
    found = []
    monkeypatch.setattr(torch.accelerator, "synchronize", found.append)
    return found


@pytest.fixture(params=[False, True], ids=["plain", "memory optimised"])
def counted(request, waits):
    """One dMoE GLU layer in bf16, forward and backward: the layer, and what happened."""
    torch.manual_seed(0)
    options = {**OPTIONS, "dtype": torch.bfloat16, "memory_optimized_mlp": request.param}
    layer = dMoE(Arguments(**options, mlp_type="glu", device="npu"))
    x = torch.randn(20, 32, dtype=torch.bfloat16).to("npu").requires_grad_()
    grad_out = torch.randn(20, 32, dtype=torch.bfloat16).to("npu")
    with record() as log:
        layer(x).backward(grad_out)
    return layer, log


def test_six_products(counted):
    """Gate and up are one product: two forward, two for their inputs, two for their weights."""
    _, log = counted
    assert log.launches(GMM) == [GMM] * 6


def test_companions_do_the_steps_around_the_products(counted):
    """The memory-optimised backward gathers twice, repeats the activation, adds up by token."""
    layer, log = counted
    launches = log.launches("npu::")
    assert launches[:5] == [PERMUTE, GMM, SWIGLU, GMM, UNPERMUTE]
    backward = Counter(launches[5:])
    assert backward.pop(GMM) == 4
    if layer.args.memory_optimized_mlp:
        assert backward == {PERMUTE: 2, SWIGLU: 1, SWIGLU_GRAD: 1, UNPERMUTE: 1}
    else:
        assert backward == {UNPERMUTE_GRAD: 1, SWIGLU_GRAD: 1, PERMUTE_GRAD: 1}


def test_no_byte_of_a_weight_is_copied(counted):
    layer, log = counted
    experts = layer.experts.mlp
    for weight in (experts.w1v1, experts.w2):
        assert log.reading(weight) == [GMM, GMM]


def test_counts_do_not_go_to_the_device(counted):
    """They are made there."""
    _, log = counted
    assert log.crossings("to device") == []


def test_the_host_waits_for_the_counts_and_nothing_else(counted, waits):
    layer, log = counted
    (event,) = log.crossings("to host")
    assert event.numbers == layer.args.moe_num_experts
    assert not event.non_blocking
    assert waits == []  # these counts come from no collective


@pytest.mark.parametrize(("mlp_type", "memory_optimized_mlp"), FORMS)
@pytest.mark.parametrize("expert_bias", [False, True])
def test_bf16_equals_the_dense_reference(mlp_type, memory_optimized_mlp, expert_bias):
    """In fp64 on the CPU, although the kernels round the routing weights to bf16.

    Of three products in a row each element carries the roundings before it, so norms are compared.
    """
    layer = make(
        device="npu",
        dtype=torch.bfloat16,
        mlp_type=mlp_type,
        memory_optimized_mlp=memory_optimized_mlp,
        expert_bias=expert_bias,
        activation_fn=F.silu,
        moe_num_experts=4,
        moe_top_k=2,
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("b1", "b2")):
                parameter.normal_(std=0.1)
    with record() as log:
        pairs = beside_dense(layer, torch.randn(20, 128).bfloat16().to("npu"))
    assert log.launches("npu::")[:1] == [PERMUTE]
    assert (SWIGLU in log.launches("npu::")) == (mlp_type == "glu")
    for name, (got, want) in pairs.items():
        assert (got.cpu().double() - want).norm() < 1e-2 * want.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [20, 1, 0])
def test_routed_glu(dtype, tokens):
    torch.manual_seed(0)
    tensors = (torch.randn(tokens, 32), torch.randn(4, 32, 32) / 8, torch.randn(4, 16, 32) / 8)
    weights, experts = torch.rand(tokens, 4).topk(2)
    leaves = [t.to(dtype).to("npu").requires_grad_() for t in (*tensors, weights)]
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    with record() as log:
        out = routed_glu(*leaves, experts.to("npu"))
    assert log.launches("npu::") == ([PERMUTE, GMM, SWIGLU, GMM, UNPERMUTE] if tokens else [])
    want = _routed_glu(*wide, experts)
    assert compare(out, want, dtype).passed
    grad_out = torch.randn(tokens, 32).to(dtype)
    got = torch.autograd.grad(out, leaves, grad_out.to("npu"))
    for grad, wanted in zip(got, torch.autograd.grad(want, wide, grad_out.double()), strict=True):
        assert compare(grad, wanted, dtype).passed


def _routed_glu(x, gate_up, down, weights, experts):
    """Compute every expert for every token."""
    gate, up = torch.einsum("th,ehf->tef", x, gate_up).chunk(2, -1)
    every = torch.einsum("tef,efh->teh", F.silu(gate) * up, down)
    return (every.gather(1, experts[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"activation_fn": F.gelu}, [PERMUTE, GMM, GMM, UNPERMUTE]),
        ({"mlp_type": "mlp"}, [PERMUTE, GMM, GMM, UNPERMUTE]),
        ({"activation_fn": torch.nn.SiLU()}, [PERMUTE, GMM, SWIGLU, GMM, UNPERMUTE]),
        ({"moe_num_experts": 513, "moe_top_k": 513}, [GMM, GMM]),  # more choices than they take
        ({"use_companions": False}, [GMM, GMM]),
        ({"backend": "eager"}, []),
        ({"dtype": torch.float64}, []),  # which npu_fused refuses
    ],
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_companions_that_cannot_do_it_are_not_called(options, launches):
    layer = dMoE(Arguments(**{**OPTIONS, "mlp_type": "glu", **options}, device="npu"))
    x = torch.randn(3, 32, dtype=layer.args.parameter_dtype).to("npu")
    with record() as log:
        layer(x)
    assert log.launches("npu::") == launches
    with record() as log, use_backend("eager"):
        layer(x)
    assert log.launches("npu::") == []


def test_companions_are_not_called_on_fake_tensors():
    layer = dMoE(Arguments(**OPTIONS, mlp_type="glu", device="npu"))
    with record() as log, FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(7, 32, device="npu")
        assert layer(x).shape == x.shape
    assert log.launches("npu::") == []


def test_a_second_derivative_raises_and_is_there_without_companions():
    """torch_npu's own gradients would warn, and leave it out."""
    shapes = (5, 16), (4, 16, 24), (4, 12, 16), (5, 2)
    tensors = [torch.randn(shape) / 4 for shape in shapes]
    experts = torch.rand(5, 4).topk(2).indices

    def second(device, **options):
        x, *rest = [tensor.to(device, copy=True).requires_grad_() for tensor in tensors]
        out = routed_glu(x, *rest, experts.to(device), **options)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), rest)

    with pytest.raises(RuntimeError, match=r"differentiable once.*use_companions=False"):
        second("npu")
    for got, want in zip(second("npu", use_companions=False), second("cpu"), strict=True):
        assert compare(got, want, torch.float32).passed


def test_autocast():
    """The products run in bf16, and their gradients reach fp32 parameters."""
    cpu, npu = pair(mlp_type="glu")
    x, grad_out = torch.randn(20, 32), torch.randn(20, 32)
    want = step(cpu, x, grad_out)
    with torch.autocast("npu", torch.bfloat16), record() as log:
        x = x.to("npu").requires_grad_()
        out = npu(x)
    assert out.dtype == torch.bfloat16
    assert log.launches("npu::") == [PERMUTE, GMM, SWIGLU, GMM, UNPERMUTE]
    out.backward(grad_out.to("npu", torch.bfloat16))
    assert npu.experts.mlp.w2.grad.dtype == torch.float32
    assert (npu.experts.mlp.w2.grad.cpu() - want["experts.mlp.w2"]).norm() < 0.05 * want[
        "experts.mlp.w2"
    ].norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled():
    """As one graph, with the bits of the layer without companions: the compiler fuses what they do."""
    _, npu = pair(mlp_type="glu")
    _, plain = pair(mlp_type="glu", use_companions=False)
    results = []
    for layer in (torch.compile(npu, backend="aot_eager", fullgraph=True), plain):
        x = torch.linspace(-1, 1, 20 * 32).view(20, 32).to("npu").requires_grad_()
        with record() as log:
            layer(x).sum().backward()
        assert log.launches("npu::") == [GMM] * 6
        results.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_the_report_on_layers():
    """The command `gmm-registry parity --layers` on this device, without its training run."""
    keys = [find("npu", name) for name in ("npu_fused", "eager")]
    for result in layer_parity("npu", keys, steps=0, seconds=0.001):
        assert result.reasons == ()
        assert result.faults == []
        assert len(result.grad_weights["w1"]) == 8


def test_training_is_that_of_the_cpu():
    options = {**OPTIONS, "mlp_type": "glu"}
    losses = {
        device: train(Arguments(**options, device=device, backend=backend), 12)
        for device, backend in (("cpu", "eager"), ("npu", "npu_fused"))
    }
    assert losses["npu"][-1] < losses["npu"][0]
    for got, want in zip(losses["npu"], losses["cpu"], strict=True):
        assert abs(got - want) < 1e-3
