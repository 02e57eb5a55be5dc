"""A small byte-level language model with one dMoE layer, to train alike on every backend.

Shape letters: B sequences, S bytes of each, H hidden.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gmm_registry.layers import Arguments, LossCollector, dMoE

_SEQUENCES, _LENGTH = 8, 64


class ByteModel(nn.Module):
    """Predict the next byte: embedding, one head of causal attention, one dMoE layer, a linear head."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        hidden = args.hidden_size
        self.embedding = nn.Embedding(256, hidden)
        self.position = nn.Embedding(_LENGTH, hidden)
        self.attention = nn.Linear(hidden, 3 * hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3))
        self.moe = dMoE(args)
        self.head = nn.Linear(hidden, 256)
        self.to(args.device, args.parameter_dtype)

    def forward(self, text: Tensor) -> Tensor:
        """Take bytes (B, S) int64 to logits (B, S, 256)."""
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        query, key, value = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.moe(self.norms[1](x))
        logits: Tensor = self.head(self.norms[2](x))
        return logits


@cache
def real_text() -> Tensor:
    """Return the bytes of a module of the standard library, as int64."""
    spec = importlib.util.find_spec("argparse")
    if spec is None or spec.origin is None:
        raise RuntimeError("the source of the standard library's argparse, the text to train on, is missing")
    return torch.tensor(list(Path(spec.origin).read_bytes()))


def train(args: Arguments, steps: int = 100, seed: int = 0) -> list[float]:
    """Train a `ByteModel` and return the loss of each step, in nats a byte.

    The same seed gives the same model and the same batches, drawn on the CPU, whatever the backend.
    """
    text, generator = real_text(), torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cpu = Arguments(**{**vars(args), "device": "cpu"})
        state = ByteModel(cpu).state_dict()
    model = ByteModel(args)
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - _LENGTH - 1, (_SEQUENCES, 1), generator=generator)
        batch = text[starts + torch.arange(_LENGTH + 1)].to(args.device)
        with LossCollector() as collected:
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + collected.total()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
