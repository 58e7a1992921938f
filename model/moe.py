"""Mixture of experts: the gate that routes each token, and the experts this rank holds.

Shapes: N tokens, E routed experts, G groups, K experts a token.
"""

import torch
from torch import nn
from torch.nn import functional

from kernels.fused_moe import ExpertWeights
from model.args import ModelArgs
from model.layers import MLP, Execution, Linear
from model.topology import Topology


class Gate(nn.Module):
    """Chooses K experts for each token and the weights of their outputs. All arithmetic is float32.

    Source: DeepSeek-V2 (arXiv 2405.04434) for softmax scores and groups judged by their best expert,
    DeepSeek-V3 (arXiv 2412.19437) for sigmoid scores, the bias that only chooses, and groups judged by their
    best two.
    """

    def __init__(self, args: ModelArgs, execution: Execution) -> None:
        super().__init__()
        self.args = args
        self.weight = execution.parameter(args.n_routed_experts, args.dim, dtype=torch.float32)
        self.bias = execution.parameter(args.n_routed_experts, dtype=torch.float32) if args.gate_bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From (N, dim): weights (N, K) float32 and expert indices (N, K) int64."""
        args = self.args
        logits = functional.linear(x.float(), self.weight)
        scores = logits.softmax(dim=-1) if args.score_func == "softmax" else logits.sigmoid()
        chosen_by = scores if self.bias is None else scores + self.bias
        if args.n_expert_groups > 1:
            chosen_by = self._only_best_groups(chosen_by)
        indices = chosen_by.topk(args.n_activated_experts, dim=-1).indices
        weights = scores.gather(-1, indices)
        if args.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * args.route_scale, indices

    def _only_best_groups(self, chosen_by: torch.Tensor) -> torch.Tensor:
        grouped = chosen_by.view(chosen_by.shape[0], self.args.n_expert_groups, -1)
        judged_by = 1 if self.bias is None else 2
        group_scores = grouped.topk(judged_by, dim=-1).values.sum(dim=-1)
        kept = group_scores.topk(self.args.n_limited_groups, dim=-1).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, value=False)
        return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)


class Expert(nn.Module):
    """One routed expert, whole on its rank: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, args: ModelArgs, execution: Execution) -> None:
        super().__init__()
        self.w1 = Linear(args.dim, args.moe_inter_dim, args, execution)
        self.w2 = Linear(args.moe_inter_dim, args.dim, args, execution)
        self.w3 = Linear(args.dim, args.moe_inter_dim, args, execution)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, dim) to (N, dim) in float32, to be weighted and summed; in BF16 compute, rounded to BF16 before."""
        return self.w2.product(functional.silu(self.w1(x)) * self.w3(x), torch.float32)


class MoE(nn.Module):
    """The routed experts of this rank and its part of the shared ones, summed here and then over the ranks."""

    def __init__(self, args: ModelArgs, execution: Execution) -> None:
        super().__init__()
        self.topology = execution.topology
        self.gate = Gate(args, execution)
        self.experts = nn.ModuleDict(
            {str(expert): Expert(args, execution) for expert in local_experts(args, self.topology)}
        )
        self.shared_experts = MLP(args.n_shared_experts * args.moe_inter_dim, args, execution)
        self.stacked: ExpertWeights | None = None  # where all of them lie, if ``model.engine.weights`` placed them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, dim) to the same shape and dtype; one all-reduce, in float32."""
        tokens = x.flatten(0, 1)
        weights, indices = self.gate(tokens)
        output = self.shared_experts.partial(tokens)
        for name, expert in self.experts.items():
            token, place = torch.where(indices == int(name))
            if token.numel():
                output.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        total = self.topology.all_reduce(output)
        return total.to(x.dtype).view_as(x)


def local_experts(args: ModelArgs, topology: Topology) -> range:
    """The experts that lie whole on this rank: expert i on rank ⌊i / (E / size)⌋."""
    share = topology.share(args.n_routed_experts, "n_routed_experts")
    return range(topology.rank * share, (topology.rank + 1) * share)
