"""Into the paged cache of latent attention: the latent's norm, both rotations and the write, in one launch.

Shapes: T tokens, H heads, N width of a query's part without rotation, R rotated width, C latent width,
P pages of ``PAGE`` positions.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import torch
from torch.nn import functional

from kernels.device import begin, has_fp8_product, jit, overlapping, tl

PAGE = 64
"""Positions a page."""


def write_latents(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Rotate ``query`` (T, H, N + R) in place and write each token's normalised latent and rotated key to its place.

    ``latent`` is (T, C + R) as ``wkv_a`` gives it, ``norm`` (C,) float32 the latent norm's weight. ``rotations`` is
    float32 (positions, R/2, 2), cosine and sine; ``positions`` (T,) where each token stands, ``places`` (T,) the row of
    ``pages`` (P, PAGE, C + R), seen as (P * PAGE, C + R), that it gets. Pairs are interleaved; arithmetic is float32.
    """
    if has_fp8_product(query.device):
        _write_latents_triton(query, latent, norm, eps, rotations, positions, places, pages)
    else:
        write_latents_reference(query, latent, norm, eps, rotations, positions, places, pages)


def write_latents_reference(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """``write_latents`` in plain torch, for any device and dtype."""
    rotation = torch.view_as_complex(rotations[positions])  # T, R/2
    width = 2 * rotation.shape[-1]
    query[..., -width:] = _rotated(query[..., -width:], rotation[:, None])
    normed = functional.rms_norm(latent[:, :-width].float(), norm.shape, norm, eps).to(latent.dtype)
    rows = torch.cat([normed, _rotated(latent[:, -width:], rotation)], dim=-1)
    pages.view(-1, pages.shape[-1])[places] = rows.to(pages.dtype)


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    # A copy, since a slice that starts at an odd place cannot be seen as complex numbers.
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).clone(memory_format=torch.contiguous_format))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def _write_latents_triton(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    T, heads, width = query.shape
    half = rotations.shape[1]
    assert query.stride(2) == latent.stride(1) == 1, "rows may be strided, values may not"
    with torch.cuda.device(query.device):
        _write_latents_kernel[(T, heads + 1)](
            query, latent, norm, eps, rotations, positions, places, pages,
            query.stride(0), query.stride(1), latent.stride(0), width - 2 * half,
            HEADS=heads, C=latent.shape[1] - 2 * half, HALF=half, num_warps=2, **overlapping(query.device),
        )  # fmt: skip


@jit()
def _write_latents_kernel(
    query_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: float,
    rotations_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    places_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    query_stride: int,
    head_stride: int,
    latent_stride: int,
    N: int,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One head of one token's query; the last program of a token takes its latent and key."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    pair = tl.arange(0, HALF)
    cosine = tl.load(rotations_ptr + (position * HALF + pair) * 2)
    sine = tl.load(rotations_ptr + (position * HALF + pair) * 2 + 1)
    if head < HEADS:
        source = query_ptr + token * query_stride + head * head_stride + N
        target = source
    else:
        source = latent_ptr + token * latent_stride + C
        row = pages_ptr + tl.load(places_ptr + token).to(tl.int64) * (C + 2 * HALF)
        target = row + C
        column = tl.arange(0, C)
        latent = tl.load(latent_ptr + token * latent_stride + column).to(tl.float32)
        mean = tl.sum(latent * latent, axis=0) / C
        normed = latent * tl.rsqrt(mean + eps) * tl.load(norm_ptr + column)
        # Rounded to the activations' dtype first, as the simple path does.
        tl.store(row + column, normed.to(latent_ptr.dtype.element_ty).to(pages_ptr.dtype.element_ty))
    even = tl.load(source + 2 * pair).to(tl.float32)
    odd = tl.load(source + 2 * pair + 1).to(tl.float32)
    tl.store(target + 2 * pair, (even * cosine - odd * sine).to(query_ptr.dtype.element_ty))
    tl.store(target + 2 * pair + 1, (even * sine + odd * cosine).to(query_ptr.dtype.element_ty))
