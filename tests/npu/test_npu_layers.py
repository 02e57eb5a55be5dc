"""dMoE layers on npu.npu_fused, against the same layers on the CPU with the loop over groups."""

from itertools import product

import pytest
import torch
from npu_memory import record
from torch.nn import functional as F

from gmm_registry.layers import Arguments, LossCollector, dMoE
from gmm_registry.registry.discovery import find
from gmm_registry.testing import compare
from gmm_registry.testing.language_model import train
from gmm_registry.testing.layers import layer_parity

GMM = "npu::npu_grouped_matmul"
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


@pytest.fixture(params=[False, True], ids=["plain", "memory optimised"])
def counted(request):
    """One dMoE GLU layer in bf16, forward and backward: the layer, and what happened."""
    torch.manual_seed(0)
    options = {**OPTIONS, "dtype": torch.bfloat16, "memory_optimized_mlp": request.param}
    layer = dMoE(Arguments(**options, mlp_type="glu", device="npu"))
    x = torch.randn(20, 32, dtype=torch.bfloat16).to("npu").requires_grad_()
    grad_out = torch.randn(20, 32, dtype=torch.bfloat16).to("npu")
    with record() as log:
        layer(x).backward(grad_out)
    return layer, log


def test_six_launches(counted):
    """Gate and up are one product: two forward, two for their inputs, two for their weights."""
    _, log = counted
    assert log.launches("npu::") == [GMM] * 6


def test_no_byte_of_a_weight_is_copied(counted):
    layer, log = counted
    experts = layer.experts.mlp
    for weight in (experts.w1v1, experts.w2):
        assert log.reading(weight) == [GMM, GMM]


def test_counts_do_not_go_to_the_device(counted):
    """They are made there."""
    _, log = counted
    assert log.crossings("to device") == []


def test_the_host_waits_for_the_counts_and_nothing_else(counted):
    layer, log = counted
    assert [event.numbers for event in log.crossings("to host")] == [layer.args.moe_num_experts]


def test_autocast():
    """The products run in bf16, and their gradients reach fp32 parameters."""
    cpu, npu = pair(mlp_type="glu")
    x, grad_out = torch.randn(20, 32), torch.randn(20, 32)
    want = step(cpu, x, grad_out)
    with torch.autocast("npu", torch.bfloat16), record() as log:
        x = x.to("npu").requires_grad_()
        out = npu(x)
    assert out.dtype == torch.bfloat16
    assert log.launches("npu::") == [GMM] * 2
    out.backward(grad_out.to("npu", torch.bfloat16))
    assert npu.experts.mlp.w2.grad.dtype == torch.float32
    assert (npu.experts.mlp.w2.grad.cpu() - want["experts.mlp.w2"]).norm() < 0.05 * want[
        "experts.mlp.w2"
    ].norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled():
    """As one graph, with the same bits."""
    _, npu = pair(mlp_type="glu")
    compiled = torch.compile(npu, backend="aot_eager", fullgraph=True)
    results = []
    for layer in (npu, compiled):
        x = torch.linspace(-1, 1, 20 * 32).view(20, 32).to("npu").requires_grad_()
        npu.zero_grad()
        layer(x).sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in npu.parameters())])
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
