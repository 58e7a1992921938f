"""What stands between two products of a layer: the residual sum, the RMS norm, and the quantisation of its result.

Shapes: T tokens, D width of the model, S choices of experts a token.
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.act_quant import FP8_MAX, SMALLEST_AMAX, act_quant, scale_of
from kernels.device import begin, has_fp8_product, jit, overlapping, tl, triton

BLOCK = 128


@dataclass(frozen=True)
class Normed:
    """``x`` (T, D) normalised, and where it was asked for ``act_quant(x)``: FP8 (T, D), float32 (T, ceil(D / 128))."""

    x: torch.Tensor
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    choices: torch.Tensor | None = None,
    quantise: bool = False,
    scale_fmt: str | None = None,
) -> Normed:
    """Add ``delta`` to the residual ``x`` (T, D) in place, then its RMS norm with ``weight`` (D,) float32.

    ``delta`` is (T, D), or the experts' results (T, S, D) with their weights ``choices`` (T, S) float32: they are
    weighted and summed in float32 and rounded once; a weight of zero leaves its (unwritten) result out.
    """
    if not has_fp8_product(x.device):
        return add_norm_reference(x, delta, weight, eps, choices=choices, quantise=quantise, scale_fmt=scale_fmt)
    return _add_norm_triton(x, delta, weight, eps, choices, quantise, scale_fmt)


def add_norm_reference(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    choices: torch.Tensor | None = None,
    quantise: bool = False,
    scale_fmt: str | None = None,
) -> Normed:
    """``add_norm`` in plain torch, for any device and dtype."""
    if delta is not None:
        x += delta if choices is None else weighted_sum(delta, choices).to(x.dtype)
    normed = functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return Normed(normed, act_quant(normed, scale_fmt=scale_fmt) if quantise else None)


def weighted_sum(results: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """(T, S, D) weighted by (T, S) and summed, float32 (T, D); what has no weight is not looked at."""
    weighted = torch.where(choices[..., None] == 0, 0.0, results.float() * choices[..., None])
    return weighted.sum(dim=1)


def _add_norm_triton(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    choices: torch.Tensor | None,
    quantise: bool,
    scale_fmt: str | None,
) -> Normed:
    T, D = x.shape
    assert x.stride(1) == 1, "rows may be strided, values may not"
    y = torch.empty(T, D, dtype=x.dtype, device=x.device)
    q = torch.empty(T, D, dtype=torch.float8_e4m3fn, device=x.device) if quantise else y
    s = torch.empty(T, -(-D // BLOCK), dtype=torch.float32, device=x.device) if quantise else y
    with torch.cuda.device(x.device):
        _add_norm_kernel[(T,)](
            x, x if delta is None else delta, x if choices is None else choices, weight, y, q, s, eps, D, x.stride(0),
            CHOICES=0 if choices is None else choices.shape[1], ADD=delta is not None, QUANTISE=quantise,
            UE8M0=scale_fmt == "ue8m0", GROUPS=triton.next_power_of_2(triton.cdiv(D, BLOCK)), BLOCK=BLOCK,
            LARGEST=FP8_MAX, LEAST_AMAX=SMALLEST_AMAX, num_warps=8 if D <= 4096 else 16, **overlapping(x.device),
        )  # fmt: skip
    return Normed(y, (q, s) if quantise else None)


@jit()
def _add_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    choices_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    q_ptr: tl.tensor,
    s_ptr: tl.tensor,
    eps: float,
    D: int,
    x_stride: int,
    CHOICES: tl.constexpr,
    ADD: tl.constexpr,
    QUANTISE: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One token, whole in the registers of one program: (GROUPS, BLOCK) values."""
    begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < D
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if CHOICES == 0:
            delta = tl.load(delta_ptr + token * D + column, mask=inside, other=0.0).to(tl.float32)
        else:
            delta = tl.zeros((GROUPS, BLOCK), dtype=tl.float32)
            for choice in tl.static_range(CHOICES):
                share = tl.load(choices_ptr + token * CHOICES + choice)
                place = delta_ptr + (token * CHOICES + choice) * D + column
                result = tl.load(place, mask=inside, other=0.0).to(tl.float32)
                delta += tl.where(share == 0.0, 0.0, result * share)
            delta = delta.to(x_ptr.dtype.element_ty).to(tl.float32)
        summed = (x + delta).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + token * x_stride + column, summed, mask=inside)
        x = summed.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / D
    y = (x * tl.rsqrt(mean + eps) * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * D + column, y, mask=inside)
    if QUANTISE:
        y = y.to(tl.float32)
        s = scale_of(tl.max(tl.abs(y), axis=1), LARGEST, LEAST_AMAX, UE8M0)
        q = tl.div_rn(y, s[:, None])
        tl.store(q_ptr + token * D + column, q.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(s_ptr + token * tl.cdiv(D, BLOCK) + group, s, mask=group < tl.cdiv(D, BLOCK))
