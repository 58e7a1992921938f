"""Absorbed latent attention of one new token a sequence over a paged cache, split over the context.

Every head reads the same latents, so a program takes a block of heads and a part of the pages. A second kernel joins
the parts and expands the result by the value half of ``wkv_b``. Source of the split: Flash-Decoding; of the
absorption: DeepSeek-V2, arXiv 2405.04434, section 2.1.

Shapes: B sequences, H heads, C latent width, R rotated width, V value width, P pages, G parts.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import torch

from kernels.act_quant import FP8_MAX, SMALLEST_AMAX, act_quant, scale_of
from kernels.device import begin, has_fp8_product, jit, overlapping, tl, triton
from kernels.latent_cache import PAGE

PROGRAMS = 264
"""About two for each multiprocessor of a large GPU: more parts would only have more to join."""

Attended = tuple[torch.Tensor, "tuple[torch.Tensor, torch.Tensor] | None"]
"""Heads' outputs (B, H, V), and their ``act_quant`` per head where it was asked for."""


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    to_values: torch.Tensor,
    scale: float,
    *,
    quantise: bool = False,
    scale_fmt: str | None = None,
) -> Attended:
    """Heads' outputs (B, H, V) of queries ``q_latent`` (B, H, C), ``q_rope`` (B, H, R), in their dtype.

    ``pages`` (P, PAGE, C + R) hold latents and rotated keys, ``table`` (B, pages a sequence) int32 says which are
    whose, ``lengths`` (B,) how many positions count (at least one). ``to_values`` is (H, V, C). Softmax in float32 of
    scores times ``scale``.
    """
    fast = has_fp8_product(q_latent.device) and q_latent.dtype == torch.bfloat16
    attend = _mla_decode_triton if fast else mla_decode_reference
    return attend(q_latent, q_rope, pages, table, lengths, to_values, scale, quantise=quantise, scale_fmt=scale_fmt)


def mla_decode_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    to_values: torch.Tensor,
    scale: float,
    *,
    quantise: bool = False,
    scale_fmt: str | None = None,
) -> Attended:
    """``mla_decode`` in plain torch, for any device and dtype."""
    width = q_latent.shape[-1]
    cached = pages[table.long()].flatten(1, 2)  # B, positions, C + R
    latents, keys = cached[..., :width], cached[..., width:]
    scores = torch.einsum("bhc,btc->bht", q_latent, latents) + torch.einsum("bhr,btr->bht", q_rope, keys)
    beyond = torch.arange(cached.shape[1], device=table.device) >= lengths[:, None]
    scores = (scores.float() * scale).masked_fill(beyond[:, None], -torch.inf)
    weights = scores.softmax(dim=-1).to(q_latent.dtype)
    # What lies beyond a sequence's end may be anything, even NaN, and must not be multiplied with its zero weight.
    summed = torch.einsum("bht,btc->bhc", weights, latents.masked_fill(beyond[..., None], 0))
    out = torch.einsum("bhc,hvc->bhv", summed, to_values)
    return out, act_quant(out.flatten(1), scale_fmt=scale_fmt) if quantise else None


def heads_of_one_program(batch: int, heads: int) -> int:
    """Few for a small batch, so that all of the GPU works; many for a large one, since each block of heads reads the
    latents again."""
    return 16 if batch * heads <= 1024 else min(64, triton.next_power_of_2(heads))


def parts_of(batch: int, head_blocks: int, most_pages: int) -> int:
    """Into how many parts the context is split: a power of two."""
    most = max(1, min(most_pages, PROGRAMS // (batch * head_blocks), 16))
    return 1 << (most.bit_length() - 1)


def _mla_decode_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    to_values: torch.Tensor,
    scale: float,
    *,
    quantise: bool = False,
    scale_fmt: str | None = None,
) -> Attended:
    B, H, C = q_latent.shape
    R, V = q_rope.shape[-1], to_values.shape[1]
    assert q_latent.stride(2) == q_rope.stride(2) == 1, "rows may be strided, values may not"
    assert to_values.stride()[1:] == (C, 1), "heads may be strided, their matrices may not"
    if quantise and V != 128:  # a head's values are not one group
        out, _ = _mla_decode_triton(q_latent, q_rope, pages, table, lengths, to_values, scale)
        return out, act_quant(out.flatten(1), scale_fmt=scale_fmt)
    heads = heads_of_one_program(B, H)
    parts = parts_of(B, triton.cdiv(H, heads), table.shape[1])
    device = q_latent.device
    sums = torch.empty(B, H, parts, C, dtype=torch.float32, device=device)
    marks = torch.empty(B, H, parts, 2, dtype=torch.float32, device=device)
    out = torch.empty(B, H, V, dtype=q_latent.dtype, device=device)
    q = torch.empty(B, H * V, dtype=torch.float8_e4m3fn, device=device) if quantise else out
    s = torch.empty(B, H, dtype=torch.float32, device=device) if quantise else marks
    with torch.cuda.device(device):
        _attend_kernel[(B, triton.cdiv(H, heads), parts)](
            q_latent, q_rope, pages, table, lengths, sums, marks, scale,
            q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), table.stride(0), H, parts,
            C=C, R=R, PAGE=PAGE, HEADS=heads, num_warps=4 if heads == 16 else 8, num_stages=2,
            **overlapping(device),
        )  # fmt: skip
        rows = 1 if B * H <= 1024 else 16
        _join_kernel[(H, triton.cdiv(B, rows))](
            sums, marks, to_values, out, q, s, B, H, to_values.stride(0),
            ROWS=rows, PARTS=parts, C=C, V=triton.next_power_of_2(V), WIDTH=V, STEP=min(C, 128), QUANTISE=quantise,
            UE8M0=scale_fmt == "ue8m0", LARGEST=FP8_MAX, LEAST_AMAX=SMALLEST_AMAX, num_warps=4, **overlapping(device),
        )  # fmt: skip
    return out, (q, s) if quantise else None


