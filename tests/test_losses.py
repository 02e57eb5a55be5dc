"""The routers' losses, and which forwards of which layers are collected."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gmm_registry.layers.arguments import Arguments
from gmm_registry.layers.losses import LossCollector, load_balancing_loss, record, router_z_loss
from gmm_registry.layers.router import Router, count_tokens


class Layer(nn.Module):
    """What an MoE layer does for its losses: route, count, record."""

    def __init__(self, **options):
        super().__init__()
        defaults = {"hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "dtype": torch.float32}
        self.args = Arguments(**{**defaults, **options})
        self.router = Router(self.args)
        with torch.no_grad():
            self.router.layer.weight.copy_(torch.randn(self.router.layer.weight.shape))

    def forward(self, x):
        routing = self.router(x)
        if self.training:
            record(routing, count_tokens(routing.experts, self.args.moe_num_experts), self.args)
        return x * routing.weights.sum(-1, keepdim=True) + 0 * routing.experts.sum()


@pytest.fixture
def x():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


# The functions


def test_balanced_load_costs_1_whatever_k_is():
    """transformers 43775: T=E=4, k=2, uniform."""
    scores = torch.full((4, 4), 0.25)
    assert load_balancing_loss(torch.tensor([2, 2, 2, 2]), scores, 2) == 1
    assert load_balancing_loss(torch.tensor([3, 3, 3, 3]), scores, 3) == 1


def test_load_balancing_loss_is_the_formula():
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64)
    # E / (T * K) * (2 * 0.65 + 1 * 0.25 + 1 * 0.1)
    want = torch.tensor(3 / 4 * 1.65, dtype=torch.float64)
    torch.testing.assert_close(load_balancing_loss(torch.tensor([2, 1, 1]), scores, 2), want)


def test_load_balancing_loss_is_worst_when_all_go_to_one():
    scores = torch.tensor([[1.0, 0, 0, 0]]).expand(5, 4)
    assert load_balancing_loss(torch.tensor([5, 0, 0, 0]), scores, 1) == 4


def test_load_balancing_loss_gives_the_scores_their_gradient():
    scores = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([7, 0, 3])
    assert torch.autograd.gradcheck(lambda s: load_balancing_loss(counts, s, 2), scores)
    load_balancing_loss(counts, scores, 2).backward()
    torch.testing.assert_close(scores.grad, (counts * 3 / (5 * 2) / 5).double().expand(5, 3))


def test_counts_that_a_float_cannot_hold_are_not_summed_in_it():
    """bf16 scores would turn 257 tokens into 256."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = load_balancing_loss(torch.tensor([257, 0]), torch.tensor([[1.0, 0.0]]).expand(257, 2), 1)
    assert loss == 2
    assert loss.dtype == torch.float32


def test_counts_of_another_number_of_experts_are_refused():
    with pytest.raises(ValueError, match=r"counts must be \(3,\) .* got \(2,\)"):
        load_balancing_loss(torch.tensor([1, 1]), torch.ones(2, 3), 1)


def test_z_loss_is_the_mean_square_of_logsumexp():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    ln2 = torch.tensor(2.0).log()
    torch.testing.assert_close(router_z_loss(logits), (ln2**2 + (1 + ln2) ** 2) / 2)


def test_z_loss_is_computed_in_fp32():
    logits = torch.full((3, 4), 100.0, dtype=torch.bfloat16)
    loss = router_z_loss(logits)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, (100 + torch.tensor(4.0).log()) ** 2)


@pytest.mark.parametrize(
    "loss",
    [lambda x: load_balancing_loss(torch.zeros(4, dtype=torch.int64), x, 2), router_z_loss],
    ids=["load", "z"],
)
def test_no_tokens_cost_nothing_and_stay_in_the_graph(loss):
    x = torch.zeros(0, 4, requires_grad=True)
    value = loss(x)
    assert value == 0
    value.backward()
    assert x.grad.shape == (0, 4)


# The collector


def test_losses_are_averaged_over_the_layers_that_ran(x):
    first, second = Layer(num_layers=7), Layer(num_layers=7)  # MegaBlocks demands that 7 ran
    with LossCollector() as losses:
        second(first(x))
    assert len(losses.records) == 2
    each = [load_balancing_loss(r.counts, r.scores, 2) for r in losses.records]
    torch.testing.assert_close(losses.load_balancing(), (each[0] + each[1]) / 2)
    each = [router_z_loss(r.logits) for r in losses.records]
    torch.testing.assert_close(losses.z_loss(), (each[0] + each[1]) / 2)


def test_total_uses_each_layers_coefficients(x):
    with LossCollector() as losses:
        Layer(moe_loss_weight=0.5, moe_zloss_weight=0.25)(x)
        Layer(moe_loss_weight=2, moe_zloss_weight=0)(x)
    one, two = losses.records
    want = (0.5 * one.load_balancing() + 0.25 * one.z_loss() + 2 * two.load_balancing()) / 2
    torch.testing.assert_close(losses.total(), want)


