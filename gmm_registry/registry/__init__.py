"""Find backends, choose among them, explain the choice."""

from gmm_registry.registry.choice import explain, get_backend, refresh, use_choices
from gmm_registry.registry.discovery import list_backends
from gmm_registry.registry.explanation import Explanation
from gmm_registry.registry.pins import save_choices
from gmm_registry.registry.request import use_backend
from gmm_registry.registry.tuning import Tuning, autotune

__all__ = [
    "Explanation",
    "Tuning",
    "autotune",
    "explain",
    "get_backend",
    "list_backends",
    "refresh",
    "save_choices",
    "use_backend",
    "use_choices",
]
