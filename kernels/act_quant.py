"""Quantisation of activations to FP8: one float32 scale for each group of ``block_size`` values of a row."""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import torch

from kernels.device import begin, has_fp8_product, jit, overlapping, tl

FP8_MAX = 448.0  # the largest finite float8_e4m3fn
SMALLEST_AMAX = 1e-4  # keeps the scale of an all-zero group from being zero
GROUPS_PER_PROGRAM = 8  # 1,024 values for one warp: many loads under way, and the maxima need no shared memory


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows of ``x`` group by group: ``s = max(amax, 1e-4) / 448`` and ``q = x / s``.

    ``x`` is (..., K) of finite float32, bfloat16 or float16; K need not divide by ``block_size``, the last group
    is then a short one. Returns ``q``, float8_e4m3fn of x's shape, and ``s``, float32 (..., ceil(K / block_size)).
    ``scale_fmt="ue8m0"`` rounds each scale up to a power of two, as DeepSeek-V3.1's ``quantization_config`` asks.
    It is a true division, as in DeepSeek-V3's ``act_quant``: x times 1/s can differ in the last place.
    No quotient exceeds 448 by more than a float32 rounding, so none rounds past the largest FP8 value.
    Raises ValueError for another dtype, an unknown ``scale_fmt`` or a ``block_size`` that is no power of two.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"act_quant: x is {x.dtype}, expected float32, bfloat16 or float16")
    if scale_fmt not in (None, "ue8m0"):
        raise ValueError(f"act_quant: scale_fmt is {scale_fmt!r}, expected None or 'ue8m0'")
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"act_quant: block_size is {block_size}, expected a power of two")
    quantise = act_quant_triton if has_fp8_product(x.device) else act_quant_reference
    return quantise(x, block_size, scale_fmt)


def act_quant_reference(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``act_quant`` in plain torch, for any device."""
    K = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -K % block_size))
    groups = padded.view(*x.shape[:-1], -(-K // block_size), block_size)
    amax = groups.abs().amax(-1).clamp(min=SMALLEST_AMAX)
    s = amax / amax.new_tensor(FP8_MAX)  # a tensor: on CUDA torch multiplies by a Python number's reciprocal
    if scale_fmt == "ue8m0":
        s = _round_up_to_power_of_two(s)
    q = (groups / s.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return q.flatten(-2)[..., :K].contiguous(), s


def _round_up_to_power_of_two(s: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below ``s`` (positive, normal float32): any mantissa bit carries over."""
    return ((s.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def act_quant_triton(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``act_quant`` as one Triton kernel. Rows may be strided (a slice of a wider product), values may not."""
    K = x.shape[-1]
    n_groups = -(-K // block_size)
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    s = torch.empty(*x.shape[:-1], n_groups, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return q, s
    rows = x.reshape(-1, K)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    grid = (rows.shape[0], -(-n_groups // GROUPS_PER_PROGRAM))
    with torch.cuda.device(x.get_device()):
        _act_quant_kernel[grid](
            rows,
            q,
            s,
            K,
            rows.stride(0),
            BLOCK=block_size,
            GROUPS=GROUPS_PER_PROGRAM,
            LARGEST=FP8_MAX,
            LEAST_AMAX=SMALLEST_AMAX,
            UE8M0=scale_fmt == "ue8m0",
            num_warps=1,
            **overlapping(x.device),
        )
    return q, s


@jit()
def scale_of(amax: tl.tensor, LARGEST: tl.constexpr, LEAST_AMAX: tl.constexpr, UE8M0: tl.constexpr) -> tl.tensor:
    """The scale of groups whose largest magnitude is ``amax``, for every kernel that quantises; see ``act_quant``."""
    s = tl.div_rn(tl.maximum(amax, LEAST_AMAX), LARGEST)  # a plain `/` compiles to an approximate division
    if UE8M0:
        s = ((s.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return s


@jit()
def _quotient(x: tl.tensor, s: tl.tensor) -> tl.tensor:
    """``x / s[:, None]``, correctly rounded, for the price of one division a row.

    A product with the rounded reciprocal is corrected by its exact remainder (Markstein, 1990). That rounds rightly
    unless the divisor's mantissa is all ones; then, once in 8 million rows, everything is divided.
    """
    reciprocal = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)[:, None]
    q = x * reciprocal
    q = tl.fma(tl.fma(-q, s[:, None], x), reciprocal, q)
    q = tl.where(x == 0.0, x, q)  # the correction makes 0.0 of -0.0
    if tl.max(((s.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF).to(tl.int32), axis=0) == 1:
        q = tl.div_rn(x, s[:, None])
    return q


@jit()
def _act_quant_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    s_ptr: tl.tensor,
    K: int,
    row_stride: int,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    UE8M0: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * row_stride + column, mask=column < K, other=0.0).to(tl.float32)

    s = scale_of(tl.max(tl.abs(x), axis=1), LARGEST, LEAST_AMAX, UE8M0)
    q = _quotient(x, s)

    n_groups = tl.cdiv(K, BLOCK)
    tl.store(q_ptr + row * K + column, q.to(q_ptr.dtype.element_ty), mask=column < K)
    tl.store(s_ptr + row * n_groups + group, s, mask=group < n_groups)
