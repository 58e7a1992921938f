"""The model of one rank: embedding, blocks, final norm and head. Its state is its weights; caches are passed in.

Shapes: B batch, S new positions, T positions so far.
"""

import torch
from torch import nn

from model.args import ModelArgs
from model.attention import ATTENTION, AttentionForm, LayerCache, Positions
from model.layers import MLP, ColumnParallelLinear, Execution, ParallelEmbedding, RMSNorm
from model.moe import MoE
from model.rope import inverse_frequencies, rotations
from model.topology import Topology

Cache = list[LayerCache]
"""One layer cache for each block, as ``Transformer.new_cache`` makes them."""


class Block(nn.Module):
    """One layer: attention, then a dense MLP or a mixture of experts, each after a norm and added to its input."""

    def __init__(self, layer: int, args: ModelArgs, execution: Execution, attention: AttentionForm) -> None:
        super().__init__()
        self.attn = ATTENTION[attention](args, execution)
        dense = layer < args.n_dense_layers
        self.ffn: nn.Module = MLP(args.inter_dim, args, execution) if dense else MoE(args, execution)
        self.attn_norm = RMSNorm(args.dim, args.norm_eps, execution)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps, execution)

    def forward(self, x: torch.Tensor, positions: Positions, cache: LayerCache) -> torch.Tensor:
        """(B, S, dim) to the same shape and dtype."""
        x = x + self.attn(self.attn_norm(x), positions, cache)
        output: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return output


class Transformer(nn.Module):
    """One rank's part of the model that ``args`` describe, with uninitialised weights (``model.load`` fills them).

    ``dtype`` is the compute dtype; with ``fp8`` the linears hold FP8 weights and block scales. ``attention`` is
    ``"naive"`` or ``"absorbed"``.
    """

    def __init__(self, args: ModelArgs, execution: Execution, attention: AttentionForm = "absorbed") -> None:
        super().__init__()
        self.args = args
        self.execution = execution
        self.embed = ParallelEmbedding(args, execution)
        self.layers = nn.ModuleList(Block(layer, args, execution, attention) for layer in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps, execution)
        self.head = ColumnParallelLinear(args.dim, args.vocab_size, args, execution, fp8=False)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", inverse_frequencies(args).to(execution.device), persistent=False)

    @property
    def topology(self) -> Topology:
        """This rank's place among its peers."""
        return self.execution.topology

    @property
    def device(self) -> torch.device:
        """Where the weights lie and tokens are expected."""
        return self.execution.device

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for ``batch`` sequences of at most ``capacity`` positions."""
        return [block.attn.new_cache(batch, capacity) for block in self.layers]  # type: ignore[union-attr, operator]

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, start: int, cache: Cache, *, all_positions: bool = False) -> torch.Tensor:
        """Next-token logits, float32: (B, vocab) after the last of ``tokens`` (B, S), or (B, S, vocab) after each.

        The tokens stand at positions ``start`` onwards; ``cache`` holds the positions before and is extended.
        """
        x = self.embed(tokens)
        length = tokens.shape[1]
        mask = causal_mask(start, length, self.device) if length > 1 else None
        positions = Positions(start, rotations(self.frequencies, start, length), mask)
        for block, layer_cache in zip(self.layers, cache, strict=True):
            x = block(x, positions, layer_cache)
        logits = self.head(self.norm(x if all_positions else x[:, -1]))
        return self.topology.all_gather_last(logits).float()


def causal_mask(start: int, length: int, device: torch.device) -> torch.Tensor:
    """Additive float32 (S, T): -inf where a query at ``start`` + row would see a later position, else 0."""
    blocked = torch.full((length, start + length), -torch.inf, device=device)
    return blocked.triu(diagonal=start + 1)
