"""npu.npu_fused on a device without hardware: the simulated one, or the real torch_npu on a stubbed CANN.

Tests that come from a fault somebody met name where it was reported.
"""

from typing import Any

import pytest
import torch
import torch_npu
from npu_memory import host, record

from gmm_registry import BackendUnavailableError, BatchSizes, Problem, explain, get_backend, gmm, use_backend
from gmm_registry.accelerator import synchronize
from gmm_registry.testing import BackendParityTests, Case, compare, reference_gmm, reference_grads
from gmm_registry.testing.parity import Outputs, differences, expected, run

CASE = Case("npu", (0, 5, 0, 11, 16, 0), 32, 48)
GMM, GMM_ADD = "npu::npu_grouped_matmul", "npu::npu_grouped_matmul_add_"


class TestNpuFused(BackendParityTests):
    device, impl, required = "npu", "npu_fused", True


class TestEagerOnNpu(BackendParityTests):
    """The loop over groups: what the simulated device itself does right."""

    device, impl, required = "npu", "eager", True


@pytest.fixture
def backend():
    return get_backend("npu")


@pytest.fixture
def inputs():
    return CASE.inputs().to("npu")


def test_is_the_best_backend(backend):
    assert str(backend.key) == "npu.npu_fused"
    assert str(explain("npu").chosen) == "npu.npu_fused"
    assert backend.rejections(Problem("npu", None, torch.bfloat16, 8, 4, 16, 16)) == []
    assert backend.priority(Problem("npu", None, torch.bfloat16, 8, 4, 16, 16)) == 50


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 1025}, "1025 groups; npu_grouped_matmul takes at most 1024"),
        ({"k": 65536}, "inner or outer dimension 65536; it takes at most 65535"),
        ({"n": 65536}, "inner or outer dimension 65536; it takes at most 65535"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"dtype": torch.int8}, "not torch.int8"),
        ({"rows": 1, "n": 1}, "takes a 1 x 1 operand for transposed"),
        ({"rows": 1, "k": 1}, "takes a 1 x 1 operand for transposed"),
        ({"device": "cpu"}, "on npu, not on cpu"),
    ],
)
def test_limits_are_refused_with_a_reason(backend, change, reason):
    allowed = {
        "device": "npu",
        "index": 0,
        "dtype": torch.float16,
        "rows": 8,
        "groups": 1024,
        "k": 65535,
        "n": 65535,
    }
    assert backend.rejections(Problem(**allowed)) == []
    (found,) = backend.rejections(Problem(**allowed | change))
    assert reason in found


@pytest.mark.parametrize("counts", [(0,) * 1024 + (3,), (0, 1)])
def test_automatic_choice_goes_around_a_limit(counts):
    """1025 groups, and one row of width 1: another backend computes, forward and backward."""
    case = Case("limit", counts, 8 if len(counts) > 2 else 1, 4)
    inputs = case.inputs()
    with record() as log:
        x, weight, sizes, grad_out = inputs.to("npu")
        out = gmm(x.requires_grad_(), weight.requires_grad_(), sizes)
        out.backward(grad_out)
    assert log.launches(GMM) == []
    got = Outputs(out.detach(), x.grad, weight.grad)
    assert all(found.passed for found in differences(got, expected(case, inputs), case).values())
    with pytest.raises(BackendUnavailableError, match="asked for by name"):
        gmm(x, weight, sizes, backend="npu_fused")


def test_130_groups_are_one_weight(backend):
    """hiascend docs: lists of tensors end at 128."""
    case = Case("130", (0, 1) * 65, 32, 16)
    inputs = case.inputs()
    with record() as log:
        got = run(backend, case, inputs)
    assert log.launches("npu::") == [GMM] * 3
    assert all(found.passed for found in differences(got, expected(case, inputs), case).values())


def test_what_is_absent_is_left_out(backend, inputs, monkeypatch):
    """sglang 26408: a list [None] in place of an absent one."""
    calls = []
    operator = torch_npu.npu_grouped_matmul

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return operator(*args, **kwargs)

    monkeypatch.setattr(torch_npu, "npu_grouped_matmul", spy)
    x, weight, counts, grad_out = inputs
    sizes = BatchSizes(counts)
    backend.forward(x, weight, sizes, trans_b=False)
    backend.forward(grad_out, weight, sizes, trans_b=True)
    backend.weight_grad(x, grad_out, sizes)
    by_rows = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    by_columns = {"split_item": 3, "group_type": 2, "group_list_type": 1}
    for (args, kwargs), wanted in zip(calls, [by_rows, by_rows, by_columns], strict=True):
        assert [len(tensors) for tensors in args] == [1, 1]
        group_list = kwargs.pop("group_list")
        assert group_list.device.type == "npu"
        assert group_list.tolist() == counts.tolist()
        assert {name: value for name, value in kwargs.items() if value is not None} == wanted
    with pytest.raises(RuntimeError):
        operator([x], [weight], bias=[None], group_list=sizes.on("npu"), **by_rows)


