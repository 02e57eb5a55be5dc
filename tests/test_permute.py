"""Permutation: which row each choice takes, and what comes back, forward and backward."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gmm_registry import BatchSizes, gmm
from gmm_registry.layers.permute import permute, sort_by_expert, unpermute


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def experts_of(tokens, top_k, num_experts, seed=0):
    """Choose distinct experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices


def expected_rows(experts, num_experts, block):
    """Say with plain loops which (token, choice) each row holds; None in padding."""
    rows = []
    for expert in range(num_experts):
        mine = [(t, k) for t, ids in enumerate(experts.tolist()) for k, e in enumerate(ids) if e == expert]
        rows += mine + [None] * (-len(mine) % block)
    return rows


@st.composite
def permutations(draw):
    num_experts, block = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 4]))
    tokens, top_k = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    foreign = draw(st.booleans())
    highest = num_experts if foreign else num_experts - 1
    ids = draw(st.lists(st.integers(0, highest), min_size=tokens * top_k, max_size=tokens * top_k))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    experts = torch.tensor(ids, dtype=dtype).view(tokens, top_k)
    return experts, num_experts, block, foreign


@settings(max_examples=200, deadline=None)
@given(problem=permutations())
def test_any_permutation_is_what_loops_give(problem):
    experts, num_experts, block, foreign = problem
    (tokens, top_k), hidden = experts.shape, 3
    rows = expected_rows(experts, num_experts, block)
    where = {slot: r for r, slot in enumerate(rows) if slot is not None}

    p = sort_by_expert(experts, num_experts, block=block, foreign=foreign)
    assert p.rows == len(rows)
    assert p.token.tolist() == [-1 if slot is None else slot[0] for slot in rows]
    assert p.slot.tolist() == [-1 if slot is None else slot[0] * top_k + slot[1] for slot in rows]
    assert p.slot_row.tolist() == [[where.get((t, k), -1) for k in range(top_k)] for t in range(tokens)]
    assert {p.token.dtype, p.slot.dtype, p.slot_row.dtype} == {torch.int64}
    counts = [(experts == e).sum().item() for e in range(num_experts)]
    assert p.batch_sizes.host.tolist() == counts
    assert p.padded_counts.tolist() == p.row_counts.host.tolist() == [-(-c // block) * block for c in counts]
    assert p.padded_counts.dtype == torch.int64

    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64, requires_grad=True)
    scale = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)[:, None]
    got_rows = permute(x, p)
    want_rows = [x.new_zeros(hidden) if slot is None else x[slot[0]] for slot in rows]
    assert torch.equal(got_rows, torch.stack(want_rows) if rows else x.new_zeros(0, hidden))
    got = unpermute(got_rows * scale, p, weights)
    total = torch.zeros(tokens, 1, dtype=torch.float64)
    for (t, k), r in where.items():
        total = total.index_put((torch.tensor(t),), weights[t, k] * scale[r], accumulate=True)
    want = x * total
    torch.testing.assert_close(got, want)
    grad = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    got_grads = torch.autograd.grad(got, (x, weights), grad)
    want_grads = torch.autograd.grad(want, (x, weights), grad, allow_unused=True)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g, torch.zeros_like(g) if w is None else w)


def test_rows_of_one_expert_stay_in_order():
    """A long run: an unstable sort keeps a short one in order by chance."""
    experts = experts_of(5000, 2, 3)
    p = sort_by_expert(experts, 3)
    for slots in p.slot.split(p.batch_sizes.host.tolist()):
        assert slots.diff().gt(0).all()


def test_ids_may_lie_in_memory_in_any_way():
    experts = experts_of(6, 3, 4)
    p, want = sort_by_expert(experts.T.contiguous().T, 4), sort_by_expert(experts, 4)
    assert torch.equal(p.slot_row, want.slot_row)
    assert torch.equal(p.token, want.token)


