"""Compare a dMoE layer on each backend with a dense reference, time its parts, and train with it.

Shape letters: T tokens, K choices a token, E experts, F expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from gmm_registry.contract import BackendKey, Problem, dtype_name
from gmm_registry.errors import GmmRegistryError
from gmm_registry.layers import Arguments, dMoE, permute, sort_by_expert, unpermute
from gmm_registry.registry import get_backend
from gmm_registry.testing.dense import dense_moe
from gmm_registry.testing.language_model import train
from gmm_registry.testing.tolerances import Difference, compare

_TOKENS = 257  # no multiple of anything
_TAIL = 10  # steps over which the last loss is averaged
_STRAYING = {"float32": 0.02, "bfloat16": 0.1}  # nats a byte that two curves may be apart
# Multiples of the block of the sparse formulation; skewed routing leaves one expert without rows.
_ARGUMENTS = Arguments(
    hidden_size=128,
    ffn_hidden_size=128,
    moe_num_experts=8,
    moe_top_k=2,
    mlp_type="glu",
    bias=False,
    return_bias=False,
    activation_fn=F.silu,
    moe_normalize_expert_weights=1,
    moe_loss_weight=0.01,
    dtype=torch.float32,
    device="cpu",
)


@dataclass(frozen=True)
class LayerResult:
    """One backend in a layer: differences from the dense reference, medians in ms, losses in nats a byte.

    ``grad_weights`` has a list for each of w1, v1 and w2, with one difference for each expert;
    ``loss_difference`` is the largest distance of the loss curve from that of eager; ``saved_bytes`` what
    the plain and the memory-optimised layer keep for the backward, parameters aside.
    """

    backend: str
    dtype: str = ""
    output: Difference | None = None
    grad_x: Difference | None = None
    grad_weights: dict[str, list[Difference]] = field(default_factory=dict)
    times_ms: dict[str, float] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    loss_difference: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """Say what is wrong: a difference beyond tolerance, a loss that stays or strays from eager's."""
        found = {"output": self.output, "grad_x": self.grad_x}
        for name, each in self.grad_weights.items():
            found |= {f"grad_{name} of expert {expert}": d for expert, d in enumerate(each)}
        faults = [name for name, difference in found.items() if difference and not difference.passed]
        if self.losses:
            tail = self.losses[-_TAIL:]
            if not sum(tail) / len(tail) < 0.8 * self.losses[0]:
                faults.append("the loss does not fall")
            if self.loss_difference is None or not self.loss_difference <= _STRAYING[self.dtype]:
                faults.append("the loss strays from eager's")
        return faults

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON takes it."""
        weights = {name: [d._asdict() for d in each] for name, each in self.grad_weights.items()}
        differences = {
            name: None if found is None else found._asdict()
            for name, found in (("output", self.output), ("grad_x", self.grad_x))
        }
        return {**vars(self), **differences, "grad_weights": weights, "reasons": list(self.reasons)}


def layer_parity(
    device: str, keys: Iterable[BackendKey], *, steps: int = 100, seconds: float = 0.2
) -> Iterator[LayerResult]:
    """Compare, time and train a dMoE GLU layer on each backend.

    Args:
        device: a device type.
        keys: the backends; `megablocks_sparse` runs the block-sparse formulation, all others the grouped one.
        steps: training steps; 0 does not train.
        seconds: how long to time each part.
    """
    curves: dict[torch.dtype, list[float]] = {}  # eager's, by dtype
    for key in keys:
        try:
            backend = get_backend(device, str(key))
        except GmmRegistryError as error:
            yield LayerResult(str(key), reasons=(str(error),))
            continue
        dtype, reasons = _dtype(backend.rejections, device)
        if dtype is None:
            yield LayerResult(str(key), reasons=reasons)
            continue
        sparse = key.impl == "megablocks_sparse"
        args = replace(
            _ARGUMENTS,
            device=device,
            dtype=dtype,
            mlp_impl="sparse" if sparse else "grouped",
            backend=str(key),
        )
        result = _compare(args, str(key))
        result = replace(result, times_ms=_times(args, seconds), saved_bytes=_saved(args))
        if steps:
            if dtype not in curves:
                curves[dtype] = train(replace(args, mlp_impl="grouped", backend="any.eager"), steps)
            losses = curves[dtype] if key.impl == "eager" else train(args, steps)
            apart = max(abs(a - b) for a, b in zip(losses, curves[dtype], strict=True))
            result = replace(result, losses=losses, loss_difference=apart)
        yield result


def _dtype(
    rejections: Callable[[Problem], list[str]], device: str
) -> tuple[torch.dtype | None, tuple[str, ...]]:
    """Return fp32 if the backend takes it, since differences show best there, else bf16."""
    reasons: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem(device, None, dtype, 2 * _TOKENS, 8, 2 * _ARGUMENTS.ffn_hidden_size, 128)
        reasons = rejections(problem)
        if not reasons:
            return dtype, ()
    return None, tuple(reasons)


def _layer(args: Arguments) -> tuple[dMoE, Tensor, Tensor]:
    """Make the layer and its input, the same numbers for every backend; the last expert gets no rows."""
    generator = torch.Generator().manual_seed(0)
    layer = dMoE(args)
    state = {
        name: torch.randn(tensor.shape, generator=generator) * 0.05
        for name, tensor in sorted(layer.state_dict().items())
    }
    skew = state["router.layer.weight"][:, 0]
    skew.copy_(torch.linspace(1, -1, args.moe_num_experts))
    skew[-1] = -50
    layer.load_state_dict(state)
    x = torch.randn(_TOKENS, args.hidden_size, generator=generator)
    x[:, 0] = 1
    grad_out = torch.randn(x.shape, generator=generator) * 0.1
    return layer, *(tensor.to(args.device, args.parameter_dtype) for tensor in (x, grad_out))  # type: ignore[return-value]


def _compare(args: Arguments, backend: str) -> LayerResult:
    layer, x, grad_out = _layer(args)
    x.requires_grad_()
    out = layer(x)
    out.backward(grad_out)
    state = {name: t.detach().cpu().double().requires_grad_() for name, t in layer.state_dict().items()}
    dense_x = x.detach().cpu().double().requires_grad_()
    want = dense_moe(dense_x, state, args)
    names = ["w1", "v1", "w2"]
    wanted = torch.autograd.grad(
        want, [dense_x, *(state[f"experts.mlp.{name}"] for name in names)], grad_out.cpu().double()
    )
    mlp: Any = layer.experts.mlp
    grads = [*mlp.apart(mlp.w1v1.grad), mlp.w2.grad]
    dtype = args.parameter_dtype
    by_expert = (args.moe_num_experts, -1, args.hidden_size)
    assert x.grad is not None
    return LayerResult(
        backend,
        dtype_name(dtype),
        compare(out, want, dtype),
        compare(x.grad, wanted[0], dtype),
        {
            name: [
                compare(g, w, dtype) for g, w in zip(got.view(by_expert), ref.view(by_expert), strict=True)
            ]
            for name, got, ref in zip(names, grads, wanted[1:], strict=True)
        },
    )


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Measure what a forward keeps for the backward, each storage once, parameters aside."""
    ours = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    del out  # until here nothing kept was freed, so that no address stands for two tensors
    return sum(kept.values())


