"""One grouped-matmul contract for Mixture-of-Experts training, many backends, picked by device."""

from importlib.metadata import version

from gmm_registry.contract import (
    Accepted,
    BackendKey,
    BatchSizes,
    GroupedMatmulBackend,
    Problem,
    Rejected,
)
from gmm_registry.errors import (
    BackendUnavailableError,
    DuplicateBackendError,
    GmmRegistryError,
    UnknownBackendError,
)
from gmm_registry.ops import gmm
from gmm_registry.registry import (
    Tuning,
    autotune,
    explain,
    get_backend,
    list_backends,
    save_choices,
    use_backend,
    use_choices,
)

__version__ = version("gmm_registry")

__all__ = [
    "Accepted",
    "BackendKey",
    "BackendUnavailableError",
    "BatchSizes",
    "DuplicateBackendError",
    "GmmRegistryError",
    "GroupedMatmulBackend",
    "Problem",
    "Rejected",
    "Tuning",
    "UnknownBackendError",
    "autotune",
    "explain",
    "get_backend",
    "gmm",
    "list_backends",
    "save_choices",
    "use_backend",
    "use_choices",
]