@jit(do_not_specialize=["parts"])
def _attend_kernel(
    q_latent_ptr: tl.tensor,
    q_rope_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    marks_ptr: tl.tensor,
    scale: float,
    latent_stride_b: int,
    latent_stride_h: int,
    rope_stride_b: int,
    rope_stride_h: int,
    table_stride: int,
    H: int,
    parts: int,
    C: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A block of heads over one part of one sequence's pages: unnormalised sums, their maximum and their weight."""
    begin(OVERLAP)
    b = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    part = tl.program_id(2)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    n_pages = tl.cdiv(length, PAGE)
    pages_of_part = tl.cdiv(n_pages, parts)
    latent_column = tl.arange(0, C)
    rope_column = tl.arange(0, R)
    real = (head < H)[:, None]
    q_latent_row = q_latent_ptr + b * latent_stride_b + head[:, None] * latent_stride_h
    q_latent = tl.load(q_latent_row + latent_column[None, :], mask=real, other=0.0)
    q_rope_row = q_rope_ptr + b * rope_stride_b + head[:, None] * rope_stride_h
    q_rope = tl.load(q_rope_row + rope_column[None, :], mask=real, other=0.0)
    offset = tl.arange(0, PAGE)
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    summed = tl.zeros((HEADS, C), tl.float32)
    for number in range(part * pages_of_part, tl.minimum((part + 1) * pages_of_part, n_pages)):
        page = tl.load(table_ptr + b * table_stride + number).to(tl.int64)
        row = pages_ptr + (page * PAGE + offset)[:, None] * (C + R)
        inside = number * PAGE + offset < length
        latents = tl.load(row + latent_column[None, :], mask=inside[:, None], other=0.0)
        keys = tl.load(row + C + rope_column[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latents)) + tl.dot(q_rope, tl.trans(keys))
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fading = tl.exp(most - higher)
        total = total * fading + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(latents.dtype), latents, summed * fading[:, None])
        most = higher
    place = (b * H + head) * parts + part
    tl.store(sums_ptr + place.to(tl.int64)[:, None] * C + latent_column[None, :], summed, mask=real)
    tl.store(marks_ptr + 2 * place, most, mask=head < H)
    tl.store(marks_ptr + 2 * place + 1, total, mask=head < H)


@jit(do_not_specialize=["B"])
def _join_kernel(
    sums_ptr: tl.tensor,
    marks_ptr: tl.tensor,
    to_values_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    s_ptr: tl.tensor,
    B: int,
    H: int,
    values_stride: int,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    QUANTISE: tl.constexpr,
    UE8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One head of ROWS sequences: the parts joined by their maxima, then the expansion to values.

    The loops are unrolled: their loads do not depend on each other and go out together.
    """
    begin(OVERLAP)
    head = tl.program_id(0)
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = b < B
    place = ((b * H + head) * PARTS)[:, None] + tl.arange(0, PARTS)[None, :]
    most_of_part = tl.load(marks_ptr + 2 * place, mask=real[:, None], other=0.0)
    total_of_part = tl.load(marks_ptr + 2 * place + 1, mask=real[:, None], other=1.0)
    shares = tl.exp(most_of_part - tl.max(most_of_part, axis=1)[:, None])
    shares = shares / tl.sum(shares * total_of_part, axis=1)[:, None]
    value = tl.arange(0, V)
    out = tl.zeros((ROWS, V), tl.float32)
    for column in tl.static_range(0, C, STEP):
        step = column + tl.arange(0, STEP)
        weight_place = to_values_ptr + head.to(tl.int64) * values_stride + value[None, :] * C + step[:, None]
        weight = tl.load(weight_place, mask=(value < WIDTH)[None, :], other=0.0)
        summed = tl.zeros((ROWS, STEP), tl.float32)
        if ROWS == 1:
            parts_place = tl.reshape(place, (PARTS,)).to(tl.int64)[:, None] * C + step[None, :]
            parts = tl.load(sums_ptr + parts_place) * tl.reshape(shares, (PARTS,))[:, None]
            summed = tl.sum(parts, axis=0).to(weight.dtype).to(tl.float32)
            out += tl.sum(summed[:, None] * weight.to(tl.float32), axis=0)[None, :]
        else:
            for part in tl.static_range(PARTS):
                share = tl.sum(tl.where(tl.arange(0, PARTS)[None, :] == part, shares, 0.0), axis=1)
                part_place = ((b * H + head) * PARTS + part).to(tl.int64)[:, None] * C + step[None, :]
                summed += tl.load(sums_ptr + part_place, mask=real[:, None], other=0.0) * share[:, None]
            out = tl.dot(summed.to(weight.dtype), weight, out)
    rounded = out.to(out_ptr.dtype.element_ty)
    target = (b.to(tl.int64) * H + head)[:, None] * WIDTH + value[None, :]
    inside = real[:, None] & (value < WIDTH)[None, :]
    tl.store(out_ptr + target, rounded, mask=inside)
    if QUANTISE:
        y = rounded.to(tl.float32)
        s = scale_of(tl.max(tl.abs(y), axis=1), LARGEST, LEAST_AMAX, UE8M0)
        tl.store(q_ptr + target, tl.div_rn(y, s[:, None]).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(s_ptr + b * H + head, s, mask=real)