@pytest.mark.parametrize("trans_b", [False, True])
def test_a_weight_is_never_copied(trans_b):
    """vllm-ascend 12512, twinkle 205. Nothing but the product reads an operand, forward or backward."""
    case = Case("copies", CASE.counts, 32, 48, torch.bfloat16, trans_b)
    x, weight, counts, grad_out = case.inputs().to("npu")
    x.requires_grad_(), weight.requires_grad_()
    for view, transposed in ((weight, trans_b), (weight.transpose(1, 2), not trans_b)):
        with record() as log:
            gmm(x, view, counts, transposed).backward(grad_out)
        assert log.reading(weight) == log.reading(x) == log.reading(grad_out) == [GMM, GMM]
        assert log.launches("npu::") == [GMM] * 3


def test_counts_cross_once(inputs):
    x, weight, counts, _ = inputs
    x.requires_grad_(), weight.requires_grad_()
    sizes = BatchSizes(counts)
    with record() as log:
        gmm(gmm(x, weight, sizes), weight, sizes, trans_b=True).sum().backward()
    assert [event.numbers for event in log.crossings("to device")] == [len(counts)]
    assert log.crossings("to host") == []
    assert log.launches("npu::") == [GMM] * 6
    on_device = counts.to("npu")
    with record() as log:
        sizes = BatchSizes.from_device(on_device)
        gmm(gmm(x, weight, sizes), weight, sizes, trans_b=True).sum().backward()
    assert log.crossings("to device") == []
    assert [event.numbers for event in log.crossings("to host")] == [len(counts)]


@pytest.fixture
def collective(monkeypatch):
    """Return a function that gathers counts as HCCL does: they are there once the device was waited for.

    Its list ``waits`` has each device that was.
    """
    pending = []

    def gather(counts):
        gathered = torch.empty(len(counts), dtype=torch.int64, device="npu")
        host(gathered).fill_(-1)
        pending.append((gathered, counts))
        return gathered

    def synchronize(device=None):
        gather.waits.append(device)
        while pending:
            gathered, counts = pending.pop()
            host(gathered).copy_(counts)

    gather.waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    return gather


def test_gathered_counts_are_read_after_the_collective(collective, inputs):
    """twinkle 252: HCCL runs on a stream of its own, and counts that were read too early were negative."""
    x, weight, counts, _ = inputs
    want = gmm(x, weight, counts)
    with record() as log:
        got = gmm(x, weight, BatchSizes.from_device(collective(counts), gathered=True))
    assert torch.equal(got, want)
    assert collective.waits == [torch.device("npu", 0)]
    (crossing,) = log.crossings("to host")
    assert not crossing.non_blocking


def test_other_counts_are_not_waited_for(collective, inputs):
    """And those of a collective, read too early, are found out."""
    x, weight, counts, _ = inputs
    gmm(x, weight, BatchSizes.from_device(counts.to("npu")))
    with pytest.raises(ValueError, match="is negative"):
        gmm(x, weight, BatchSizes.from_device(collective(counts)))
    assert collective.waits == []


def test_counts_on_cuda_are_not_waited_for(collective):
    """There a copy on the current stream waits for the collective by itself."""

    class OnCuda(torch.Tensor):
        is_cuda = True

    BatchSizes.from_device(collective(torch.tensor([2, 3])).as_subclass(OnCuda), gathered=True)
    assert collective.waits == []


@pytest.mark.parametrize("device", ["npu", "npu:0", "cpu", "meta", "cuda"])
def test_any_device_can_be_waited_for(device):
    """On the device itself; for all but it nothing is done."""
    synchronize(torch.device(device))


@pytest.mark.parametrize("counts", [(1, 2), (60, 5), (-1, 65), (3,)])
def test_rows_that_no_count_covers_are_never_returned(counts):
    """pytorch 154557, torchtitan 1237: the kernel does not write them. Counts from the device are checked."""
    x = torch.ones(64, 8, device="npu", dtype=torch.bfloat16)
    weight = torch.ones(len(counts), 8, 16, device="npu", dtype=torch.bfloat16)
    with record() as log:
        for sizes in (list(counts), BatchSizes.from_device(torch.tensor(counts).to("npu"))):
            with pytest.raises(ValueError, match=r"sum to|is negative"):
                gmm(x, weight, sizes)
    assert log.launches("npu::") == []