def test_numbers_travel_with_rows_and_choices():
    experts = torch.tensor([[1, 0], [2, 1], [0, 2]])
    values = torch.arange(1.0, 7.0).view(3, 2)
    p = sort_by_expert(experts, 3, block=2)
    assert p.per_row(values).tolist() == [2, 5, 1, 4, 3, 6]
    assert torch.equal(p.per_choice(p.per_row(values)), values)
    p = sort_by_expert(experts, 2, block=4, foreign=True)
    assert p.per_row(values).tolist() == [2, 5, 0, 0, 1, 4, 0, 0]
    assert p.per_choice(p.per_row(values)).tolist() == [[1, 2], [0, 4], [5, 0]]
    nothing = sort_by_expert(torch.full((3, 2), 9), 2, foreign=True)
    assert nothing.per_choice(nothing.per_row(values)).tolist() == [[0, 0]] * 3


# Host and device


class HostReads(TorchDispatchMode):
    """Count what brings numbers to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        copied = func is torch.ops.aten._to_copy.default and out.device != args[0].device
        self.count += copied or func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.is_nonzero.default,
        )
        return out


def test_nothing_waits_for_the_device():
    """On meta nothing can be read; a read of the host's raises."""
    experts = torch.empty(5, 2, dtype=torch.int64, device="meta")
    x = torch.empty(5, 8, device="meta", requires_grad=True)
    weights = torch.empty(5, 2, device="meta", requires_grad=True)
    with HostReads() as reads:
        p = sort_by_expert(experts, 3)
        out = unpermute(permute(x, p), p, weights)
        out.sum().backward()
    assert reads.count == 0
    assert (p.rows, out.shape, weights.grad.shape) == (10, (5, 8), (5, 2))
    assert p.batch_sizes.counts.is_meta
    assert all(index.is_meta for index in (p.token, p.slot, p.slot_row))


def test_device_counts_go_through_from_device(monkeypatch):
    taken = []
    monkeypatch.setattr(BatchSizes, "from_device", lambda counts: taken.append(counts) or BatchSizes(counts))
    sort_by_expert(torch.empty(5, 2, dtype=torch.int64, device="meta"), 3)
    assert [counts.shape for counts in taken] == [(3,)]
    sort_by_expert(torch.zeros(5, 2, dtype=torch.int64), 3)
    assert len(taken) == 1


@pytest.mark.parametrize("options", [{"foreign": True}, {"block": 4}, {"block": 4, "foreign": True}])
def test_padding_and_foreign_ids_read_the_counts_once(options, monkeypatch):
    reads = []
    original = BatchSizes._to
    monkeypatch.setattr(
        BatchSizes, "_to", lambda self, device: reads.append(device) or original(self, device)
    )
    with pytest.raises(NotImplementedError, match="meta"):  # the read itself
        sort_by_expert(torch.empty(5, 2, dtype=torch.int64, device="meta"), 3, **options)
    assert len(reads) == 1


# Determinism and precision


@pytest.mark.parametrize("options", [{}, {"block": 16}, {"foreign": True}])
def test_bits_repeat_and_deterministic_mode_accepts_all_of_it(deterministic, options):
    """transformers 43583, 45685: deterministic mode on."""
    experts = experts_of(300, 3, 8)
    x = torch.randn(300, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(300, 3, requires_grad=True)

    def run():
        p = sort_by_expert(experts, 8 if not options.get("foreign") else 6, **options)
        out = unpermute(permute(x, p) * 1.7, p, weights)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, weights))

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_taken_in_fp32_and_rounded_once(dtype):
    """256 + 1 + 1 is 256 where bf16 rounds after each step."""
    big = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    experts = torch.tensor([[0, 1, 2]])
    p = sort_by_expert(experts, 3)
    rows = torch.tensor([[big], [1], [1]], dtype=dtype, requires_grad=True)
    for weights in (None, torch.ones(1, 3)):
        out = unpermute(rows, p, weights)
        assert out.dtype == dtype
        assert out.item() == big + 2
    x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    permute(x, p).backward(rows.detach())
    assert x.grad.item() == big + 2


