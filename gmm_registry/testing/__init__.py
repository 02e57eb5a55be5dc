"""For authors of backends: the cases, the tolerances, the reference, and the suite to subclass."""

from typing import TYPE_CHECKING, Any

from gmm_registry.testing.cases import CASES, Case, Inputs
from gmm_registry.testing.reference import reference_gmm, reference_grads
from gmm_registry.testing.tolerances import TOLERANCES, Tolerance, compare

if TYPE_CHECKING:
    from gmm_registry.testing.suite import BackendParityTests

__all__ = [
    "CASES",
    "TOLERANCES",
    "BackendParityTests",
    "Case",
    "Inputs",
    "Tolerance",
    "compare",
    "reference_gmm",
    "reference_grads",
]


def __getattr__(name: str) -> Any:
    # The suite needs pytest; `gmm-registry parity` does not.
    if name == "BackendParityTests":
        import pytest

        pytest.register_assert_rewrite("gmm_registry.testing.suite")  # so that a failure shows its values
        from gmm_registry.testing.suite import BackendParityTests

        return BackendParityTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
