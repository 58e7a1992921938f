"""One pass through the layers for a flat row of tokens; prompts and single tokens differ in how they attend.

Nothing here waits for the device or depends on its values, so that a pass can be captured in a graph.

Shapes: T tokens of all sequences together, B sequences, S positions of the longest prompt, D width of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.add_norm import Normed, add_norm, weighted_sum
from kernels.fused_moe import fused_moe
from kernels.latent_cache import write_latents
from kernels.matvec import linear
from kernels.mla_decode import mla_decode
from kernels.moe_gate import route
from model.args import LATENT_NORM_EPS
from model.engine.weights import AttentionWeights, DenseWeights, LayerWeights, MoEWeights, Product, outputs
from model.rope import softmax_scale
from model.transformer import Transformer

Attend = Callable[[AttentionWeights, torch.Tensor, torch.Tensor], Normed]
"""From a layer's weights, queries (T, H, N + R) and that layer's pages to the heads' outputs (T, H * V)."""


@dataclass(frozen=True)
class Where:
    """``positions`` (T,) of the tokens in their sequences, ``places`` (T,) the rows of the pages that they get."""

    positions: torch.Tensor
    places: torch.Tensor


class Forward:
    """The layers of ``model`` with its weights gathered, and the rotation of every position up to ``context``."""

    def __init__(self, model: Transformer, layers: list[LayerWeights], context: int) -> None:
        self.model, self.layers = model, layers
        positions = torch.arange(context, device=model.device, dtype=torch.float32)
        angles = torch.outer(positions, model.frequencies)
        self.rotations = torch.stack([angles.cos(), angles.sin()], dim=-1)  # context, R/2, 2
        self.scale = softmax_scale(model.args)
        self.fp8 = model.execution.fp8
        self.heads = model.args.n_heads // model.topology.size

    def decode(self, tokens: torch.Tensor, where: Where, table: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Logits (B, vocab), float32, after one token of each sequence (B,), whose pages ``table`` (B, …) names."""
        lengths = where.positions + 1

        def attend(weights: AttentionWeights, query: torch.Tensor, of_layer: torch.Tensor) -> Normed:
            q_nope, q_rope = torch.split(query, self._query_widths(), dim=-1)
            q_latent = torch.bmm(q_nope.transpose(0, 1), weights.to_keys).transpose(0, 1)
            heads, quantised = mla_decode(
                q_latent, q_rope, of_layer, table, lengths, weights.to_values, self.scale,
                quantise=weights.out.scale is not None, scale_fmt=weights.out.scale_fmt,
            )  # fmt: skip
            return Normed(heads.flatten(1), quantised)

        return self._logits(self._layers(tokens, where, pages, attend))

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor, where: Where, pages: torch.Tensor) -> torch.Tensor:
        """Logits (B, vocab), float32, after the last of the ``lengths`` (B,) tokens of each prompt (B, S).

        Prompts begin at position 0 and are padded at their ends; what stands there attends and is attended by nobody.
        """
        batch, longest = tokens.shape

        def attend(weights: AttentionWeights, query: torch.Tensor, of_layer: torch.Tensor) -> Normed:
            cached = of_layer.view(-1, of_layer.shape[-1])[where.places].to(query.dtype)
            return Normed(self._expanded(weights, query, cached, batch, longest))

        x = self._layers(tokens.flatten(), where, pages, attend)
        last = torch.arange(batch, device=tokens.device) * longest + lengths - 1
        return self._logits(x[last])

    def _query_widths(self) -> list[int]:
        return [self.model.args.qk_nope_head_dim, self.model.args.qk_rope_head_dim]

    def _expanded(
        self, weights: AttentionWeights, query: torch.Tensor, cached: torch.Tensor, batch: int, longest: int
    ) -> torch.Tensor:
        """Causal attention with whole keys and values, which for a prompt is less work than in the latent space."""
        args = self.model.args
        latent, k_rope = torch.split(cached, [args.kv_lora_rank, args.qk_rope_head_dim], dim=-1)
        expanded = functional.linear(latent, weights.expansion).view(len(latent), self.heads, -1)
        k_nope, value = torch.split(expanded, [args.qk_nope_head_dim, args.v_head_dim], dim=-1)
        key = torch.cat([k_nope, k_rope[:, None].expand(-1, self.heads, -1)], dim=-1)
        if query.is_cuda:  # the fused kernels of torch want values as wide as keys
            value = functional.pad(value, (0, args.qk_head_dim - args.v_head_dim))
        q, k, v = (part.view(batch, longest, self.heads, -1).transpose(1, 2) for part in (query, key, value))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return heads.transpose(1, 2)[..., : args.v_head_dim].reshape(len(latent), -1)

    def _layers(self, tokens: torch.Tensor, where: Where, pages: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(T,) token ids to (T, D) after the final norm."""
        x = self._embedded(tokens)
        delta: torch.Tensor | None = None
        choices: torch.Tensor | None = None
        for number, layer in enumerate(self.layers):
            normed = self._add_norm(x, delta, layer.attention_norm, choices)
            delta, choices = self._attention(layer.attention, normed, where, pages[number], attend), None
            normed = self._add_norm(x, delta, layer.ffn_norm, None)
            if isinstance(layer.ffn, MoEWeights):
                delta, choices = self._experts(layer.ffn, normed)
            else:
                delta, choices = self._dense(layer.ffn, normed), None
        last = self.model.norm
        return add_norm(x, delta, last.weight.data, last.eps, choices=choices).x

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.model.topology.size == 1:
            return functional.embedding(tokens, self.model.embed.weight)
        return self.model.embed(tokens)  # type: ignore[no-any-return]

    def _add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, choices: torch.Tensor | None
    ) -> Normed:
        args = self.model.args
        return add_norm(x, delta, weight, args.norm_eps, choices=choices, quantise=self.fp8, scale_fmt=args.scale_fmt)

    def _attention(
        self, weights: AttentionWeights, normed: Normed, where: Where, pages: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        query, latent = outputs(weights.first, normed)
        if weights.query is not None and weights.query_norm is not None:
            scale_fmt = weights.query.scale_fmt
            quantise = weights.query.scale is not None
            of_query = add_norm(
                query, None, weights.query_norm, LATENT_NORM_EPS, quantise=quantise, scale_fmt=scale_fmt
            )
            query = weights.query(of_query)
        query = query.view(len(query), self.heads, -1)
        write_latents(
            query, latent, weights.latent_norm, LATENT_NORM_EPS, self.rotations, where.positions, where.places, pages
        )
        return self._summed(weights.out, attend(weights, query, pages))

    def _dense(self, weights: DenseWeights, normed: Normed) -> torch.Tensor:
        gate, up = outputs(weights.gate_up, normed)
        return self._summed(weights.down, Normed(functional.silu(gate) * up))

    def _summed(self, product: Product, x: Normed) -> torch.Tensor:
        """A row-parallel product: summed over the ranks in float32, where there are several."""
        if self.model.topology.size == 1:
            return product(x)
        return self.model.topology.all_reduce(product(x, torch.float32)).to(x.x.dtype)

    def _experts(self, weights: MoEWeights, normed: Normed) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The experts' results and the weights to sum them with; with several ranks the sum itself."""
        indices, choices = route(normed.x, weights.gate, weights.bias, weights.routing)
        scale_fmt = self.model.args.scale_fmt
        results = fused_moe(normed.x, indices, weights.experts, scale_fmt, normed.quantised)
        if self.model.topology.size == 1:
            return results, choices
        total = self.model.topology.all_reduce(weighted_sum(results, choices))
        return total.to(normed.x.dtype), None

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = linear(x, self.model.head.weight)
        return self.model.topology.all_gather_last(logits).float()
