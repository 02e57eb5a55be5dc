"""MoE layers on grouped matmul, with the names and the checkpoints of MegaBlocks."""

from gmm_registry.layers import dmlp_registry
from gmm_registry.layers.arguments import Arguments
from gmm_registry.layers.dmoe import dMoE
from gmm_registry.layers.losses import LossCollector, load_balancing_loss, router_z_loss
from gmm_registry.layers.permute import Permutation, permute, sort_by_expert, unpermute
from gmm_registry.layers.routed_experts import routed_glu
from gmm_registry.layers.router import Router, Routing, route

__all__ = [
    "Arguments",
    "LossCollector",
    "Permutation",
    "Router",
    "Routing",
    "dMoE",
    "dmlp_registry",
    "load_balancing_loss",
    "permute",
    "route",
    "routed_glu",
    "router_z_loss",
    "sort_by_expert",
    "unpermute",
]
