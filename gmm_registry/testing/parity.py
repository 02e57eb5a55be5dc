"""Run backends on the cases and compare with the reference, or with another machine's results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.benchmark import Timer

from gmm_registry.contract import BackendKey, BatchSizes, GroupedMatmulBackend, Problem
from gmm_registry.errors import GmmRegistryError
from gmm_registry.registry import get_backend, list_backends
from gmm_registry.registry.discovery import find
from gmm_registry.testing.cases import Case, Inputs
from gmm_registry.testing.reference import reference_gmm, reference_grads
from gmm_registry.testing.tolerances import Difference, compare


class Outputs(NamedTuple):
    """What one case gives: the result (R, N), grad_x (R, K), grad_weight (the weight's shape)."""

    out: Tensor
    grad_x: Tensor
    grad_weight: Tensor


@dataclass(frozen=True)
class Result:
    """One backend on one case. ``against`` names what it was compared with.

    ``status`` is "passed", "failed", "refused" (``reasons`` says why) or "raised" (an exception came out).
    """

    backend: str
    case: str
    status: str
    against: str = "fp64 reference"
    differences: dict[str, Difference] = field(default_factory=dict)
    median_ms: float | None = None
    reasons: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON takes it, which knows no NaN or infinity: they become null."""
        differences = {
            name: {key: value if math.isfinite(value) else None for key, value in found._asdict().items()}
            for name, found in self.differences.items()
        }
        return {**vars(self), "differences": differences, "reasons": list(self.reasons)}


def run(backend: GroupedMatmulBackend, case: Case, inputs: Inputs, device: str | None = None) -> Outputs:
    """Run one case forward and backward on a device such as "cuda:1", by default the backend's."""
    x, weight, counts, grad_out = inputs.to(device or backend.device)
    x.requires_grad_(), weight.requires_grad_()
    out = backend.gmm(x, weight, counts, case.trans_b)
    out.backward(grad_out)
    assert x.grad is not None
    assert weight.grad is not None
    return Outputs(out.detach(), x.grad, weight.grad)


def expected(case: Case, inputs: Inputs) -> Outputs:
    """Compute what one case should give, in fp64."""
    x, weight, counts, grad_out = inputs
    grads = reference_grads(x, weight, counts, grad_out, case.trans_b)
    return Outputs(reference_gmm(x, weight, counts, case.trans_b), *grads)


def differences(got: Outputs, want: Outputs, case: Case) -> dict[str, Difference]:
    """Compare the three outputs by the tolerance of the case's dtype."""
    pairs = zip(Outputs._fields, got, want, strict=True)
    return {name: compare(g, w, case.dtype) for name, g, w in pairs}


def judged(backend: str, case: str, against: str, found: dict[str, Difference]) -> Result:
    """Make a result of differences."""
    status = "passed" if all(difference.passed for difference in found.values()) else "failed"
    return Result(backend, case, status, against, found)


def candidates(device: str, names: Iterable[str]) -> list[BackendKey]:
    """Return the keys to test on a device: those named, or all."""
    return [find(device, name) for name in names] or list_backends(device)


def parity(
    device: str, keys: Iterable[BackendKey], cases: Iterable[Case], seconds: float = 0.02
) -> Iterator[tuple[Result, Outputs | None]]:
    """Compare each backend with the reference on each case.

    Args:
        device: a device type.
        keys: the backends; see `candidates`.
        cases: see `gmm_registry.testing.CASES`.
        seconds: how long to time each case; 0 does not time.

    Yields:
        the result, and the outputs on the CPU where there are any.
    """
    keys = list(keys)
    for case in cases:
        inputs = case.inputs()
        want = expected(case, inputs)
        for key in keys:
            yield _one(key, device, case, inputs, want, seconds)


def _one(
    key: BackendKey, device: str, case: Case, inputs: Inputs, want: Outputs, seconds: float
) -> tuple[Result, Outputs | None]:
    name = str(key)
    try:
        backend = get_backend(device, name)
    except GmmRegistryError as error:
        return Result(name, case.name, "refused", reasons=(str(error),)), None
    refusals = backend.rejections(Problem.of(*inputs.to(device)[:2]))
    if refusals:
        return Result(name, case.name, "refused", reasons=tuple(refusals)), None
    try:
        got = Outputs(*(tensor.cpu() for tensor in run(backend, case, inputs, device)))
        found = differences(got, want, case)
        median_ms = _median_ms(backend, case, inputs.to(device), seconds) if seconds else None
    except Exception as error:  # the table has a row for it, and the run goes on
        reason = f"{type(error).__name__}: {error}"
        return Result(name, case.name, "raised", reasons=(reason,)), None
    result = judged(name, case.name, Result.against, found)
    return Result(**{**vars(result), "median_ms": median_ms}), got


def _median_ms(backend: GroupedMatmulBackend, case: Case, inputs: Inputs, seconds: float) -> float:
    """Time forward and backward together; torch's timer waits for the device."""
    x, weight, counts, grad_out = inputs
    x.requires_grad_(), weight.requires_grad_()
    sizes = BatchSizes(counts)
    timer = Timer(
        "gmm(x, weight, sizes, trans_b).backward(grad_out)",
        globals={
            "gmm": backend.gmm,
            "x": x,
            "weight": weight,
            "sizes": sizes,
            "trans_b": case.trans_b,
            "grad_out": grad_out,
        },
    )
    return timer.blocked_autorange(min_run_time=seconds).median * 1e3