def _saved(args: Arguments) -> dict[str, int]:
    found = {}
    for name, memory_optimized in (("plain", False), ("memory optimised", True)):
        layer, x, _ = _layer(replace(args, memory_optimized_mlp=memory_optimized))
        found[name] = saved_bytes(layer, x.requires_grad_())
    return found


def _times(args: Arguments, seconds: float) -> dict[str, float]:
    layer, x, grad_out = _layer(args)
    routing = layer.router(x)
    mlp = layer.experts.mlp

    def median(function: Callable[[], object]) -> float:
        timer = Timer("function()", globals={"function": function})
        return timer.blocked_autorange(min_run_time=seconds).median * 1e3

    def step() -> None:
        layer(x).backward(grad_out)

    with torch.no_grad():
        permutation = sort_by_expert(routing.experts, args.moe_num_experts, block=mlp.block)
        products = mlp.products(permutation.row_counts, x.device)
        rows = permute(x, permutation)
        first, second = mlp.weights()
        inner, _ = products.halves(products.expand(rows, first))

        def gemms() -> None:
            products.expand(rows, first)
            products.contract(inner, second)

        def permutes() -> None:
            unpermute(permute(x, permutation), permutation, routing.weights)

        times = {"GEMM": median(gemms), "permute and unpermute": median(permutes)}
    return {**times, "step": median(step)}
