"""transformers' Qwen3.5 MoE block, with its own experts and with ours, from the same random weights."""

import copy

import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from gmm_registry.layers import routed_glu


class OurExperts(torch.nn.Module):
    """The parameters of transformers' experts, multiplied by gmm."""

    def __init__(self, theirs):
        super().__init__()
        self.gate_up_proj, self.down_proj = theirs.gate_up_proj, theirs.down_proj

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return routed_glu(
            hidden_states,
            self.gate_up_proj.transpose(1, 2),
            self.down_proj.transpose(1, 2),
            top_k_weights,
            top_k_index,
        )


def blocks():
    """Return their block and ours, equal in all but the experts' code."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = Qwen3_5MoeSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    ours = copy.deepcopy(theirs)
    ours.experts = OurExperts(ours.experts)
    return theirs, ours


def losses(block, device="cpu", steps=10):
    """Train to a fixed target and return the losses."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(2, 9, 32, generator=generator).to(device) for _ in range(2))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    found = []
    for _ in range(steps):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
