"""Choose the experts' MLP: the same two names as MegaBlocks, each plain or memory optimised."""

from __future__ import annotations

from gmm_registry.layers.arguments import Arguments
from gmm_registry.layers.mlp import ExpertMLP, GroupedGLU, GroupedMLP, SparseGLU, SparseMLP

_REGISTRY: dict[str, dict[str, type[ExpertMLP]]] = {
    "mlp": {"grouped": GroupedMLP, "sparse": SparseMLP},
    "glu": {"grouped": GroupedGLU, "sparse": SparseGLU},
}


def get(args: Arguments) -> ExpertMLP:
    """Build the MLP for ``args.mlp_type`` and ``args.mlp_impl``, whose names `Arguments` has checked."""
    return _REGISTRY[args.mlp_type][args.mlp_impl](args)