def test_gathering_in_parts_gives_the_same(monkeypatch):
    """The sum without weights gathers all choices of some tokens at once."""
    p = sort_by_expert(experts_of(50, 3, 8), 6, foreign=True)
    rows = torch.randn(p.rows, 4)
    whole = unpermute(rows, p)
    for gathered in (1, 100, 3 * 4 * 50):  # one token, 8 tokens, all tokens a part
        monkeypatch.setitem(unpermute.__globals__, "_GATHERED", gathered)
        assert torch.equal(unpermute(rows, p), whole)
    torch.testing.assert_close(unpermute(rows, p, torch.ones(50, 3)), whole)


def test_weights_are_not_rounded_to_the_rows_dtype():
    p = sort_by_expert(torch.tensor([[0, 1]]), 2)
    rows = torch.tensor([[256.0], [-256.0]], dtype=torch.bfloat16, requires_grad=True)
    weights = torch.tensor([[1.0 + 2**-8, 1.0]], requires_grad=True)  # the first is 1 in bf16
    out = unpermute(rows, p, weights)
    assert out.item() == 1
    out.backward(torch.tensor([[1.5]], dtype=torch.bfloat16))
    assert rows.grad.tolist() == [[1.5 + 2**-7], [1.5]]  # (1 + 2**-8) * 1.5, rounded once
    assert weights.grad.tolist() == [[384, -384]]


def test_weight_gradient_is_a_dot_product_in_fp32():
    """256 + 1 again, along the hidden dimension; this gradient trains the router."""
    p = sort_by_expert(torch.tensor([[0]]), 1)
    rows = torch.tensor([[256.0, 1, 0.5]], dtype=torch.bfloat16)
    weights = torch.ones(1, 1, requires_grad=True)
    unpermute(rows, p, weights).backward(torch.ones(1, 3, dtype=torch.bfloat16))
    assert weights.grad.item() == 257.5
    assert weights.grad.dtype == torch.float32


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_can_be_differentiated_again(block, foreign, weighted):
    experts = torch.tensor([[0, 1], [2, 1], [0, 3], [3, 0], [1, 2]])
    p = sort_by_expert(experts, 3 if foreign else 4, block=block, foreign=foreign)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = torch.randn(p.rows, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    inputs = (rows, weights) if weighted else (rows,)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: permute(x, p), x)
        assert check(lambda rows, *weights: unpermute(rows, p, *weights), inputs)


