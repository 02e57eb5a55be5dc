"""A backend of somebody else's is found, chosen and tested without a change to this repository."""

import ast
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gmm_registry import (
    BackendKey,
    BackendUnavailableError,
    Problem,
    explain,
    get_backend,
    gmm,
    list_backends,
)
from gmm_registry.testing import CASES, BackendParityTests, Case, compare, reference_gmm

ACME = BackendKey("cpu", "acme")


@pytest.mark.usefixtures("third_party")
class TestAcme(BackendParityTests):
    device, impl, required = "cpu", "acme", True


def test_is_one_module_and_one_line(third_party: Path) -> None:
    """Beside the name of the distribution there is nothing else, and of ours it imports the contract only."""
    info = "acme_gmm-1.0.dist-info"
    files = {str(file.relative_to(third_party)) for file in third_party.rglob("*") if file.is_file()}
    written = {file for file in files if "__pycache__" not in file}
    assert written == {"acme_gmm.py", f"{info}/METADATA", f"{info}/entry_points.txt"}
    header, line = (third_party / info / "entry_points.txt").read_text().splitlines()
    assert (header, line) == ("[gmm_registry.backends]", "cpu.acme = acme_gmm:Acme")
    tree = ast.parse((third_party / "acme_gmm.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("gmm_")} == {"gmm_registry.contract"}


@pytest.mark.usefixtures("third_party")
def test_is_listed_for_its_device_only() -> None:
    assert ACME in list_backends("cpu")
    assert ACME not in list_backends("cuda")


def test_is_gone_after_the_tests_that_had_it() -> None:
    assert ACME not in list_backends()


@pytest.mark.usefixtures("third_party")
def test_is_chosen_by_priority() -> None:
    """A backend made for the device comes before those that run on any."""
    problem = Problem("cpu", None, torch.float32, rows=8, groups=2, k=16, n=16)
    assert get_backend("cpu").key == ACME
    assert explain("cpu", problem).chosen == ACME


@pytest.mark.usefixtures("third_party")
def test_is_passed_over_for_what_it_refuses() -> None:
    problem = Problem("cpu", None, torch.float64, rows=8, groups=2, k=16, n=16)
    explanation = explain("cpu", problem)
    assert str(explanation.chosen) == "any.eager"
    assert "cpu.acme: refused\n    - acme computes" in str(explanation)


@pytest.mark.usefixtures("third_party")
def test_can_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    acme = get_backend("cpu", "acme")
    forward = Mock(wraps=acme.forward)
    monkeypatch.setattr(acme, "forward", forward)
    x, weight, counts, _ = Case("by name", (2, 0, 3), 16, 8, torch.float32).inputs()
    gmm(x, weight, counts, backend="eager")
    assert forward.call_count == 0
    out = gmm(x, weight, counts, backend="acme")
    assert forward.call_count == 1
    assert compare(out, reference_gmm(x, weight, counts), torch.float32).passed
    with pytest.raises(BackendUnavailableError, match=r"'acme', asked for by name.*\n.*not torch.float64"):
        gmm(x.double(), weight.double(), counts, backend="acme")


FP32_ONLY = """
from gmm_backends.eager import Eager


class Single(Eager):
    def rejections(self, problem):
        return [] if str(problem.dtype) == "torch.float32" else ["takes fp32 only"]

    def weight_grad(self, x, grad_out, batch_sizes, *, out=None, accumulate=False):
        grad = super().weight_grad(x, grad_out, batch_sizes, out=out, accumulate=accumulate)
        if out is None:
            grad[(batch_sizes.host == 0) & {forgets}] = float("nan")
        return grad
"""


@pytest.mark.parametrize("forgets", [False, True])
def test_a_backend_without_bf16_gets_every_case_in_what_it_takes(
    distribution: Callable[..., Path], forgets: bool
) -> None:
    distribution("single", {"cpu.single": "single:Single"}, {"single": FP32_ONLY.format(forgets=forgets)})
    backend, suite = get_backend("cpu", "single"), BackendParityTests()
    for case in CASES:
        if case.dtype == torch.float16:
            with pytest.raises(pytest.skip.Exception, match="takes fp32 only"):
                suite.test_matches_the_reference(backend, case)
        elif forgets and 0 in case.counts and any(case.counts):  # without rows no backend is called
            with pytest.raises(AssertionError):
                suite.test_matches_the_reference(backend, case)
        else:
            suite.test_matches_the_reference(backend, case)