def test_a_loss_with_coefficient_0_is_not_computed():
    """0 times the infinite z-loss of a masked expert's logits would be NaN."""
    layer = Layer(moe_zloss_weight=0, hidden_size=1, moe_top_k=1)
    with torch.no_grad():
        layer.router.layer.weight.fill_(3e38)
    with LossCollector() as losses:
        layer(torch.ones(2, 1))
    assert losses.z_loss().isinf()
    assert losses.total().isfinite()


def test_a_pipelines_stages_add_up_to_the_model(x):
    """MegaBlocks divides by the number of layers of the whole model."""
    layers = [Layer() for _ in range(4)]
    with LossCollector() as whole:
        for layer in layers:
            layer(x)
    stages = []
    for stage in (layers[:1], layers[1:]):
        with LossCollector(num_layers=4) as losses:
            for layer in stage:
                layer(x)
        stages.append(losses.total())
    torch.testing.assert_close(sum(stages), whole.total())


def test_sigmoid_scores_are_shares_first():
    """Balanced load costs 1 with sigmoid scores too, whatever their size."""
    layer = Layer(moe_router_score="sigmoid", moe_num_experts=4, moe_top_k=4)
    with torch.no_grad():
        layer.router.layer.weight.zero_()
    with LossCollector() as losses:
        layer(torch.ones(4, 8))
    assert losses.records[0].scores.eq(0.5).all()
    assert losses.load_balancing() == 1


@pytest.mark.parametrize("loss", ["load_balancing", "z_loss", "total"])
def test_gradients_reach_every_router(x, loss):
    layers = nn.Sequential(Layer(), Layer())
    with LossCollector() as losses:
        layers(x)
    getattr(losses, loss)().backward()
    for layer in layers:
        assert layer.router.layer.weight.grad.any()


def test_nothing_is_collected_outside_the_block(x):
    layer = Layer()
    losses = LossCollector()
    layer(x)
    with losses:
        pass
    layer(x)
    assert losses.records == ()
    assert losses.total() == losses.load_balancing() == losses.z_loss() == 0


def test_nothing_is_collected_in_eval_mode(x):
    with LossCollector() as losses:
        Layer().eval()(x)
    assert losses.records == ()


def test_a_block_starts_empty_and_closes_after_an_error(x):
    layer, losses = Layer(), LossCollector()

    def fail():
        with losses:
            layer(x)
            layer(x)
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    layer(x)
    assert len(losses.records) == 2
    with losses:
        layer(x)
    assert len(losses.records) == 1


def test_the_inner_of_two_blocks_collects(x):
    layer = Layer()
    with LossCollector() as outer:
        layer(x)
        with LossCollector() as inner:
            layer(x)
            layer(x)
        layer(x)
    assert (len(outer.records), len(inner.records)) == (2, 2)


def test_another_thread_collects_for_itself(x):
    layer = Layer()
    with LossCollector() as losses:
        thread = threading.Thread(target=layer, args=(x,))
        thread.start()
        thread.join()
        assert losses.records == ()
        layer(x)
    assert len(losses.records) == 1


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_a_recomputation_is_not_collected_again(x, inside):
    """The backward of a checkpointed layer runs its forward once more."""
    layer, plain, forwards = Layer(), Layer(), []
    plain.load_state_dict(layer.state_dict())
    layer.router.register_forward_hook(lambda *args: forwards.append(1))
    x.requires_grad_()
    with LossCollector() as losses:
        out = checkpoint(layer, x, use_reentrant=False)
        total = out.sum() + losses.total()
        if inside:
            total.backward()
    if not inside:
        total.backward()
    assert len(forwards) == 2
    assert len(losses.records) == 1
    got = layer.router.layer.weight.grad
    with LossCollector() as losses:
        out = plain(x)
    (out.sum() + losses.total()).backward()
    torch.testing.assert_close(got, plain.router.layer.weight.grad)


def test_a_recomputation_belongs_to_no_later_block(x):
    """The backward of one step may run while the block of the next is open."""
    layer = Layer()
    x.requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False)
    with LossCollector() as losses:
        out.sum().backward()
    assert losses.records == ()


def test_reentrant_checkpointing_is_warned_about(x):
    """It runs the forward without gradients, so the losses would silently train nothing."""
    x.requires_grad_()
    with LossCollector() as losses:
        with pytest.warns(UserWarning, match="use_reentrant=False"):
            out = checkpoint(Layer(), x, use_reentrant=True)
        out.sum().backward()
    assert len(losses.records) == 1


def test_a_compiled_model_is_one_graph_while_nobody_collects(x):
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    assert compiled(x).shape == x.shape


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, which it hides itself
def test_a_compiled_model_is_collected_with_gradients(x):
    layer = Layer()
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(x)  # one that was traced without a collector notices that there is one
    with LossCollector() as losses:
        compiled(x)
    assert len(losses.records) == 1
    losses.total().backward()
    got, layer.router.layer.weight.grad = layer.router.layer.weight.grad, None
    with LossCollector() as losses:
        layer(x)
    losses.total().backward()
    torch.testing.assert_close(got, layer.router.layer.weight.grad)