def test_no_rows_at_all(backend):
    """The kernel would launch nothing and return memory as it is."""
    x, grad_out = (torch.empty(0, width, device="npu", dtype=torch.bfloat16) for width in (32, 48))
    sizes = BatchSizes([0, 0, 0])
    grad = backend.weight_grad(x, grad_out, sizes)
    assert grad.shape == (3, 32, 48)
    assert not grad.any()
    main_grad = torch.ones(3, 32, 48, device="npu")
    assert backend.weight_grad(x, grad_out, sizes, out=main_grad, accumulate=True) is main_grad
    assert bool((main_grad == 1).all())


def test_one_group_is_a_plain_matmul(backend):
    """A list of one count is documented as not supported; nor do the limits of the operator hold."""
    case = Case("one", (5,), 8, 70000)
    inputs = case.inputs()
    assert backend.rejections(Problem.of(*inputs.to("npu")[:2])) == []
    with record() as log:
        got = run(backend, case, inputs)
    assert log.launches("npu::") == []
    assert all(found.passed for found in differences(got, expected(case, inputs), case).values())
    x, weight, counts, grad_out = inputs.to("npu")
    out, main_grad = torch.full_like(grad_out, torch.nan), torch.zeros_like(weight, dtype=torch.float32)
    assert backend.forward(x, weight, BatchSizes(counts), trans_b=False, out=out) is out
    assert torch.equal(out, got.out)
    for _ in range(2):
        assert (
            backend.weight_grad(x, grad_out, BatchSizes(counts), out=main_grad, accumulate=True) is main_grad
        )
    assert compare(main_grad, 2 * expected(case, inputs).grad_weight, case.dtype).passed


class TestAccumulate:
    """A Megatron-style main_grad."""

    def grads(self, dtype, main_dtype, **options):
        x, weight, counts, grad_out = Case("main", CASE.counts, 32, 48, dtype).inputs().to("npu")
        start = torch.full_like(weight, 0.5, dtype=main_dtype, **options)
        main_grad = start.clone()
        with record() as log:
            assert (
                get_backend("npu").weight_grad(
                    x, grad_out, BatchSizes(counts), out=main_grad, accumulate=True
                )
                is main_grad
            )
        want = start.cpu().double() + reference_grads(x.cpu(), weight.cpu(), counts, grad_out.cpu())[1]
        return main_grad, want, log.launches("npu::")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_fused_into_fp32(self, dtype):
        """In one launch, and nothing is rounded to half precision on the way."""
        main_grad, want, launches = self.grads(dtype, torch.float32)
        assert launches == [GMM_ADD]
        assert compare(main_grad, want, torch.float32).passed

    @pytest.mark.parametrize(
        ("dtype", "main_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
    )
    def test_in_two_steps_where_the_operator_cannot(self, dtype, main_dtype):
        main_grad, want, launches = self.grads(dtype, main_dtype)
        assert launches == [GMM]
        assert compare(main_grad, want, dtype).passed

    def test_in_two_steps_on_a_view(self, backend, inputs):
        x, weight, counts, grad_out = inputs
        wide = torch.zeros(6, 32, 96, device="npu")
        main_grad = wide[:, :, ::2]
        backend.weight_grad(x, grad_out, BatchSizes(counts), out=main_grad, accumulate=True)
        want = reference_grads(x.cpu(), weight.cpu(), counts, grad_out.cpu())[1]
        assert compare(main_grad, want, CASE.dtype).passed
        assert not wide[:, :, 1::2].any()


def test_a_fault_of_the_kernel_comes_out(inputs, monkeypatch):
    """It never sends the call to another backend."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("EZ1001: aclnn call failed")

    monkeypatch.setattr(torch_npu, "npu_grouped_matmul", broken)
    x, weight, counts, _ = inputs
    with pytest.raises(RuntimeError, match="EZ1001"):
        gmm(x, weight, counts)


def test_agrees_with_the_loop_over_groups(inputs):
    x, weight, counts, _ = inputs
    with use_backend("eager"):
        want = gmm(x, weight, counts)
    assert compare(gmm(x, weight, counts), want.cpu(), CASE.dtype).passed
    assert compare(want, reference_gmm(x.cpu(), weight.cpu(), counts), CASE.dtype).passed
