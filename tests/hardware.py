"""A backend that may not be here."""

import pytest

from gmm_registry import BackendUnavailableError, GroupedMatmulBackend, get_backend


def backend_or_skip(device: str, impl: str | None = None) -> GroupedMatmulBackend:
    """Return a backend, or skip the test with every reason why it cannot run."""
    try:
        return get_backend(device, impl)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
