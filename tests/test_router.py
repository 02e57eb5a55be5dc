"""The router: scores, choices, weights, and the count of tokens per expert."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from gmm_registry.layers.arguments import Arguments
from gmm_registry.layers.router import Router, count_tokens, route

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.hardware,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def router(**options):
    defaults = {"hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2, "dtype": torch.float32}
    return Router(Arguments(**{**defaults, **options}))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("normalize", "weights"), [(None, [0.4, 0.3]), (0, [0.4, 0.3]), (1, [4 / 7, 3 / 7])])
def test_renormalisation_is_a_choice(normalize, weights):
    """sglang 35160, torchtitan 1448: logits ln[1,2,3,4], k=2."""
    routing = route(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log(), 2, normalize=normalize)
    assert routing.experts.tolist() == [[3, 2]]
    assert routing.experts.dtype == torch.int64
    torch.testing.assert_close(routing.weights, torch.tensor([weights]))


@pytest.mark.parametrize("p", [1, 2, 0.5, float("inf")])
def test_renormalisation_is_by_the_p_norm(p):
    routing = route(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log(), 2, normalize=p)
    torch.testing.assert_close(routing.weights.norm(p, dim=-1), torch.ones(1))
    assert routing.weights[0, 0] / routing.weights[0, 1] == pytest.approx(4 / 3)


def test_top_1_is_normalised_along_the_choices():
    """megablocks 87: 3 tokens, k=1: across the tokens it would be [1/3, ...]."""
    logits = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]], requires_grad=True)
    routing = route(logits, 1, normalize=1)
    assert routing.weights.shape == (3, 1)
    assert torch.equal(routing.weights, torch.ones(3, 1))
    routing.weights.sum().backward()
    assert not logits.grad.any()  # what Arguments warns about


def test_selection_bias_never_enters_the_weight():
    """transformers 39581: probabilities [.6, .4], bias [0, 1], k=1."""
    logits = torch.tensor([[0.6, 0.4]]).log()
    routing = route(logits, 1, selection_bias=torch.tensor([0.0, 1.0]))
    assert routing.experts.tolist() == [[1]]
    torch.testing.assert_close(routing.weights, torch.tensor([[0.4]]))
    torch.testing.assert_close(routing.scores, torch.tensor([[0.6, 0.4]]))
    assert route(logits, 1).experts.tolist() == [[0]]


def test_sigmoid_scores_are_chosen_with_the_bias_and_weighted_without():
    """DeepSeek-V3: sigmoid, selection-only bias, weights renormalised over those chosen."""
    scores = torch.tensor([[0.2, 0.5, 0.6, 0.9]])
    bias = torch.tensor([0.9, 0.0, 0.0, 0.0])
    routing = route(scores.logit(), 2, score="sigmoid", selection_bias=bias, normalize=1)
    assert routing.experts.tolist() == [[0, 3]]
    torch.testing.assert_close(routing.scores, scores)
    torch.testing.assert_close(routing.weights, torch.tensor([[0.2 / 1.1, 0.9 / 1.1]]))


def test_softmax_after_top_k_runs_over_the_chosen():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()
    routing = route(logits, 2, softmax_after_top_k=True)
    torch.testing.assert_close(routing.weights, torch.tensor([[4 / 7, 3 / 7]]))
    torch.testing.assert_close(routing.scores, torch.tensor([[0.1, 0.2, 0.3, 0.4]]))


def test_sigmoid_scores_of_0_give_weights_of_0_and_no_nan():
    logits = torch.full((1, 4), -200.0, requires_grad=True)
    routing = route(logits, 2, score="sigmoid", normalize=1)
    assert routing.weights.tolist() == [[0, 0]]
    routing.weights.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(1, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_computed_in_fp32(dtype):
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for options in ({}, {"normalize": 1}, {"score": "sigmoid"}, {"softmax_after_top_k": True}):
        routing = route(logits, 4, **options)
        exact = route(logits.double(), 4, **options)
        assert routing.scores.dtype == routing.weights.dtype == torch.float32
        assert routing.logits is logits
        torch.testing.assert_close(routing.scores.double(), exact.scores, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(routing.weights.double(), exact.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": 1},
        {"normalize": 2},
        {"score": "sigmoid", "normalize": 1},
        {"softmax_after_top_k": True},
        {"selection_bias": torch.tensor([0.0, 0.3, 0.0, 0.1, 0.2])},
    ],
)
def test_gradients(options):
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()

    def outputs(logits):
        routing = route(logits, 2, **options)
        return routing.scores, routing.weights

    assert torch.autograd.gradcheck(outputs, logits)
    assert torch.autograd.gradgradcheck(outputs, logits)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 3), (8, 8), (8, 1), (256, 8), (1000, 999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_row_gets_ids_that_exist(score, num_experts, top_k, dtype, device):
    """vllm 39391: one NaN row, E=8, k=3; and NaN in half of a row."""
    logits = torch.randn(3, num_experts, dtype=dtype, device=device)
    logits[1] = torch.nan
    logits[2, ::2] = torch.nan
    routing = route(logits, top_k, score=score)
    for ids in routing.experts.tolist():
        assert len(set(ids)) == top_k
        assert set(ids) <= set(range(num_experts))
    assert routing.weights[0].isfinite().all()
    assert routing.weights[1].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_ties_are_routed_the_same_in_a_recomputation(device):
    """vllm 55514: zero logits (3, 8), k=2, with and without checkpointing."""
    seen = []

    def layer(logits):
        routing = route(logits, 2)
        seen.append(routing.experts)
        return routing.weights * routing.experts

    logits = torch.zeros(3, 8, device=device, requires_grad=True)
    plain = torch.autograd.grad(layer(logits).sum(), logits)[0]
    again = torch.autograd.grad(checkpoint(layer, logits, use_reentrant=False).sum(), logits)[0]
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("logits", "top_k", "options", "match"),
    [
        (torch.zeros(4), 1, {}, r"\(4,\)"),
        (torch.zeros(2, 4), 5, {}, "top_k=5 must be from 1 to the 4 experts"),
        (torch.zeros(2, 4), 0, {}, "top_k=0"),
        (torch.zeros(2, 4), 1, {"score": "tanh"}, "score='tanh' is unknown; there are 'softmax', 'sigmoid'"),
        (torch.zeros(2, 4), 1, {"score": "sigmoid", "softmax_after_top_k": True}, "not 'sigmoid'"),
        (torch.zeros(2, 4), 1, {"selection_bias": torch.zeros(1)}, r"must be \(4,\), got shape \(1,\)"),
    ],
)
def test_what_does_not_fit_is_refused(logits, top_k, options, match):
    with pytest.raises(ValueError, match=match):
        route(logits, top_k, **options)


# count_tokens


@pytest.mark.parametrize("device", DEVICES)
def test_integers_are_counted_in_deterministic_mode(deterministic, device):
    """transformers 43583, 45685: ids [0,1,1] int64, deterministic mode on."""
    counts = count_tokens(torch.tensor([0, 1, 1], device=device), 2)
    assert counts.tolist() == [1, 2]
    assert counts.dtype == torch.int64


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 5)), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_counts_of_any_ids(ids, dtype):
    assert count_tokens(torch.tensor(ids, dtype=dtype), 5).tolist() == [ids.count(e) for e in range(5)]


def test_ids_of_nobody_here_are_not_counted():
    assert count_tokens(torch.tensor([[0, 2], [1, 2], [-1, 7]]), 2).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_counts_are_exact_beyond_what_the_dtype_of_the_layer_can_count(dtype):
    """bf16 stops counting at 256, fp32 at 2**24: transformers 45685 counted in floats."""
    tokens = {torch.bfloat16: 3 * 257, torch.float32: 2**24 + 1}[dtype]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert count_tokens(torch.ones(tokens, 1, dtype=torch.int64), 2).tolist() == [0, tokens]


def test_nothing_of_the_count_reaches_the_host():
    counts = count_tokens(torch.empty(5, 2, dtype=torch.int64, device="meta"), 3)  # meta has nothing to read
    assert (counts.shape, counts.dtype, counts.device.type) == ((3,), torch.int64, "meta")


# Router


def test_router_is_megablocks_parameter_and_no_more():
    assert {name: p.shape for name, p in router().state_dict().items()} == {"layer.weight": (4, 8)}
    assert router(init_method=torch.nn.init.ones_).layer.weight.eq(1).all()
    assert router(dtype=torch.bfloat16).layer.weight.dtype == torch.bfloat16


def test_router_takes_any_leading_dimensions():
    layer, x = router(), torch.randn(2, 3, 8)
    routing = layer(x.transpose(0, 1))
    want = route(x.transpose(0, 1).reshape(6, 8) @ layer.layer.weight.T, 2)
    torch.testing.assert_close(routing.weights, want.weights)
    assert torch.equal(routing.experts, want.experts)
    assert routing.scores.shape == routing.logits.shape == (6, 4)


def test_router_without_tokens_stays_in_the_graph():
    x = torch.randn(2, 0, 8, requires_grad=True)
    layer = router(moe_jitter_eps=0.1)
    routing = layer(x)
    assert routing.experts.shape == (0, 2)
    routing.weights.sum().backward()
    assert torch.equal(layer.layer.weight.grad, torch.zeros(4, 8))


def test_router_passes_its_options_on():
    layer = router(
        moe_router_score="sigmoid", moe_router_bias=True, moe_normalize_expert_weights=1, moe_top_k=3
    )
    layer.e_score_correction_bias.copy_(torch.tensor([0.0, 5.0, 0.0, 2.0]))
    x = torch.randn(5, 8)
    want = route(
        layer.layer(x), 3, score="sigmoid", selection_bias=layer.e_score_correction_bias, normalize=1
    )
    got = layer(x)
    assert got.experts[:, :2].tolist() == [[1, 3]] * 5
    assert torch.equal(got.experts, want.experts)
    assert torch.equal(got.weights, want.weights)
    after = router(moe_softmax_after_top_k=True)
    assert torch.equal(after(x).weights, route(after.layer(x), 2, softmax_after_top_k=True).weights)


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()],
    ids=["to", "half", "double"],
)
def test_correction_bias_stays_fp32(convert):
    """1.001 is 1 in bf16: a bias that is stepped by 0.001 would stand still."""
    parent = torch.nn.Sequential(router(moe_router_bias=True))
    parent[0].e_score_correction_bias.fill_(1.001)
    bias = convert(parent)[0].e_score_correction_bias
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.full((4,), 1.001))
    assert parent[0].layer.weight.dtype != torch.float32
    assert parent.state_dict()["0.e_score_correction_bias"] is not None


def test_correction_bias_moves_with_the_module():
    layer = router(moe_router_bias=True)
    assert layer.to("meta", torch.bfloat16).e_score_correction_bias.device.type == "meta"
    assert layer.e_score_correction_bias.dtype == torch.float32
    assert layer.to_empty(device="cpu").e_score_correction_bias.device.type == "cpu"
    assert copy.deepcopy(layer).e_score_correction_bias.dtype == torch.float32


def test_correction_bias_gets_no_gradient():
    layer = router(moe_router_bias=True)
    assert [name for name, _ in layer.named_parameters()] == ["layer.weight"]
    layer(torch.randn(3, 8)).weights.sum().backward()
    assert layer.layer.weight.grad.any()


def test_jitter_multiplies_in_training_only():
    layer = router(moe_jitter_eps=0.1, moe_num_experts=1, moe_top_k=1, hidden_size=1)
    with torch.no_grad():
        layer.layer.weight.fill_(1)
    x = torch.ones(1000, 1)
    noise = layer(x).logits
    assert noise.min() >= 0.9
    assert noise.min() < 0.91
    assert noise.max() <= 1.1
    assert noise.max() > 1.09
    assert torch.equal(layer.eval()(x).logits, x)
    assert torch.equal(router(hidden_size=1, init_method=torch.nn.init.ones_)(x).logits, x.expand(-1, 4))


def test_jitter_keeps_the_dtype():
    layer = router(moe_jitter_eps=0.1, dtype=torch.bfloat16)
    assert layer(torch.randn(3, 8, dtype=torch.bfloat16)).logits.dtype == torch.bfloat16


def test_jitter_repeats_in_a_recomputation():
    layer, seen = router(moe_jitter_eps=0.5), []

    def forward(x):
        routing = layer(x)
        seen.append(routing.experts)
        return routing.weights * routing.experts  # the recomputation ends with the last saved tensor

    checkpoint(forward, torch.randn(64, 8, requires_grad=True), use_reentrant=False).sum().backward()
    assert torch.equal(*seen)


def test_uniform_assignment_is_balanced_and_distinct():
    layer = router(uniform_expert_assignment=True)
    routing = layer(torch.randn(6, 8))
    assert count_tokens(routing.experts, 4).tolist() == [3, 3, 3, 3]
    assert routing.experts.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]
    routing.weights.sum().backward()
    assert layer.layer.weight.grad is not None


def test_router_compiles_to_one_graph():
    layer = router(moe_router_bias=True, moe_normalize_expert_weights=1)
    x = torch.randn(6, 8)
    got = torch.compile(lambda x: layer(x).weights, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, layer(x).weights)
