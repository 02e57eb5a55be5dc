"""The shared expert: an ordinary MLP that every token goes through, never a grouped product.

Parameters are named as MegaBlocks saves them. Shape letters: T tokens, H hidden, F expert width.
"""

from __future__ import annotations

from torch import Tensor, nn

from gmm_registry.layers.arguments import Arguments


class SharedExpert(nn.Module):
    """Give ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` for a GLU, and add it to the experts.

    With ``shared_expert_gate`` the output is multiplied with ``sigmoid(shared_expert_gate(x))`` first, as in
    Qwen's models.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = args
        hidden, width = args.hidden_size, args.shared_expert_hidden_size
        options = {"bias": args.bias, "device": args.device, "dtype": args.parameter_dtype, **args.fc_kwargs}
        self.up_proj = args.fc_cls(hidden, width, **options)
        self.down_proj = args.fc_cls(width, hidden, **options)
        self.gate_proj = args.fc_cls(hidden, width, **options) if args.mlp_type == "glu" else None
        self.shared_expert_gate = (
            nn.Linear(hidden, 1, bias=False, device=args.device, dtype=args.parameter_dtype)
            if args.shared_expert_gate
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute tokens (T, H), giving (T, H)."""
        if self.gate_proj is None:
            inner = self.args.activation_fn(self.up_proj(x))
        else:
            inner = self.args.activation_fn(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * out

    def add(self, shared: Tensor, routed: Tensor) -> Tensor:
        """Add the shared output to the routed one; weighted, each expert a token meets counts the same."""
        if not self.args.shared_expert_weighted_sum:
            return shared + routed
        top_k = self.args.moe_top_k
        return (shared + top_k * routed) / (top_k + 1)