def test_frozen_operands_save_nothing():
    """TransformerEngine 1258, for the combine: no rows stay alive for a gradient that nobody wants."""
    p = sort_by_expert(torch.tensor([[0, 1], [1, 0]]), 2)
    rows, weights = torch.randn(4, 3, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    for frozen, kept in ((weights, weights), (rows, rows)):
        frozen.requires_grad_(False)
        saved = []

        def save(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            unpermute(rows, p, weights)
        assert [t.shape for t in saved if t.is_floating_point()] == [kept.shape]
        frozen.requires_grad_(True)


# Foreign experts


def test_foreign_choices_are_never_multiplied():
    """transformers 48205: E=2, ids [[0,2],[1,2]], weights [[1,0],[1,0]], dirty allocator, two steps."""
    experts = torch.tensor([[0, 2], [1, 2]])
    weight = torch.randn(2, 8, 8, requires_grad=True)
    scores = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    x = torch.randn(2, 8, requires_grad=True)
    optimizer = torch.optim.SGD([weight, scores, x], lr=0.1)
    for _ in range(2):
        dirt = [torch.full((size,), torch.nan) for size in (8, 16, 32, 64, 128) for _ in range(50)]
        del dirt  # what is allocated now holds NaN
        p = sort_by_expert(experts, 2, foreign=True)
        assert p.rows == 2
        out = unpermute(gmm(permute(x, p), weight, p.batch_sizes), p, scores)
        optimizer.zero_grad()
        out.square().sum().backward()
        for tensor in (out, x.grad, weight.grad, scores.grad):
            assert tensor.isfinite().all()
        assert scores.grad[:, 1].eq(0).all()
        assert scores.grad[:, 0].ne(0).all()
        optimizer.step()


@pytest.mark.parametrize("block", [1, 4])
def test_nan_in_place_of_a_foreign_choice_or_of_padding_goes_nowhere(block):
    """The kind of transformers 48205: garbage as row, as weight, as row of padding."""
    experts = torch.tensor([[2, 2], [1, 2], [0, 2]])
    p = sort_by_expert(experts, 2, block=block, foreign=True)
    x = torch.tensor([[torch.nan], [1.0], [2.0]], requires_grad=True)  # token 0 goes nowhere
    assert permute(x, p).isfinite().all()
    rows = torch.full((p.rows, 1), torch.nan)
    rows[p.slot_row[1, 0]] = 5
    rows.requires_grad_()
    weights = torch.tensor([[torch.nan, torch.inf], [0.5, torch.nan], [0.0, 0.0]], requires_grad=True)
    out = unpermute(rows, p, weights)
    assert out[:2].tolist() == [[0], [2.5]]  # token 2's own row is NaN
    out.backward(torch.tensor([[torch.nan], [1.0], [1.0]]))
    assert weights.grad[0].tolist() == [0, 0]
    assert weights.grad[1].tolist() == [5, 0]
    assert weights.grad[2, 1] == 0
    real = torch.zeros(p.rows)
    real[p.slot_row[1, 0]] = 0.5
    assert rows.grad[:, 0].tolist() == real.tolist()
    permute(x, p).backward(torch.where(p.token[:, None] < 0, torch.nan, 1.0))
    assert x.grad.tolist() == [[0], [1], [1]]


def test_second_derivatives_are_masked_too():
    """What _Permute does with weights is seen in the gradient of a gradient only."""
    p = sort_by_expert(torch.tensor([[0, 1], [1, 2]]), 2, block=4, foreign=True)
    weights = torch.tensor([[1.0, 2.0], [3.0, torch.nan]], requires_grad=True)
    rows = torch.ones(p.rows, 1, requires_grad=True)
    grad_out = torch.tensor([[torch.inf], [1.0]], requires_grad=True)
    (grad_rows,) = torch.autograd.grad(unpermute(rows, p, weights), rows, grad_out, create_graph=True)
    assert grad_rows[:, 0].tolist() == [torch.inf, 0, 0, 0, torch.inf, 3, 0, 0]
    finite = torch.where(p.token[:, None] == 1, grad_rows, 0.0)
    grads = torch.autograd.grad(finite.sum(), (weights, grad_out))
    assert grads[0][1].tolist() == [1, 0]
    assert grads[1][1].tolist() == [3]


def test_an_id_of_nobody_is_an_error_unless_it_is_foreign():
    for wrong in (2, -1):
        experts = torch.tensor([[0, 1], [1, wrong]])
        for block in (1, 4):
            with pytest.raises(ValueError, match=f"expert id {wrong} is not from 0 to 1"):
                sort_by_expert(experts, 2, block=block)
        p = sort_by_expert(experts, 2, foreign=True)
        assert p.slot_row.tolist() == [[0, 1], [2, -1]]


def test_ids_of_nobody_on_a_device_do_not_add_up():
    """There sort_by_expert must not look; `gmm` compares the counts with the rows."""
    compiled = torch.compile(
        lambda e: sort_by_expert(e, 2).batch_sizes.counts, fullgraph=True, backend="aot_eager"
    )
    assert compiled(torch.tensor([[0, 1], [1, 7]])).tolist() == [1, 2]


# Padding


@pytest.mark.parametrize("weighted", [False, True])
def test_padded_rows_give_what_unpadded_ones_give(weighted):
    """torchtitan 1651: cnt [5, 3], pad 16: 8 rows out, gradients as unpadded."""
    experts = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0])[:, None]
    results = []
    for block in (1, 16):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 4, generator=generator, requires_grad=True)
        weight = torch.randn(2, 4, 4, generator=generator, requires_grad=True)
        scores = torch.rand(8, 1, generator=generator, requires_grad=True)
        p = sort_by_expert(experts, 2, block=block)
        assert p.batch_sizes.host.tolist() == [5, 3]
        assert p.row_counts.host.tolist() == ([5, 3] if block == 1 else [16, 16])
        rows = permute(x, p)
        assert rows.shape == (p.rows, 4)
        out = unpermute(gmm(rows, weight, p.row_counts) + 1, p, scores if weighted else None)
        assert out.shape == (8, 4)
        out.square().sum().backward()
        results.append((out, x.grad, weight.grad, scores.grad if weighted else out))
    for padded, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(padded, plain)


