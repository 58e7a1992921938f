"""Multi-head latent attention in both forms, and the cache each of them keeps.

The naive form expands the latent into whole keys and values and caches those; the absorbed form caches the
normalised latent and the rotated key, and moves the expansion (``wkv_b``) into the queries and the output. They
give the same result. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.

Shapes: B batch, S new positions, T positions so far, H heads of this rank, N ``qk_nope_head_dim``,
R ``qk_rope_head_dim``, V ``v_head_dim``, C ``kv_lora_rank``.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from model.args import LATENT_NORM_EPS, ModelArgs
from model.layers import ColumnParallelLinear, Execution, Linear, RMSNorm, RowParallelLinear
from model.rope import rotate, softmax_scale

AttentionForm = Literal["naive", "absorbed"]


@dataclass(frozen=True)
class Positions:
    """Where the new tokens stand: their first position, their ``rotation`` (S, R/2), and the additive causal mask
    (S, T) where there is more than one of them."""

    start: int
    rotation: torch.Tensor
    mask: torch.Tensor | None


class Cached:
    """One growing tensor of a layer's cache: (B, capacity, …), written by position."""

    def __init__(self, batch: int, capacity: int, *width: int, execution: Execution) -> None:
        self.values = torch.zeros(batch, capacity, *width, dtype=execution.dtype, device=execution.device)

    def extend(self, new: torch.Tensor, start: int) -> torch.Tensor:
        """Write ``new`` (B, S, …) at position ``start`` and return everything up to its end (B, T, …)."""
        batch, length = new.shape[:2]
        capacity = self.values.shape[1]
        assert start + length <= capacity, f"position {start + length} is past the cache's {capacity}"
        self.values[:batch, start : start + length] = new
        return self.values[:batch, : start + length]


LayerCache = tuple[Cached, Cached]
"""Naive: keys (…, H, N + R) and values (…, H, V). Absorbed: normalised latents (…, C) and rotated keys (…, R)."""


class Attention(nn.Module):
    """The projections that both forms share: queries, latent and rotated key, and the way out."""

    def __init__(self, args: ModelArgs, execution: Execution) -> None:
        super().__init__()
        self.args = args
        self.execution = execution
        self.heads = execution.topology.share(args.n_heads, "n_heads")
        self.softmax_scale = softmax_scale(args)
        query_width = args.n_heads * args.qk_head_dim
        if args.q_lora_rank == 0:
            self.wq = ColumnParallelLinear(args.dim, query_width, args, execution)
        else:
            self.wq_a = Linear(args.dim, args.q_lora_rank, args, execution)
            self.q_norm = RMSNorm(args.q_lora_rank, LATENT_NORM_EPS, execution)
            self.wq_b = ColumnParallelLinear(args.q_lora_rank, query_width, args, execution)
        self.wkv_a = Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, args, execution)
        self.kv_norm = RMSNorm(args.kv_lora_rank, LATENT_NORM_EPS, execution)
        self.wkv_b = ColumnParallelLinear(
            args.kv_lora_rank,
            args.n_heads * (args.qk_nope_head_dim + args.v_head_dim),
            args,
            execution,
            fp8=self.wkv_b_may_be_fp8,
        )
        self.wo = RowParallelLinear(args.n_heads * args.v_head_dim, args.dim, args, execution)

    wkv_b_may_be_fp8 = True

    def new_cache(self, batch: int, capacity: int) -> LayerCache:
        """An empty cache for ``batch`` sequences of at most ``capacity`` positions."""
        raise NotImplementedError

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        positions: Positions,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Heads' outputs (B, S, H, V) from queries (B, S, H, N + R), latents (B, S, C) and keys (B, S, R)."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, positions: Positions, cache: LayerCache) -> torch.Tensor:
        """(B, S, dim) to the same shape and dtype; ``cache`` is extended by the new positions."""
        args = self.args
        query = self.wq(x) if args.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        query = query.view(*x.shape[:2], self.heads, args.qk_head_dim)
        q_nope, q_rope = torch.split(query, [args.qk_nope_head_dim, args.qk_rope_head_dim], dim=-1)
        query = torch.cat([q_nope, rotate(q_rope, positions.rotation)], dim=-1)
        latent, k_rope = torch.split(self.wkv_a(x), [args.kv_lora_rank, args.qk_rope_head_dim], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), positions.rotation).squeeze(2)
        heads = self.attend(query, self.kv_norm(latent), k_rope, positions, cache)
        output: torch.Tensor = self.wo(heads.flatten(2))
        return output

    def probabilities(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Softmax in float32 of raw scores (B, S, H, T), back in their dtype."""
        scaled = scores.float() * self.softmax_scale
        if mask is not None:
            scaled = scaled + mask[:, None, :]
        return scaled.softmax(dim=-1).to(scores.dtype)


class NaiveAttention(Attention):
    """Whole keys and values for every position, cached: simple, wide."""

    def new_cache(self, batch: int, capacity: int) -> LayerCache:
        """Keys (batch, capacity, H, N + R) and values (batch, capacity, H, V)."""
        keys = Cached(batch, capacity, self.heads, self.args.qk_head_dim, execution=self.execution)
        values = Cached(batch, capacity, self.heads, self.args.v_head_dim, execution=self.execution)
        return keys, values

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        positions: Positions,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``Attention.attend``."""
        expanded = self.wkv_b(latent).view(*latent.shape[:2], self.heads, -1)
        k_nope, new_values = torch.split(expanded, [self.args.qk_nope_head_dim, self.args.v_head_dim], dim=-1)
        new_keys = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, self.heads, -1)], dim=-1)
        keys, values = cache[0].extend(new_keys, positions.start), cache[1].extend(new_values, positions.start)
        scores = torch.einsum("bshd,bthd->bsht", query, keys)
        return torch.einsum("bsht,bthv->bshv", self.probabilities(scores, positions.mask), values)


class AbsorbedAttention(Attention):
    """Attention in the latent space: the cache holds C + R numbers a position, for all heads together."""

    wkv_b_may_be_fp8 = False  # its halves are multiplied with activations that were never quantised

    def new_cache(self, batch: int, capacity: int) -> LayerCache:
        """Normalised latents (batch, capacity, C) and rotated keys (batch, capacity, R)."""
        latents = Cached(batch, capacity, self.args.kv_lora_rank, execution=self.execution)
        keys = Cached(batch, capacity, self.args.qk_rope_head_dim, execution=self.execution)
        return latents, keys

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        positions: Positions,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``Attention.attend``."""
        q_nope, q_rope = torch.split(query, [self.args.qk_nope_head_dim, self.args.qk_rope_head_dim], dim=-1)
        expansion = self.wkv_b.weight.view(self.heads, -1, self.args.kv_lora_rank)
        to_keys, to_values = torch.split(expansion, [self.args.qk_nope_head_dim, self.args.v_head_dim], dim=1)
        latents, keys = cache[0].extend(latent, positions.start), cache[1].extend(k_rope, positions.start)
        q_latent = torch.einsum("bshn,hnc->bshc", q_nope, to_keys)
        scores = torch.einsum("bshc,btc->bsht", q_latent, latents) + torch.einsum("bshr,btr->bsht", q_rope, keys)
        summed = torch.einsum("bsht,btc->bshc", self.probabilities(scores, positions.mask), latents)
        return torch.einsum("bshc,hvc->bshv", summed, to_values)


ATTENTION: dict[AttentionForm, type[Attention]] = {"naive": NaiveAttention, "absorbed": AbsorbedAttention}
