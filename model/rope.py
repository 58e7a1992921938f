"""Rotary position embedding on interleaved pairs, and YaRN as a property of the checkpoint.

Shapes: B batch, S sequence, H heads, R ``qk_rope_head_dim``.
"""

import math

import torch

from model.args import ModelArgs


def inverse_frequencies(args: ModelArgs) -> torch.Tensor:
    """Radians a position for each rotated pair, float32 (R/2,); with YaRN where ``args.yarn`` says so.

    Source: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071) in the arithmetic of transformers'
    ``_compute_yarn_parameters``: slow pairs are stretched by ``rope_factor``, fast ones are kept, a linear ramp
    lies between. Positions never switch it: a short cache of a YaRN checkpoint rotates as a long one.
    """
    width = args.qk_rope_head_dim
    periods = args.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if not args.yarn:
        return 1.0 / periods
    low = max(math.floor(_pair_that_turns(args.beta_fast, args)), 0)
    high = min(math.ceil(_pair_that_turns(args.beta_slow, args)), width - 1)
    span = high - low or 0.001
    kept = 1.0 - ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return 1.0 / (args.rope_factor * periods) * (1.0 - kept) + 1.0 / periods * kept


def _pair_that_turns(times: float, args: ModelArgs) -> float:
    """The (fractional) pair that makes ``times`` full turns over the original context."""
    turns = args.original_seq_len / (times * 2 * math.pi)
    return args.qk_rope_head_dim * math.log(turns) / (2 * math.log(args.rope_theta))


def softmax_scale(args: ModelArgs) -> float:
    """The factor on attention scores: 1/sqrt(head width), times YaRN's mscale squared (queries and keys)."""
    scale: float = args.qk_head_dim**-0.5
    if args.yarn and args.rope_factor > 1:
        mscale = 0.1 * args.mscale * math.log(args.rope_factor) + 1.0
        scale *= mscale * mscale
    return scale


def rotations(frequencies: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Unit complex numbers (S, R/2), complex64, that rotate the pairs at positions ``start`` onwards."""
    positions = torch.arange(start, start + length, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the interleaved pairs (x0, x1), (x2, x3), … of ``x`` (B, S, H, R) by ``rotation`` (S, R/2).

    Computed in float32, given back in the dtype of ``x``.
    """
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[:, None, :]).flatten(-2).to(x.dtype)