def test_rows_of_the_unpadded_number_are_refused():
    p = sort_by_expert(torch.tensor([[0], [1]]), 2, block=4)
    with pytest.raises(ValueError, match=r"R = 8, padding included, got shape \(2, 3\)"):
        unpermute(torch.zeros(2, 3), p)


# Nothing to do


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize(
    ("experts", "foreign"),
    [
        (torch.zeros(0, 2, dtype=torch.int64), False),
        (torch.zeros(0, 2, dtype=torch.int64), True),
        (torch.full((3, 2), 4), True),
    ],
    ids=["no tokens", "no tokens, foreign", "all dropped"],
)
def test_nothing_to_do_stays_in_the_graph(experts, foreign, block):
    """TransformerEngine 3019, Megatron 4851: a rank without tokens leaves the graph."""
    tokens = experts.shape[0]
    p = sort_by_expert(experts, 4, block=block, foreign=foreign)
    assert p.rows == 0
    assert p.batch_sizes.host.tolist() == p.padded_counts.tolist() == [0, 0, 0, 0]
    x = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(4, 8, 8, requires_grad=True)
    scores = torch.rand(tokens, 2, requires_grad=True)
    out = unpermute(gmm(permute(x, p), weight, p.row_counts), p, scores)
    assert torch.equal(out, torch.zeros(tokens, 8))
    assert out.grad_fn is not None
    out.sum().backward()
    for leaf in (x, weight, scores):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_rows_without_width_are_possible():
    p = sort_by_expert(torch.tensor([[0, 1], [1, 0]]), 2)
    assert unpermute(permute(torch.zeros(2, 0), p), p).shape == (2, 0)


# What is refused


def test_arguments_that_do_not_fit_are_refused():
    experts = torch.tensor([[0, 1], [1, 0], [0, 1]])
    with pytest.raises(ValueError, match=r"experts must be \(T, K\), got shape \(6,\)"):
        sort_by_expert(experts.flatten(), 2)
    with pytest.raises(TypeError, match=r"experts are torch\.float32"):
        sort_by_expert(experts.float(), 2)
    with pytest.raises(ValueError, match="block=0 must be at least 1"):
        sort_by_expert(experts, 2, block=0)
    p = sort_by_expert(experts, 2)
    with pytest.raises(ValueError, match=r"x must be \(T, H\) with T = 3, got shape \(6, 4\)"):
        permute(torch.zeros(6, 4), p)
    with pytest.raises(ValueError, match=r"rows must be \(R, H\) with R = 6, .* got shape \(3, 4\)"):
        unpermute(torch.zeros(3, 4), p)
    with pytest.raises(ValueError, match=r"weights must be \(T, K\) = \(3, 2\), got shape \(6,\)"):
        unpermute(torch.zeros(6, 4), p, torch.ones(6))


# Compiled


# torch's own: the compiler instantiates the function that it traces
instantiates = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@instantiates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("options", [{}, {"block": 4}, {"foreign": True}, {"block": 4, "foreign": True}])
def test_compiled_code_is_one_graph_and_gives_the_same(options, weighted, dtype):
    experts = experts_of(6, 2, 4)
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    weights = torch.rand(6, 2, requires_grad=True)
    outside = sort_by_expert(experts, 3 if "foreign" in options else 4, **options)

    def layer(x, weights, experts):
        # With options the counts are read, which breaks a graph.
        p = outside if options else sort_by_expert(experts, 4)
        return unpermute(permute(x, p).tanh(), p, weights if weighted else None)

    leaves = (x, weights) if weighted else (x,)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = (f(x, weights, experts) for f in (compiled, layer))
    torch.testing.assert_close(got, want)
    got, want = (torch.autograd.grad(out.square().sum(), leaves) for out in (got, want))
    torch.testing.assert_close(got, want)


