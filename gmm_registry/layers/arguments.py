"""The options of an MoE layer, named as MegaBlocks 0.10 names them, and checked at once.

Letters: E experts, T tokens, K choices a token, H hidden.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gmm_registry.block_sparse import BLOCK

InitFn: TypeAlias = Callable[[Tensor], object]

DEFAULT_ACTIVATION_FN = partial(F.gelu, approximate="tanh")
DEFAULT_INIT_METHOD = partial(nn.init.normal_, mean=0.0, std=0.02)

MLP_TYPES = ("mlp", "glu")
MLP_IMPLS = ("grouped", "sparse")
ROUTER_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Arguments:
    """Hold the options of an MoE layer.

    Names and defaults are those of MegaBlocks 0.10 (`megablocks.layers.arguments.Arguments`), with two
    exceptions: ``mlp_impl`` is "grouped", and ``device`` is torch's default device, so that no CUDA is
    needed. Below the line are options that MegaBlocks does not have.

    Raises:
        ValueError: an option, or two of them together, cannot work; the message names the values.

    >>> Arguments(hidden_size=64, ffn_hidden_size=256, moe_num_experts=8, moe_top_k=2).parameter_dtype
    torch.float16
    """

    # The layer.
    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Callable[[Tensor], Tensor] = DEFAULT_ACTIVATION_FN

    # Routing.
    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: float = 1  # a dropless layer has no capacity; kept for MegaBlocks' callers
    moe_normalize_expert_weights: float | None = None  # the p of the norm; None or 0: off
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False  # the loss is always computed in fp32; kept for MegaBlocks' callers

    # Parallelism.
    moe_expert_model_parallelism: bool = False
    expert_parallel_group: dist.ProcessGroup | None = None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None

    # Computation.
    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "grouped"

    # Initialisation.
    fp16: bool = True
    bf16: bool = False
    device: torch.device | str | int | None = None  # a number is an accelerator's, as torch takes it
    init_method: InitFn = DEFAULT_INIT_METHOD
    output_layer_init_method: InitFn = DEFAULT_INIT_METHOD

    # Benchmarks.
    uniform_expert_assignment: bool = False

    # The shared expert.
    shared_expert: bool = False
    fc_cls: Any = nn.Linear
    fc_kwargs: Mapping[str, Any] = field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None  # None: ffn_hidden_size
    shared_expert_weighted_sum: bool = False

    # The router's z-loss.
    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False  # the loss is always computed in fp32; kept for MegaBlocks' callers

    # ---------------------------------------------------------------------------------------------------
    dtype: torch.dtype | None = None  # None: as the flags fp16 and bf16 say, see `parameter_dtype`
    backend: str | None = None  # the implementation that the layer computes with; None: chosen by device
    use_companions: bool = True  # where the backend has kernels for the steps around its products
    moe_router_score: str = "softmax"
    moe_softmax_after_top_k: bool = False
    moe_router_bias: bool = False  # DeepSeek-V3's correction bias, for the selection only
    expert_bias: bool = False
    shared_expert_gate: bool = False  # Qwen's sigmoid gate

    def __post_init__(self) -> None:
        if self.shared_expert_hidden_size is None:
            object.__setattr__(self, "shared_expert_hidden_size", self.ffn_hidden_size)
        self._check_sizes()
        self._check_names()
        self._check_dtype()
        self._check_routing()
        self._check_parallelism()

    def _check_sizes(self) -> None:
        for name in (
            "hidden_size",
            "ffn_hidden_size",
            "shared_expert_hidden_size",
            "num_layers",
            "moe_num_experts",
            "moe_top_k",
            "pipeline_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an int")
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.mlp_impl == "sparse":
            for name in ("hidden_size", "ffn_hidden_size"):
                value = getattr(self, name)
                if value % BLOCK:
                    raise ValueError(
                        f"{name}={value} is not a multiple of {BLOCK}, the block of mlp_impl='sparse': "
                        "change it, or use mlp_impl='grouped'"
                    )

    def _check_names(self) -> None:
        for name, known in (
            ("mlp_type", MLP_TYPES),
            ("mlp_impl", MLP_IMPLS),
            ("moe_router_score", ROUTER_SCORES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; there are {', '.join(map(repr, known))}")

    def _check_dtype(self) -> None:
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise TypeError(f"dtype={self.dtype!r} must be a torch.dtype, or None")
        if not callable(self.activation_fn):
            raise TypeError(f"activation_fn={self.activation_fn!r} must be a function of a tensor")
        if self.dtype is None and self.fp16 and self.bf16:
            raise ValueError(
                "fp16=True and bf16=True contradict each other (fp16=True is the default): "
                "set one of them to False, or give dtype"
            )
        if not self.parameter_dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype} is not a floating-point type")

    def _check_routing(self) -> None:
        if self.moe_top_k > self.moe_num_experts:
            raise ValueError(
                f"moe_top_k={self.moe_top_k} is more than moe_num_experts={self.moe_num_experts}"
            )
        if self.moe_jitter_eps is not None and not 0 <= self.moe_jitter_eps < 1:
            raise ValueError(f"moe_jitter_eps={self.moe_jitter_eps} must be at least 0 and below 1")
        if (self.moe_normalize_expert_weights or 0) < 0:
            raise ValueError(
                f"moe_normalize_expert_weights={self.moe_normalize_expert_weights} must be a positive p, "
                "or None"
            )
        if self.moe_softmax_after_top_k and self.moe_router_score != "softmax":
            raise ValueError(
                "moe_softmax_after_top_k=True needs moe_router_score='softmax', "
                f"not {self.moe_router_score!r}"
            )
        if self.moe_top_k == 1 and (self.moe_normalize_expert_weights or self.moe_softmax_after_top_k):
            # megablocks 87
            warnings.warn(
                "with moe_top_k=1, normalising makes every expert weight 1, so the layer's output gives the "
                "router no gradient: leave moe_normalize_expert_weights and moe_softmax_after_top_k off",
                stacklevel=4,  # the caller of the generated __init__
            )

    def _check_parallelism(self) -> None:
        ranks = self.expert_parallel_world_size
        if self.moe_num_experts % ranks:
            raise ValueError(
                f"moe_num_experts={self.moe_num_experts} cannot be shared out evenly among the {ranks} ranks "
                "of the expert-parallel group"
            )

    @classmethod
    def from_megablocks(cls, args: object, **changes: Any) -> Arguments:
        """Take over the options of a ``megablocks.layers.arguments.Arguments``, or of an object like it.

        What ``args`` lacks keeps its default, and what is unknown here is ignored.

        Args:
            args: any object with attributes of these names.
            changes: options that shall differ (``mlp_impl="grouped"``: MegaBlocks' default is "sparse").

        Raises:
            TypeError: ``args`` has none of the attributes.
            ValueError: as the constructor.
        """
        taken = {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}
        if not taken:
            raise TypeError(f"{type(args).__name__} has none of the attributes of MegaBlocks' Arguments")
        return cls(**{**taken, **changes})

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The dtype of the parameters: ``dtype``, else float16 or bfloat16 by the flags, else float32."""
        if self.dtype is not None:
            return self.dtype
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def expert_parallel_world_size(self) -> int:
        """The ranks that the experts are shared out among; 1 without expert parallelism.

        Raises:
            ValueError: expert parallelism is on, but torch.distributed is not initialised.
        """
        if not self.moe_expert_model_parallelism:
            return 1
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "moe_expert_model_parallelism=True needs torch.distributed: call init_process_group first"
            )
        return dist.get_world_size(self.expert_parallel_group)

    @property
    def experts_per_rank(self) -> int:
        """The experts that each rank keeps."""
        return self.moe_num_experts // self.expert_parallel_world_size
