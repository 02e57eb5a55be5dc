"""Find who does the steps around the products of a layer: the backend of the products, or torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gmm_registry.contract import Companions, Direction, Problem, autocast
from gmm_registry.errors import GmmRegistryError
from gmm_registry.layers.permute import Permutation
from gmm_registry.registry.choice import choose
from gmm_registry.registry.request import requested

_PLAIN = (Tensor, torch.nn.Parameter)


def companions_for(
    x: Tensor, weight: Tensor, permutation: Permutation, backend: str | None
) -> Companions | None:
    """Return the backend of a layer's first product if it has companions that can do this; None means torch.

    The choice is the one that `gmm` makes too, and costs one look-up. None it is with padding or dropped
    choices, for what is empty or stands for other tensors, and in compiled code, where the compiler fuses the
    steps.

    Args:
        x: (T, H).
        weight: of the first product, (E, N, H); it may be a transposed view.
        permutation: how the rows of x are sorted.
        backend: as in `gmm`.
    """
    if torch.compiler.is_compiling() or permutation.padded or permutation.foreign:
        return None
    if type(x) not in _PLAIN or weight.dim() != 3:
        return None
    # As `gmm` sees the product with the transposed weight: as it lies in memory.
    turned = not weight.is_contiguous() and weight.mT.is_contiguous()
    groups, k, n = weight.mT.shape if turned else weight.shape
    direction: Direction = "forward" if turned else "grad_x"
    skew = permutation.batch_sizes.skew
    if 0 in (permutation.rows, k, n):
        return None
    dtype = autocast(x[:0]).dtype  # of no rows, since only the type is wanted
    try:
        device = x.device
        problem = Problem(device.type, device.index, dtype, permutation.rows, groups, k, n, direction, skew)
        chosen = choose(requested(backend, device), problem)
    except GmmRegistryError:
        return None  # if the product needs a backend, it raises this
    if isinstance(chosen, Companions) and not chosen.companion_rejections(*permutation.slot_row.shape):
        return chosen
    return None