@instantiates
def test_compiled_code_serves_any_number_of_tokens(monkeypatch):
    """Gathering in parts would make their number a constant of the graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    monkeypatch.setitem(unpermute.__globals__, "_GATHERED", 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(unpermute, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (6, 9, 40):
        p = sort_by_expert(experts_of(tokens, 2, 4), 4)
        rows = torch.randn(p.rows, 8)
        torch.testing.assert_close(compiled(rows, p), unpermute(rows, p))
    assert counter.frame_count == 1


# A device


@pytest.mark.hardware
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_cuda_gives_the_same_bits_without_synchronisation(mode):
    """transformers 43583, 45685 (integers counted in deterministic mode); against the CPU."""
    experts = experts_of(1000, 8, 64)
    x = torch.randn(1000, 256, dtype=torch.bfloat16)
    weights = torch.rand(1000, 8)

    def run(device):
        leaves = [t.to(device).requires_grad_() for t in (x, weights)]
        ids = experts.to(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            p = sort_by_expert(ids, 64)
            out = unpermute(permute(leaves[0], p) * 1.7, p, leaves[1])
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [t.cpu() for t in (out, *grads, p.token, p.slot, p.slot_row, p.batch_sizes.counts)]

    torch.use_deterministic_algorithms(mode)
    try:
        first, second, want = run("cuda"), run("cuda"), run("cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(first, want)
    assert all(torch.equal(a, b) for a, b in zip(first[3:], want[3:], strict=True))


@pytest.mark.hardware
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_offsets_beyond_32_bits_on_cuda():
    """megablocks 186: 524,289 rows of 4096, only the last non-zero, last row exact; forward and backward."""
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GiB of device memory")
    x = torch.zeros(524_289, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.arange(4096) % 256
    x.requires_grad_()
    p = sort_by_expert(torch.zeros(524_289, 1, dtype=torch.int64, device="cuda"), 1)
    weights = torch.full((524_289, 1), 2.0, device="cuda", requires_grad=True)
    rows = permute(x, p)
    out = unpermute(rows, p, weights)
    out.backward(x.detach())
    assert torch.equal(rows[-1], x[-1])
    assert torch.equal(out[-1], 2 * x[-1])
    assert torch.equal(x.grad[-1], 2 * x[-1])
    assert weights.grad[-1, 0].item() == pytest.approx(x[-1].double().square().sum().item(), rel=1e-6)
    assert not any(t[:-1].any() for t in (rows, out, x.grad, weights.grad))


# Size


def need_memory(gibibytes):
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of memory")


@pytest.mark.slow
def test_offsets_beyond_32_bits_in_permute():
    """megablocks 186: 524,289 rows of 4096, only the last non-zero, last row exact."""
    need_memory(12)
    x = torch.zeros(524_289, 4096, dtype=torch.bfloat16)
    x[-1] = torch.arange(4096) % 256
    p = sort_by_expert(torch.zeros(524_289, 1, dtype=torch.int64), 1)
    rows = permute(x, p)
    assert torch.equal(rows[-1], x[-1])
    assert not rows[:-1].any()


@pytest.mark.slow
def test_offsets_beyond_32_bits_in_unpermute():
    """megablocks 186, the way back: 8 rows a token, so that the sum in fp32 fits into memory."""
    need_memory(12)
    tokens, top_k = 65_537, 8
    assert tokens * top_k * 4096 > 2**31
    p = sort_by_expert(torch.arange(top_k).expand(tokens, -1), top_k)
    rows = torch.zeros(tokens * top_k, 4096, dtype=torch.bfloat16)
    rows[-1] = torch.arange(4096) % 256
    out = unpermute(rows, p)
    assert torch.equal(out[-1], rows[-1])
    assert not out[:-1].any()
