"""One row times a BF16 weight: nothing but reading, and without tensor cores there is less between two reads.

Shapes: x (1, K), weight (N, K), result (1, N).
"""

from __future__ import annotations  # without Triton the kernel's annotations must not be evaluated

import torch
from torch.nn import functional

from kernels.device import begin, has_fp8_product, jit, overlapping, tl, triton

# (outputs up to, rows of the weight a program, its columns a step, warps, stages), measured on an H200
CONFIGS = [(8192, 4, 512, 4, 3), (1 << 40, 16, 512, 4, 4)]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x W^T`` of x's dtype: by the kernel for one BF16 row on a GPU, else by torch (cuBLAS on a GPU)."""
    if x.numel() == x.shape[-1] and x.dtype == torch.bfloat16 and has_fp8_product(x.device):
        return matvec_triton(x, weight)
    return functional.linear(x, weight)


def matvec_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``linear`` of one row, summed in float32 and rounded once."""
    N, K = weight.shape
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    _, rows, step, warps, stages = next(config for config in CONFIGS if config[0] >= N)
    with torch.cuda.device(x.device):
        _matvec_kernel[(triton.cdiv(N, rows),)](
            x, weight, out, N, K, weight.stride(0),
            ROWS=rows, STEP=step, STAGES=stages, num_warps=warps, **overlapping(x.device),
        )  # fmt: skip
    return out


@jit()
def _matvec_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: int,
    K: int,
    w_stride: int,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    begin(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, STEP)
    w_row = w_ptr + tl.minimum(row, N - 1).to(tl.int64)[:, None] * w_stride + step[None, :]
    total = tl.zeros((ROWS, STEP), dtype=tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        within = step < K - k
        w = tl.load(w_row + k, mask=within[None, :], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + k + step, mask=within, other=0.0).to(tl.float32)
        total += w * x[None, :]
    tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=row < N)
