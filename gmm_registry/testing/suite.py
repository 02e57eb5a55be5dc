"""`BackendParityTests`: subclass it, name your backend, and pytest runs the whole contract on it.

Tests that come from a fault somebody met name where it was reported.
Shape letters: R rows, E groups, K inner, N outer dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gmm_registry.contract import BatchSizes, GroupedMatmulBackend, Problem
from gmm_registry.errors import BackendUnavailableError
from gmm_registry.ops import gmm
from gmm_registry.registry import get_backend
from gmm_registry.testing.cases import CASES, Case
from gmm_registry.testing.parity import Outputs, differences, expected, run
from gmm_registry.testing.reference import reference_gmm, reference_grads
from gmm_registry.testing.tolerances import TOLERANCES, compare

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_COUNTS = (0, 5, 0, 11, 16, 0)  # empty groups first, in the middle and last


class BackendParityTests:
    """Test one backend on one device against the contract, forward, backward and twice backward.

    Set ``device`` and ``impl``. A case that the backend refuses is skipped with its reasons, and so is
    everything where it cannot run at all, unless ``required`` says that it must. A backend that takes only
    multiples of some number as K and N sets ``width`` to it; the suite's own problems are then of such K and
    N, while those of `CASES` stay as they are.
    """

    device: ClassVar[str]
    impl: ClassVar[str]
    required: ClassVar[bool] = False
    width: ClassVar[int] = 1

    def case(
        self,
        counts: tuple[int, ...] = _COUNTS,
        k: int = 32,  # aligned for every kernel we know of
        n: int = 48,
        dtype: torch.dtype = torch.bfloat16,
        trans_b: bool = False,
    ) -> Case:
        """Make a problem of the suite's own, K and N rounded up to multiples of ``width``."""
        k, n = (-(-size // self.width) * self.width for size in (k, n))
        return Case("suite", counts, k, n, dtype, trans_b)

    @pytest.fixture
    def backend(self) -> GroupedMatmulBackend:
        """Return the backend under test, or skip with the reasons why it cannot run."""
        try:
            return get_backend(self.device, self.impl)
        except BackendUnavailableError as error:
            if self.required:
                raise
            pytest.skip(str(error))

    @pytest.fixture
    def dtype(self, backend: GroupedMatmulBackend) -> torch.dtype:
        """Return the first dtype that the backend takes."""
        for dtype in _DTYPES:
            if not backend.rejections(_problem(backend, self.case(), dtype)):
                return dtype
        pytest.skip(f"{backend.key} takes none of {_DTYPES}")

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_matches_the_reference(self, backend: GroupedMatmulBackend, case: Case) -> None:
        """Most cases are in bf16; refused there, they come in the first dtype that the backend takes."""
        dtypes = _DTYPES if case.dtype == _DTYPES[0] else (case.dtype,)
        refusals = {dtype: backend.rejections(_problem(backend, case, dtype)) for dtype in dtypes}
        taken = [dtype for dtype, reasons in refusals.items() if not reasons]
        if not taken:
            pytest.skip("; ".join(refusals[case.dtype]))
        case = replace(case, dtype=taken[0])
        inputs = case.inputs()
        got = run(backend, case, inputs)
        assert got.out.dtype == got.grad_x.dtype == got.grad_weight.dtype == taken[0]
        assert got.out.device.type == backend.device
        assert _failed(differences(got, expected(case, inputs), case)) == {}

    def test_leaves_its_inputs_alone(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """And gives the same without gradients, where `gmm` takes a shorter way."""
        case = self.case(dtype=dtype)
        inputs, kept = case.inputs().to(backend.device), case.inputs().to(backend.device)
        got = run(backend, case, case.inputs())
        with torch.no_grad():
            out = gmm(inputs.x, inputs.weight, inputs.batch_sizes, backend=str(backend.key))
            backend.weight_grad(inputs.x, inputs.grad_out, BatchSizes(inputs.batch_sizes))
        assert torch.equal(out, got.out)
        for tensor, before in zip(inputs, kept, strict=True):
            assert torch.equal(tensor, before)

    @pytest.mark.parametrize("trans_b", [False, True])
    def test_double_backward(self, backend: GroupedMatmulBackend, dtype: torch.dtype, trans_b: bool) -> None:
        case = self.case(dtype=dtype, trans_b=trans_b)
        x, weight, counts, grad_out = case.inputs().to(backend.device)

        def second_order(gmm: Callable[..., Tensor], to: torch.dtype) -> tuple[Tensor, ...]:
            # The reference runs on the CPU: not every device has fp64, and some round it to fp32 unasked.
            device = "cpu" if to == torch.float64 else backend.device
            leaves = [t.detach().to(device, to).requires_grad_() for t in (x, weight, grad_out)]
            out = gmm(leaves[0], leaves[1], counts, trans_b)
            grads = torch.autograd.grad(out, leaves[:2], leaves[2], create_graph=True)
            return torch.autograd.grad(grads, leaves, [x.to(device, to), weight.to(device, to)])

        got = second_order(backend.gmm, dtype)
        want = second_order(reference_gmm, torch.float64)
        for name, g, w in zip(("x", "weight", "grad_out"), got, want, strict=True):
            assert compare(g, w, dtype).passed, name

    @pytest.mark.parametrize("counts", [(2, 0, 3, 0), (0, 0, 5), (3, 0), (0, 7, 0, 0)])
    def test_empty_groups_in_dirty_memory(
        self, backend: GroupedMatmulBackend, dtype: torch.dtype, counts: tuple[int, ...]
    ) -> None:
        """Pytorch 172439, TransformerEngine 1527: what no group wrote was never set to zero."""
        for width in (8, 16, 64):
            case = self.case(counts, width, width, dtype)
            inputs = case.inputs()
            for shape in (inputs.weight.shape, inputs.x.shape):
                dirt = [torch.full(shape, torch.nan, dtype=dtype, device=backend.device) for _ in range(8)]
                del dirt
            got = run(backend, case, inputs)
            empty = [group for group, size in enumerate(counts) if size == 0]
            assert not got.grad_weight[empty].any()
            assert _failed(differences(got, expected(case, inputs), case)) == {}

    def test_no_rows(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """TransformerEngine 3019, Megatron-LM 4851: a rank without tokens left the graph."""
        case = self.case((0, 0), 32, 16)
        x = torch.empty(0, case.k, dtype=dtype, device=backend.device, requires_grad=True)
        weight = torch.ones(2, case.k, case.n, dtype=dtype, device=backend.device, requires_grad=True)
        out = backend.gmm(x, weight, [0, 0])
        assert out.shape == (0, case.n)
        assert out.grad_fn is not None
        out.sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert not weight.grad.any()

    def test_no_inner_dimension(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        x = torch.empty(3, 0, dtype=dtype, device=backend.device, requires_grad=True)
        n = self.case(n=16).n
        weight = torch.empty(2, 0, n, dtype=dtype, device=backend.device, requires_grad=True)
        out = backend.gmm(x, weight, [1, 2])
        out.sum().backward()
        assert torch.equal(out, torch.zeros_like(out))
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape

    @pytest.mark.parametrize("frozen", ["x", "weight"])
    def test_frozen_input_costs_nothing(
        self,
        backend: GroupedMatmulBackend,
        dtype: torch.dtype,
        frozen: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """TransformerEngine 1258: the other gradient is right, and no product is made for the frozen one."""
        case = self.case(dtype=dtype)
        inputs = case.inputs()
        x, weight, counts, grad_out = inputs.to(backend.device)
        calls = {name: _count_calls(monkeypatch, backend, name) for name in ("forward", "weight_grad")}
        x.requires_grad_(frozen != "x")
        weight.requires_grad_(frozen != "weight")
        backend.gmm(x, weight, counts).backward(grad_out)
        want = expected(case, inputs)
        if frozen == "x":
            assert x.grad is None
            assert (len(calls["forward"]), len(calls["weight_grad"])) == (1, 1)
            assert weight.grad is not None
            assert compare(weight.grad, want.grad_weight, dtype).passed
        else:
            assert weight.grad is None
            assert (len(calls["forward"]), len(calls["weight_grad"])) == (2, 0)
            assert x.grad is not None
            assert compare(x.grad, want.grad_x, dtype).passed

    def test_transposed_view_is_not_copied(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """vllm-ascend 12512, twinkle 205: a transposed weight failed, or was copied at every step."""
        case = self.case((2, 0, 3, 1, 2), dtype=dtype, trans_b=True)
        inputs = case.inputs()
        x, stored, counts, grad_out = inputs.to(backend.device)
        leaf = stored.requires_grad_()  # (E, N, K)
        out = backend.gmm(x, leaf.transpose(1, 2), counts)
        out.backward(grad_out)
        want = expected(case, inputs)
        assert compare(out, want.out, dtype).passed
        assert leaf.grad is not None
        assert leaf.grad.stride() == leaf.stride()
        assert compare(leaf.grad, want.grad_weight, dtype).passed
        with torch.no_grad(), _Copies(leaf.numel()) as copies:
            backend.forward(x, leaf, BatchSizes(counts), trans_b=True)
            backend.forward(grad_out, leaf, BatchSizes(counts), trans_b=False)
        assert copies.made == []

    def test_unaligned_pointer(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """Transformers 48644 and 44827, torchtitan 1651: a view at an odd storage offset."""
        case = self.case((4, 0, 7), 16, 24, dtype)
        inputs = case.inputs()
        x, weight, counts, grad_out = (
            tensor if tensor.dtype == torch.int64 else _shifted(tensor)
            for tensor in inputs.to(backend.device)
        )
        x.requires_grad_(), weight.requires_grad_()
        out = backend.gmm(x, weight, counts)
        out.backward(grad_out)
        assert x.grad is not None
        assert weight.grad is not None
        got = Outputs(out.detach(), x.grad, weight.grad)
        assert _failed(differences(got, expected(case, inputs), case)) == {}

    def test_strided_inputs(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """Columns of a wider tensor, as gate and up are; an expanded grad_out, as sum() gives."""
        case = self.case(dtype=dtype)
        x, weight, counts, _ = case.inputs().to(backend.device)
        wide_x = torch.cat([x, x], 1)[:, : case.k].requires_grad_()
        wide_weight = torch.cat([weight, weight], 2)[:, :, : case.n].requires_grad_()
        out = backend.gmm(wide_x, wide_weight, counts)
        grads = torch.autograd.grad(out.sum(), (wide_x, wide_weight))
        want = reference_grads(x, weight, counts, torch.ones_like(out))
        for g, w in zip((out, *grads), (reference_gmm(x, weight, counts), *want), strict=True):
            assert compare(g, w, dtype).passed

    def test_each_row_meets_its_own_group(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """DeepGEMM 450: a tile took the expert of its first row."""
        counts = torch.tensor([64, 1, 63, 0, 129])
        scales = torch.arange(1, 6, dtype=dtype)
        k = self.case(k=128).k
        weight = scales.view(-1, 1, 1) * torch.eye(k, dtype=dtype)
        x = torch.randint(-8, 8, (int(counts.sum()), k)).to(dtype)
        out = backend.gmm(x.to(backend.device), weight.to(backend.device), counts)
        assert torch.equal(out.cpu(), x * scales.repeat_interleave(counts)[:, None])

    @pytest.mark.parametrize("packed", [True, False])
    def test_out_and_accumulate(
        self, backend: GroupedMatmulBackend, dtype: torch.dtype, packed: bool
    ) -> None:
        """The raw products write in place, whatever the strides, and add to a main_grad, also in fp32."""
        case = self.case(dtype=dtype)
        inputs = case.inputs()
        want = expected(case, inputs)
        x, weight, counts, grad_out = inputs.to(backend.device)
        sizes = BatchSizes(counts)
        out = torch.full_like(grad_out, torch.nan)
        out = out if packed else out.mT.contiguous().mT
        assert backend.forward(x, weight, sizes, trans_b=False, out=out) is out
        assert compare(out, want.out, dtype).passed
        for main_dtype in {dtype, torch.float32}:
            main_grad = torch.full_like(weight, torch.nan, dtype=main_dtype)
            main_grad = main_grad if packed else main_grad.mT.contiguous().mT
            assert backend.weight_grad(x, grad_out, sizes, out=main_grad) is main_grad
            assert compare(main_grad, want.grad_weight, dtype).passed
            backend.weight_grad(x, grad_out, sizes, out=main_grad, accumulate=True)
            assert compare(main_grad, 2 * want.grad_weight, dtype).passed

    def test_every_form_of_the_counts(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """DeepGEMM 97, grouped_gemm 21: counts of another dtype or on another device."""
        x, weight, counts, _ = self.case(n=32, dtype=dtype).inputs().to(backend.device)
        want = backend.gmm(x, weight, counts)
        forms: list[Any] = [
            counts.to(torch.int32),
            counts.tolist(),
            tuple(counts.tolist()),
            BatchSizes(counts),
            BatchSizes.from_device(counts.to(backend.device)),
            BatchSizes.from_device(counts.to(backend.device, torch.int32)),
        ]
        for form in forms:
            assert torch.equal(backend.gmm(x, weight, form), want)

    def test_refuses_bad_arguments(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """Refuse what does not fit, alike for all backends, before any kernel runs.

        pytorch 154557, torchtitan 1237 (rows beyond the last group); scattermoe 17, megablocks 95 (mixed
        dtypes); DeepGEMM 97, grouped_gemm 21 (the shape of the counts).
        """
        x = torch.zeros(64, 8, dtype=dtype, device=backend.device)
        weight = torch.zeros(2, 8, 16, dtype=dtype, device=backend.device)
        counts = torch.tensor([1, 63])
        other = torch.float32 if dtype != torch.float32 else torch.bfloat16
        bad: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
            (ValueError, "sum to 3, but x has 64 rows", (x, weight, torch.tensor([1, 2]))),
            (ValueError, r"batch_sizes\[0\] = -1 is negative", (x, weight, [-1, 65])),
            (ValueError, "3 entries.* 2 groups", (x, weight, [1, 2, 61])),
            (ValueError, r"shape \(2, 1\)", (x, weight, counts[:, None])),
            (ValueError, "K = 8.* K = 16", (x, weight, counts, True)),
            (ValueError, r"x must be \(R, K\)", (x[None], weight, counts)),
            (ValueError, r"weight must be \(E, K, N\)", (x, weight[0], counts)),
            (TypeError, f"{dtype}.*{other}", (x, weight.to(other), counts)),
            (TypeError, "int64", (x.long(), weight.long(), counts)),
            (TypeError, "float32", (x, weight, counts.float())),
            (TypeError, "BatchSizes", (x, weight, [1.0, 63.0])),
            (TypeError, "NoneType", (x, weight, None)),
            (TypeError, "must be tensors", (x, None, counts)),
        ]
        for error, match, arguments in bad:
            with pytest.raises(error, match=match):
                backend.gmm(*arguments)

    def test_autocast(self, backend: GroupedMatmulBackend) -> None:
        """Run in the autocast type, with gradients in the type of the leaves, as torch.matmul does."""
        case = self.case(dtype=torch.float32)
        lower = next((d for d in _DTYPES[:2] if not backend.rejections(_problem(backend, case, d))), None)
        if lower is None:
            pytest.skip(f"{backend.key} takes no type that autocast has")
        x, weight, counts, grad_out = case.inputs().to(backend.device)
        x.requires_grad_(), weight.requires_grad_()
        with torch.autocast(backend.device, lower):
            out = backend.gmm(x, weight, counts)
        assert out.dtype == lower
        out.backward(grad_out.to(lower))
        assert x.grad is not None
        assert weight.grad is not None
        assert x.grad.dtype == weight.grad.dtype == torch.float32
        low_x, low_weight, low_grad = (tensor.detach().to(lower) for tensor in (x, weight, grad_out))
        assert compare(out, reference_gmm(low_x, low_weight, counts), lower).passed
        want = reference_grads(low_x, low_weight, counts, low_grad)
        assert compare(x.grad, want[0], lower).passed
        assert compare(weight.grad, want[1], lower).passed

    def test_compiles_once_for_all_counts(self, backend: GroupedMatmulBackend, dtype: torch.dtype) -> None:
        """prime-rl 996, transformers 47991: torch.compile broke, or specialised on the counts."""
        from torch._dynamo.testing import CompileCounterWithBackend

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(backend.gmm, fullgraph=True, backend=counter)
        x, weight, _, grad_out = self.case((2, 0, 2), 32, 16, dtype).inputs().to(backend.device)
        x.requires_grad_(), weight.requires_grad_()
        for counts in (torch.tensor([2, 0, 2]), torch.tensor([0, 1, 3])):
            results = []
            for call in (compiled, backend.gmm):
                out = call(x, weight, counts)
                results.append((out, *torch.autograd.grad(out, (x, weight), grad_out)))
            for got, want in zip(*results, strict=True):
                assert torch.equal(got, want)
        assert counter.frame_count == 1

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.14's own
    @pytest.mark.parametrize("trans_b", [False, True])
    def test_opcheck(self, backend: GroupedMatmulBackend, dtype: torch.dtype, trans_b: bool) -> None:
        case = self.case((2, 0, 3), 32, 16, dtype, trans_b)
        x, weight, counts, grad_out = case.inputs().to(backend.device)
        ops, request = torch.ops.gmm_registry, str(backend.key)
        checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
        if backend.device in ("cpu", "cuda", "xpu"):  # all that this check of torch knows
            checks.append("test_autograd_registration")
        tolerance = TOLERANCES[dtype]._asdict()
        for op, left, right in ((ops.gmm, x, weight), (ops.weight_grad, x, grad_out)):
            left, right = left.clone().requires_grad_(), right.clone().requires_grad_()
            arguments = (left, right, counts, trans_b, request)
            torch.library.opcheck(op.default, arguments, test_utils=checks, **tolerance)

    def test_current_device_is_not_that_of_the_tensors(self, backend: GroupedMatmulBackend) -> None:
        """grouped_gemm 15: tensors on cuda:1 while the current device is 0."""
        devices = torch.get_device_module(backend.device).device_count()
        if devices < 2:
            pytest.skip(f"needs two {backend.device} devices, this machine has {devices}")
        case = self.case()
        inputs = case.inputs()
        x, weight = (tensor.to(f"{backend.device}:1") for tensor in inputs[:2])
        if reasons := backend.rejections(Problem.of(x, weight)):
            pytest.skip("; ".join(reasons))
        out = backend.gmm(x, weight, inputs.batch_sizes)
        assert out.device == x.device
        assert compare(out, reference_gmm(*inputs[:3]), case.dtype).passed

    def test_rejections_never_raise(self, backend: GroupedMatmulBackend) -> None:
        for dtype in (*_DTYPES, torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64):
            for rows, groups, k, n in ((0, 0, 0, 0), (1, 1, 1, 1), (2**40, 2**20, 2**20, 2**20)):
                problem = Problem(backend.device, None, dtype, rows, groups, k, n)
                reasons = backend.rejections(problem)
                assert isinstance(reasons, list)
                assert all(isinstance(reason, str) and reason for reason in reasons)
                assert isinstance(backend.priority(problem), int)


class _Copies(TorchDispatchMode):
    """Note every operator that makes a new tensor of ``numel`` elements or more out of others."""

    def __init__(self, numel: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = numel
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.numel and not func.is_view:
            self.made.append(func.name())
        return result


def _problem(backend: GroupedMatmulBackend, case: Case, dtype: torch.dtype) -> Problem:
    k, n = (case.n, case.k) if case.trans_b else (case.k, case.n)
    return Problem(backend.device, None, dtype, sum(case.counts), len(case.counts), k, n)


def _failed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: difference for name, difference in found.items() if not difference.passed}


def _shifted(tensor: Tensor) -> Tensor:
    """Copy to storage that starts one element late."""
    storage = tensor.new_empty(tensor.numel() + 1)
    return storage[1:].view(tensor.shape).copy_(tensor)


def _count_calls(monkeypatch: pytest.MonkeyPatch, backend: GroupedMatmulBackend, name: str) -> list[None]:
    calls: list[None] = []
    method = getattr(backend, name)

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(None)
        return method(*args, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(backend, name, counted)
    return calls
