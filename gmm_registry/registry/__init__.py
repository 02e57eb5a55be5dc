"""Find backends, choose among them, explain the choice."""

from gmm_registry.registry.choice import Explanation, explain, get_backend, refresh
from gmm_registry.registry.discovery import list_backends
from gmm_registry.registry.request import use_backend

__all__ = ["Explanation", "explain", "get_backend", "list_backends", "refresh", "use_backend"]
